"""The hot log in Redis or Valkey: one Redis stream per stream, entry ids are positions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from penstock.core.masking import masked_url
from penstock.errors import PenstockError, ServerUnsuitable
from penstock.stores.hot_log import Fence
from penstock.stores.hot_log_keys import data_keys_key, log_key, record_key
from penstock.stores.queries import lua
from penstock.stores.redis_link import STUMBLES, Question, RedisLink, Script, new_client
from penstock.stores.redis_refusals import Refusals

VERSION_MIN = (6, 2)
FIELD = b"e"
SOCKET_SECONDS = 3.0
WAIT_SECONDS_MAX = 1.0
# A server that hangs is asked for a word now and then; whoever asks has other work to do.
PROBE_SECONDS = 0.5
APPEND_BYTES_MAX = 8 * 1024 * 1024
BYTES_MAX = 256 * 1024 * 1024
# The size of a log is looked at whenever such a part of what fits was written.
MEASURE_PARTS = 16
# A publisher that wrote or asked within this time counts as alive. It does so every second.
ALIVE_SECONDS = 5
_FAILURES = (redis.RedisError, OSError, *STUMBLES)


class RedisLog:
    """The hot log on one Redis or Valkey server. The URL may be redis://, rediss:// or unix://."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "penstock",
        length_max: int = 1_000_000,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._prefix = prefix
        self._length_max = length_max
        self._bytes_max = bytes_max
        self._unmeasured: dict[str, float] = {}
        """What was written to each log since its size was asked for."""
        self._address = masked_url(url)
        self._client = new_client(url, SOCKET_SECONDS)
        self._writer = RedisLink(self._client)
        # Connections of its own: a blocked read must not hold up an append, and its socket
        # has to be more patient than the longest wait.
        self._reader = RedisLink(new_client(url, WAIT_SECONDS_MAX + SOCKET_SECONDS))
        self._prober = RedisLink(new_client(url, PROBE_SECONDS, connect_seconds=PROBE_SECONDS))
        self._awaited: tuple[int, Question] | None = None
        """What a reader has asked that has turned to something else since."""
        self._is_silent = False
        """Whether the last command was not answered in time."""
        self._scripts = {name: Script(lua(name)) for name in ("open", "append", "restart", "last")}
        self._is_checked = False
        self._refusals = Refusals(self._address, prefix)

    @property
    def keeps_entries(self) -> bool:
        """Always."""
        return True

    def check(self) -> None:
        """Raise ServerUnsuitable unless the server is Redis 6.2 or newer, or Valkey."""
        self._require_voice()
        try:
            server = self._client.info("server")
        except redis.exceptions.NoPermissionError:
            # Who may not ask for the version may still be allowed everything that matters.
            server = {}
        except _FAILURES as error:
            raise self._failure(error) from error
        self._is_checked = True
        version = str(server.get("redis_version", ""))
        if server.get("server_name") == "valkey" or not version:
            return
        if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < VERSION_MIN:
            self._is_checked = False
            raise ServerUnsuitable(
                f"Redis {version} at {self._address} is too old: Penstock needs Redis 6.2 or "
                "newer, or Valkey. Nothing was lost; events wait in PostgreSQL."
            )

    def open(self, stream_name: str, fence: Fence, *, base: int) -> int | None:
        """Begin a term. Returns the last position; None: empty, to be filled from base + 1."""
        last = int(self._run("open", stream_name, *_words(fence), base, ALIVE_SECONDS))
        # Nobody knows how much a predecessor wrote.
        self._unmeasured[stream_name] = math.inf
        return None if last < 0 else last

    def restart(self, stream_name: str, fence: Fence, *, base: int) -> None:
        """Throw all entries away; the log is filled again from base + 1."""
        self._run("restart", stream_name, *_words(fence), base)

    def append(
        self,
        stream_name: str,
        fence: Fence,
        *,
        first: int,
        entries: Sequence[bytes],
        hole_last: int | None = None,
    ) -> int:
        """Append what is not there yet. Returns the last position that the log has now."""
        last, words = first - 1, _words(fence)
        for offset, part in _parts(entries):
            start = first + offset
            final = hole_last or start + len(part) - 1
            written = self._unmeasured.get(stream_name, math.inf) + sum(map(len, part))
            # Asking for the size costs more than a small batch.
            is_due = written > self._bytes_max / MEASURE_PARTS
            limits = (self._length_max, self._bytes_max if is_due else 0)
            last = int(self._run("append", stream_name, *words, *limits, start, final, *part))
            self._unmeasured[stream_name] = 0 if is_due else written
        return last

    def read(
        self,
        stream_name: str,
        *,
        after: int,
        count: int,
        wait_seconds: float,
        unless: int | None = None,
    ) -> list[tuple[int, bytes]]:
        """Positions and raw entries behind `after`, waiting for the first one if need be.

        It stops waiting when the descriptor `unless` becomes readable. One reader at a time does
        that, of one stream: the reply is left to its next wait.
        """
        if not self._is_checked:
            self.check()
        deadline = time.monotonic() + min(wait_seconds, WAIT_SECONDS_MAX)
        key = self._log_key(stream_name)
        found: list[tuple[int, bytes]] | None = []
        with self._asking(stream_name, key):
            if wait_seconds > 0 and (asked := self._asked(after)) is not None:
                found = self._answer(asked, after, deadline, unless)
            if found == []:
                question = self._ask_for(key, after, count, deadline)
                found = self._answer(question, after, deadline, unless)
        return found or []

    def _ask_for(self, key: str, after: int, count: int, deadline: float) -> Question:
        seconds = deadline - time.monotonic()
        # BLOCK 0 would wait for ever.
        block = ("BLOCK", max(1, int(seconds * 1000))) if seconds > 0 else ()
        words = ("XREAD", "COUNT", count, *block, "STREAMS", key, f"{after}-0")
        return self._reader.ask(*words, seconds=seconds)

    def _answer(
        self, question: Question, after: int, deadline: float, unless: int | None
    ) -> list[tuple[int, bytes]] | None:
        """What is there behind `after`; None: the answer is left to the next wait."""
        if not question.is_answered(deadline, unless):
            self._awaited = after, question
            return None
        found = [_entry(entry_id, fields) for entry_id, fields in _entries(question.reply())]
        # The question may be older than the reader's place.
        return [(position, raw) for position, raw in found if position > after]

    def _asked(self, after: int) -> Question | None:
        """What an earlier wait has left unanswered, if it asked for what is behind `after`."""
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return None
        asked_after, question = awaited
        if asked_after > after or question.is_stale:
            question.give_up()
            return None
        return question

    def last(self, stream_name: str, fence: Fence | None = None) -> int | None:
        """The last position; None where the log is empty.

        A publisher shows that it is there, and learns where an empty log of its term begins.
        """
        words = () if fence is None else _words(fence)[1:]
        with self._asking(stream_name):
            last = self._ask("last", stream_name, *words)
            return None if last is None else int(last)

    def incarnation(self, stream_name: str) -> str | None:
        """Which database writes the log, as its record has it; None where nobody does."""
        key = record_key(self._prefix, stream_name)
        with self._asking(stream_name, key):
            # Users that read may ask with this command alone.
            (found,) = self._writer.call("HMGET", key, "incarnation")
        return None if found is None else str(found.decode(errors="replace"))

    def trim(self, stream_name: str, *, through: int) -> int:
        """Remove entries up to a position, never the last one. Returns how many."""
        last = self.last(stream_name)
        if last is None:
            return 0
        # An empty log could not be told from a lost one.
        keep_from = min(through + 1, last)
        key = self._log_key(stream_name)
        with self._asking(stream_name, key):
            return int(self._writer.call("XTRIM", key, "MINID", f"{keep_from}-0"))

    def read_keys(self, stream_name: str) -> bytes | None:
        """The copy of a stream's wrapped data keys; None where there is none."""
        key = data_keys_key(self._prefix, stream_name)
        with self._asking(stream_name, key):
            copy: bytes | None = self._writer.call("GET", key)
        return copy

    def write_keys(self, stream_name: str, copy: bytes) -> None:
        """Put a copy of the data keys in the place of the one that is there."""
        key = data_keys_key(self._prefix, stream_name)
        with self._asking(stream_name, key):
            self._writer.call("SET", key, copy)

    def close(self) -> None:
        """Give connections back; the next call opens new ones."""
        if self._awaited is not None:
            self._awaited[1].give_up()
            self._awaited = None
        self._client.close()
        self._writer.close()
        self._reader.close()
        self._prober.close()
        self._is_checked = False

    def _log_key(self, stream_name: str) -> str:
        return log_key(self._prefix, stream_name)

    def _run(self, script: str, stream_name: str, *arguments: str | int | bytes) -> str:
        """Run a script that answers with a status. Returns its text, or raises what it says."""
        with self._asking(stream_name):
            status, text = self._ask(script, stream_name, *arguments)
            told = text.decode(errors="replace")
            if status == b"OK":
                return str(told)
            raise self._refusals.outcome(status.decode(), told, stream_name)

    def _ask(self, script: str, stream_name: str, *arguments: str | int | bytes) -> Any:
        if not self._is_checked:
            self.check()
        keys = [self._log_key(stream_name), record_key(self._prefix, stream_name)]
        return self._writer.run(self._scripts[script], keys, *arguments)

    @contextmanager
    def _asking(self, stream_name: str, key: str | None = None) -> Iterator[None]:
        """From a question, about one key or log and record, until its answer is understood."""
        self._require_voice()
        try:
            yield
        except _FAILURES as error:
            raise self._failure(error, stream_name, key) from error

    def _require_voice(self) -> None:
        """A server that has left somebody waiting has to say a word before it is asked more."""
        if self._is_silent:
            try:
                self._prober.call("PING")
            except _FAILURES as error:
                raise self._failure(error) from error
            self._is_silent = False

    def _failure(self, error: Exception, *place: str | None) -> PenstockError:
        self._is_silent = isinstance(error, redis.TimeoutError)
        return self._refusals.failure(error, *place)


def _words(fence: Fence) -> tuple[str, str, int]:
    return fence.origin, fence.incarnation, fence.term


def _parts(entries: Sequence[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """The batch in pieces that a server takes in one command, each with its offset."""
    start, size = 0, 0
    for index, entry in enumerate(entries):
        if index > start and size + len(entry) > APPEND_BYTES_MAX:
            yield start, list(entries[start:index])
            start, size = index, 0
        size += len(entry)
    if entries:
        yield start, list(entries[start:])


def _entries(reply: Any) -> list[tuple[bytes, Sequence[bytes]]]:
    """The entries of one stream, out of either protocol's shape of a reply."""
    if not reply:
        return []
    if isinstance(reply, dict):
        (entries,) = reply.values()
        return list(entries)
    ((_, entries),) = reply
    return list(entries)


def _entry(entry_id: bytes, fields: Sequence[bytes]) -> tuple[int, bytes]:
    position, _, sequence = entry_id.partition(b"-")
    is_ours = sequence == b"0" and len(fields) == 2 and fields[0] == FIELD
    return int(position), fields[1] if is_ours else b""
