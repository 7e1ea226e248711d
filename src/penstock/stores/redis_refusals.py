"""What Redis refuses and why, in our words: what waiting cures, and whom it concerns."""

from __future__ import annotations

import re

import redis

from penstock.errors import PenstockError, ServerUnavailable, ServerUnsuitable, StreamForeign
from penstock.stores.hot_log import HotLogClosed, HotLogGap, HotLogTermOver, HotLogUnusable
from penstock.stores.hot_log_keys import log_key, record_key
from penstock.stores.redis_link import STUMBLES

# Terms grow by one with each lease, so that nobody was given a larger one. A publisher passes what
# it finds below: scripts count exactly that far, and a bigint has room for all that follow.
TERM_MAX = 2**48
# Replies that waiting cures: as the client's own classes, or as codes in the text.
_PASSING = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.MasterDownError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
)
_PASSING_CODES = ("OOM", "READONLY", "MASTERDOWN", "MISCONF", "NOREPLICAS", "BUSY ", "UNBLOCKED")
# What a script meets where a field of its record is not what a script wrote there.
_RECORD_BROKEN = re.compile(r"user_script:\d+: attempt to")


class Refusals:
    """Names errors of the hot log on one server."""

    def __init__(self, address: str, prefix: str) -> None:
        self._address = address
        self._prefix = prefix

    def failure(
        self, error: Exception, stream_name: str | None = None, key: str | None = None
    ) -> PenstockError:
        """What went wrong with a question: about one key, log and record, or the server."""
        reply = str(error)
        if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
            return ServerUnsuitable(
                f"Redis at {self._address} refuses this user: {reply}. Nothing was lost; "
                f"check name, password and permissions: it needs the keys {self._prefix}:*."
            )
        if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError):
            return ServerUnavailable(
                f"Redis at {self._address} cannot be reached: {reply} Nothing was lost; events "
                "wait in PostgreSQL until it is back."
            )
        if is_passing(error):
            return ServerUnavailable(
                f"Redis at {self._address} accepts nothing for now: {reply} Nothing was lost; "
                "events wait in PostgreSQL."
            )
        if isinstance(error, (redis.exceptions.InvalidResponse, *STUMBLES)):
            return ServerUnsuitable(
                f"What is at {self._address} does not answer like Redis: {reply}. Nothing was "
                "lost; correct redis_url."
            )
        if stream_name is not None and (told := self._unusable(error, stream_name, key)):
            return told
        return ServerUnsuitable(f"Redis at {self._address} refuses: {reply}")

    def _unusable(
        self, error: Exception, stream_name: str, key: str | None
    ) -> HotLogUnusable | None:
        """What concerns one stream alone."""
        reply = str(error)
        if isinstance(error, redis.exceptions.AskError):
            return HotLogUnusable(
                f"Redis at {self._address} is a cluster, and the log of {stream_name} belongs on "
                f"another node ({reply}). Nothing was lost; PostgreSQL serves this stream. For a "
                "hot log of all streams name a Redis that is no cluster in redis_url."
            )
        if "WRONGTYPE" in reply:
            return HotLogUnusable(
                f"The key {key or f'{log_key(self._prefix, stream_name)} or its :meta'} at "
                f"{self._address} is not Penstock's. Nothing was touched; remove it, or set "
                "another redis_prefix."
            )
        if _RECORD_BROKEN.search(reply):
            return self._unreadable(stream_name, reply)
        return None

    def _unreadable(self, stream_name: str, what: str) -> HotLogUnusable:
        key = record_key(self._prefix, stream_name)
        return HotLogUnusable(
            f"The record of the hot log of {stream_name} at {self._address} was not written by "
            f"Penstock: {what}. Nothing was lost; delete the key {key}, and the log is opened anew."
        )

    def outcome(self, status: str, text: str, stream_name: str) -> PenstockError:
        """What a script refused, as an error."""
        if status == "STALE" and not _is_term(text):
            return self._unreadable(stream_name, f"its term is {text[:40]!r}")
        return _outcome(status, text, stream_name)


def is_passing(error: Exception) -> bool:
    """Whether a server refuses for now what it will accept later."""
    reply = str(error)
    return isinstance(error, _PASSING) or any(code in reply for code in _PASSING_CODES)


def _is_term(text: str) -> bool:
    """Whether a publisher may have had this term."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(TERM_MAX))
    return is_number and int(text) <= TERM_MAX


def _outcome(status: str, text: str, stream_name: str) -> PenstockError:
    match status:
        case "FOREIGN":
            return StreamForeign(
                f"The hot log of {stream_name} is written by another database (origin {text}). "
                "Nothing was touched. A restored copy needs a Redis or a redis_prefix of its own."
            )
        case "COPY":
            return StreamForeign(
                f"The hot log of {stream_name} is written by another copy of this database "
                f"({text}: cluster, database, timeline). Nothing was touched. A copy needs a Redis "
                "or a redis_prefix of its own. A standby that took over is accepted once the "
                "other is silent; a database that has replaced it for good, once the key "
                f"…:{{{stream_name}}}:meta is deleted. Leave …:log there: it shows which positions "
                "were given out."
            )
        case "STALE":
            return HotLogTermOver(stream_name, int(text))
        case "GAP":
            return HotLogGap(stream_name, int(text))
        case "CLOSED":
            return HotLogClosed(f"The hot log of {stream_name} has to be opened first.")
    raise AssertionError(f"a script answered {status} {text}")
