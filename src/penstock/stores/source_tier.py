"""The tiers below the hot log of another service's stream: its database, or nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Protocol

import psycopg

from penstock.core.mac import MacKeys
from penstock.core.masking import masked_url
from penstock.core.sources import Source
from penstock.core.wire import Entry, Hole, decode_entry
from penstock.errors import (
    ArchiveDamaged,
    MalformedEntry,
    PositionMissing,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.stores.cold_tier import ColdTier
from penstock.stores.hot_log import HotLog
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.outage import Outage
from penstock.stores.postgres import connect, is_lost
from penstock.stores.queries import Queries
from penstock.stores.sources import Bounds, ConsumerProgress, Pin
from penstock.stores.warm_tier import WarmTier
from penstock.stores.worker_connection import cut

# A database that takes longer is away: its stream's consumers have better to do than to wait.
ANSWER_SECONDS_MAX = 10.0
# How many entries of the hot log are looked at for one that is the producer's.
PEEK_ENTRIES = 100
SCAN_ENTRIES = 1000


class SourceTier(WarmTier, Protocol):
    """What a consumer of another service's stream needs besides its hot log."""

    def bounds(self) -> Bounds:
        """What can be read now. Raises ServerUnavailable."""

    def position_at(self, moment: datetime) -> int | None:
        """The first event sent at or after a moment; None where there is none yet."""

    def record(self, consumer: str, progress: ConsumerProgress, *, is_new: bool = False) -> None:
        """Tell the producer how far a consumer is. Raises only for a new one: it is told again."""

    def close(self) -> None:
        """Give connections back; must not raise."""


class SourceWarmTier:
    """The producer's database, on a connection of its own that reads only."""

    def __init__(self, consumer: str, source: Source, pin: Pin, seen: Bounds) -> None:
        assert source.source_url is not None
        self._url = source.source_url
        self._consumer = consumer
        self._stream = {"stream_name": source.stream_name}
        self._pin = pin
        self._given_keys = source.keys
        self._keys = MacKeyTable(source.source_schema)
        self._are_keys_asked = False
        self._found_keys: MacKeys | None = None
        self._head = seen.head
        self._outbox_sql = Queries("outbox.sql", source.source_schema)
        self._start_sql = Queries("start.sql", source.source_schema)
        self._share_sql = Queries("share.sql", source.source_schema)
        self._lock = threading.RLock()
        self._connection: psycopg.Connection[Any] | None = None
        self._is_right_database = False
        place = f"the database of {source.stream_name}"
        self._outage = Outage(consumer, place)
        self._recording = Outage(consumer, f"record_remote_checkpoint in {place}")

    # ── as a warm tier ────────────────────────────────────────────────────────────────────────

    def origin(self) -> str | None:
        """The pinned database; at the first read the one that source_url leads to."""
        if (pinned := self._pin.read()) is None:
            found, is_numbered = self._found_origin()
            # Pinned where nothing was ever read, it could not be led to the right database.
            pinned = self._pin.set(found) if is_numbered else found
        return pinned

    def keys(self) -> MacKeys:
        """Those that were given; asked again, because they do not suffice, the producer's too."""
        given, is_first = self._given_keys, not self._are_keys_asked
        self._are_keys_asked = True
        if given is not None and is_first:
            return given
        try:
            with self._asking() as connection:
                self._found_keys = self._keys.read(connection)
        except ServerUnavailable:
            if given is None:
                raise
        return self.keys_seen()

    def keys_seen(self) -> MacKeys:
        """As `bounds` saw them, with those that were given: these are this service's to retire."""
        given, found = self._given_keys, self._found_keys
        if found is None:
            assert given is not None, "what was never found is asked for"
            return given
        return MacKeys(found.key_id, {**(given.secrets if given else {}), **found.secrets})

    def head(self) -> int:
        """The last position given out, as `bounds` saw it: readers of the hot log ask nobody."""
        return self._head

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Out of the producer's outbox. Raises PositionMissing where that is another one's."""
        with self._lock:
            if not self._is_right_database or self._connection is None:
                self._require_pinned()
            return self._ask(
                self._outbox_sql["read"], {**self._stream, "after": after, "count": count}
            )

    def _require_pinned(self) -> None:
        (found, is_numbered), pinned = self._found_origin(), self.origin()
        if found != pinned:
            raise PositionMissing(
                f"source_url leads to another database (origin {found}) than the one that "
                f"{self._consumer} has read so far ({pinned}), so its positions mean other "
                "events. Nothing was skipped. Correct source_url; for a producer that was "
                "replaced for good, register a consumer under a new name."
            )
        self._is_right_database = is_numbered

    def _found_origin(self) -> tuple[str, bool]:
        ((origin, is_numbered),) = self._ask(self._share_sql["origin"], self._stream)
        return str(origin), is_numbered

    # ── for the start, and for the producer ───────────────────────────────────────────────────

    def bounds(self) -> Bounds:
        """What the outbox holds."""
        with self._asking() as connection:
            rows = connection.execute(self._start_sql["first_retained"], self._stream).fetchall()
            if self._found_keys is not None:
                self._found_keys = self._keys.read(connection)
        bounds = Bounds(*rows[0]) if rows else Bounds(1, 0)
        self._head = bounds.head
        return bounds

    def position_at(self, moment: datetime) -> int | None:
        """By the time at which it was sent."""
        query = self._outbox_sql["position_at_time"]
        ((position,),) = self._ask(query, {**self._stream, "moment": moment})
        return None if position is None else int(position)

    def record(self, consumer: str, progress: ConsumerProgress, *, is_new: bool = False) -> None:
        """From now on the producer keeps what comes behind."""
        if not (is_new or self._recording.is_worth_trying):
            return
        parameters = {**self._stream, "consumer": consumer, **progress._asdict()}
        try:
            self._ask(self._share_sql["record"], parameters, read_only=False)
        except ServerUnavailable as error:
            if is_new:
                # Who may not enter itself may see no rows either, and would start behind them all.
                raise
            if not self._outage.is_going_on:
                self._recording.begin(error)
            return
        self._recording.end()

    def close(self) -> None:
        """The next question connects again."""
        with self._lock:
            connection, self._connection = self._connection, None
            self._is_right_database = False
            if connection is not None:
                with suppress(psycopg.Error):
                    connection.close()

    # ── asking ────────────────────────────────────────────────────────────────────────────────

    def _ask(
        self, query: str, parameters: dict[str, Any], *, read_only: bool = True
    ) -> list[tuple[Any, ...]]:
        with self._asking(read_only=read_only) as connection:
            return connection.execute(query, parameters).fetchall()

    @contextmanager
    def _asking(self, *, read_only: bool = True) -> Iterator[psycopg.Connection[Any]]:
        """A short transaction; whatever goes wrong is ServerUnavailable, and tried again."""
        with self._lock:
            if not self._outage.is_worth_trying:
                raise ServerUnavailable(f"{masked_url(self._url)} did not answer a moment ago.")
            try:
                with self._transaction(read_only=read_only) as connection:
                    yield connection
            except (ServerUnavailable, ServerUnsuitable, psycopg.Error) as error:
                raise self._translated(error) from error
            self._outage.end()

    @contextmanager
    def _transaction(self, *, read_only: bool) -> Iterator[psycopg.Connection[Any]]:
        connection = self._connection
        if connection is None or connection.closed:
            self._is_right_database = False
            connection = connect(self._url, f"penstock {self._consumer}")
            # Poolers in transaction mode lose prepared statements.
            connection.prepare_threshold = None
            self._connection = connection
        # A server that stands still answers nothing and closes nothing.
        timer = threading.Timer(ANSWER_SECONDS_MAX, cut, (connection,))
        timer.daemon = True
        timer.start()
        try:
            connection.read_only = read_only
            with connection.transaction():
                yield connection
        finally:
            timer.cancel()

    def _translated(self, error: Exception) -> ServerUnavailable:
        if isinstance(error, ServerUnavailable) or is_lost(error):
            problem = ServerUnavailable(
                f"{masked_url(self._url)} (source_url) cannot be asked: {str(error).strip()} "
                "Nothing was lost; what the hot log holds is handled meanwhile."
            )
            self.close()
            self._outage.begin(problem)
            return problem
        # Without the statements of ours that it went through.
        told = getattr(getattr(error, "diag", None), "message_primary", None) or str(error).strip()
        return ServerUnavailable(
            f"{masked_url(self._url)} (source_url) refuses: {told}. Nothing was lost. On the "
            "producer's side, `penstock streams share` prints what its role needs; the policy of a "
            "restricted stream has to name the role too."
        )


class NoWarmTier:
    """Nothing but the hot log: what that has dropped or what was forged there stops a consumer."""

    def __init__(
        self,
        consumer: str,
        source: Source,
        pin: Pin,
        seen: Bounds,
        hot_log: HotLog,
        *,
        cold_tier: ColdTier | None,
    ) -> None:
        keys = source.keys
        assert keys is not None, "without its keys nothing of a hot log can be trusted"
        self._consumer = consumer
        self._stream_name = source.stream_name
        self._given_keys = keys
        self._pin = pin
        self._head = seen.head
        self._hot_log = hot_log
        self._cold_tier = cold_tier

    def origin(self) -> str | None:
        """The pinned database; at the first read the one that wrote the hot log."""
        pinned = self._pin.read()
        if pinned is not None:
            return pinned
        record = self._peek()
        return None if record is None else self._pin.set(record.origin)

    def keys(self) -> MacKeys:
        """Those that were given."""
        return self._given_keys

    def keys_seen(self) -> MacKeys:
        """The same."""
        return self._given_keys

    def head(self) -> int:
        """The last position that the hot log, or the archive, has ever shown."""
        return self._head

    def read(self, after: int, count: int) -> list[tuple[int, str]]:  # noqa: ARG002 - the protocol's
        """Nothing is there to be read. Raises PositionMissing."""
        raise PositionMissing(
            f"{self._stream_name}/{after + 1} is not in the hot log, or not as its publisher "
            f"wrote it, and no other tier was given. {self._consumer} has skipped nothing and "
            "waits. Give pipeline.source(…) a source_url, or move on with `penstock consumers "
            f"seek {self._consumer} --to earliest`."
        )

    def bounds(self) -> Bounds:
        """What the hot log holds."""
        # The end before the beginning: what is published in between must not seem to be gone.
        self._head = max(self._head, self._last(), self._last_archived())
        record = self._peek()
        if record is None:
            # Empty: new, or lost a moment ago. What was seen before says which.
            return Bounds(self._head + 1, self._head)
        if isinstance(record, Hole):
            first, last = record.first, record.last
        else:
            first = last = record.position
        # What was there before may have been trimmed away meanwhile.
        self._head = max(self._head, last)
        return Bounds(first, self._head)

    def position_at(self, moment: datetime) -> int | None:
        """By looking through the hot log."""
        after, moment_ms = 0, moment.timestamp() * 1000
        while raw := self._read_hot(after, SCAN_ENTRIES):
            for record in self._valid(raw):
                if isinstance(record, Entry) and record.created_at_ms >= moment_ms:
                    return record.position
            after = raw[-1][0]
        return None

    def record(self, consumer: str, progress: ConsumerProgress, *, is_new: bool = False) -> None:
        """There is nobody to tell."""

    def close(self) -> None:
        """The hot log is its owner's to close."""

    def _peek(self) -> Entry | Hole | None:
        """The first that the producer has signed."""
        return next(self._valid(self._read_hot(0, PEEK_ENTRIES)), None)

    def _last(self) -> int:
        """The last position, if the producer has signed it: anybody may write a higher one."""
        last = self._hot_log.last(self._stream_name) or 0
        return last if any(self._valid(self._read_hot(max(0, last - 1), 1))) else 0

    def _last_archived(self) -> int:
        """What is archived was given out, also where the hot log is lost and nobody fills it."""
        # What cannot be read is told by whoever needs it.
        with suppress(ArchiveDamaged, ServerUnavailable, ServerUnsuitable):
            bounds = None if self._cold_tier is None else self._cold_tier.bounds()
            return 0 if bounds is None else bounds[1]
        return 0

    def _read_hot(self, after: int, count: int) -> list[tuple[int, bytes]]:
        return self._hot_log.read(self._stream_name, after=after, count=count, wait_seconds=0.0)

    def _valid(self, raw: list[tuple[int, bytes]]) -> Iterator[Entry | Hole]:
        for position, entry in raw:
            with suppress(MalformedEntry):
                yield decode_entry(self._stream_name, position, entry, self._given_keys)
