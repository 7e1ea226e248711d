"""Makes the hot log hold what PostgreSQL has numbered: every position once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.leases import Lease
from penstock.core.settings import Settings
from penstock.core.wire import decode_entry, encode_entry
from penstock.errors import HotLogAhead, MalformedEntry
from penstock.pipeline.leasing import Connection
from penstock.stores.hot_log import HotLog, HotLogClosed, HotLogGap
from penstock.stores.outbox import Outbox
from penstock.stores.streams import Streams
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

REFILL_BATCHES_MAX = 4
TAIL_ENTRIES_MAX = 10
Rows = Sequence[tuple[int, str]]


@dataclass(slots=True)
class Publication:
    """A leased stream: how far it is numbered, and how far the hot log follows."""

    lease: Lease
    origin: str
    head: int
    published: int
    last: int | None = None
    """The last position in the hot log; None: the log has to be opened."""
    is_unchecked: bool = False
    """Whether the hot log has not been asked for a while."""
    has_more: bool = True
    """Whether the last batch was full, or none was taken yet."""
    needs_sweep: bool = False
    """Whether to look below the id floor at the next numbering."""
    refusal: str | None = None
    retry_at: float = 0.0

    @property
    def stream_name(self) -> str:
        """The stream's name."""
        return self.lease.stream_name

    @property
    def is_unconfirmed(self) -> bool:
        """Whether the hot log reaches further than PostgreSQL has recorded."""
        return self.last is not None and self.published < self.last

    @property
    def is_behind(self) -> bool:
        """Whether the hot log lacks something that has a position."""
        return self.last is None or self.last < self.head


class LogWriter:
    """Appends numbered events, fills what a server lost, and refuses what it cannot explain."""

    def __init__(
        self, settings: Settings, connection: Connection, hot_log: HotLog, outbox: Outbox
    ) -> None:
        self._connection = connection
        self._hot_log = hot_log
        self._outbox = outbox
        self._streams = Streams(settings.schema)
        self._batch_size = settings.publish_batch_size
        self._length_max = settings.hot_log_length_max

    def follow(self, publication: Publication, rows: Rows) -> int:
        """Bring the log up to the head, in bounded time. Returns how many entries it refilled.

        `rows` are events that were numbered just now. Raises StreamForeign, HotLogAhead,
        LeaseLost, and what servers raise; the log has to be opened again after any of these.
        """
        last, publication.last = publication.last, None
        if last is not None and not rows and publication.is_unchecked:
            last = self._checked(publication, last)
        if last is None:
            last = self._open(publication)
        try:
            if rows and rows[0][0] == last + 1:
                publication.last = self._append(publication, rows)
                return 0
            return self._refill(publication, last)
        except (HotLogClosed, HotLogGap):
            # Entries went away since we looked. The next round opens the log and looks again.
            publication.last = None
            return 0

    def _checked(self, publication: Publication, last: int) -> int | None:
        """The last position if the log agrees; None where it has to be opened again."""
        publication.is_unchecked = False
        return last if self._hot_log.last(publication.stream_name) == last else None

    def _open(self, publication: Publication) -> int:
        """Fence the log for our term and compare it with the books. Returns where to go on."""
        name, term = publication.stream_name, publication.lease.term
        base = self._streams.refill_base(self._connection, name, self._length_max)
        last = self._hot_log.open(name, origin=publication.origin, term=term, base=base)
        emit(signals.HotLogOpened(name, term, base))
        # Only now: until the log was fenced, a predecessor could still number and append.
        state = self._streams.read(self._connection, name)
        publication.head, publication.published = state.head, state.published
        publication.is_unchecked = False
        if last is not None and last > state.head:
            self._refuse_if_ours(publication, last)
            self._restart(publication, base, f"its last id, {last}-0, is no event of this database")
            return base
        if (last or 0) < state.published:
            emit(signals.HotLogLost(name, last or 0, state.published))
        return base if last is None else last

    def _refuse_if_ours(self, publication: Publication, last: int) -> None:
        """Raise HotLogAhead if the tail is an entry that this database made and has forgotten."""
        tail = self._hot_log.read(
            publication.stream_name, after=last - 1, count=TAIL_ENTRIES_MAX, wait_seconds=0.0
        )
        for position, raw in tail:
            try:
                entry = decode_entry(publication.stream_name, position, raw)
            except MalformedEntry:
                continue
            if entry.origin == publication.origin:
                raise HotLogAhead(
                    f"The hot log of {publication.stream_name} ends at {last}, but PostgreSQL has "
                    f"given out positions up to {publication.head} only: it lost commits, or was "
                    "restored from a backup. This stream is not published, so that no position "
                    "is given to a second event; new events wait in the outbox."
                )

    def _restart(self, publication: Publication, base: int, reason: str) -> None:
        self._hot_log.restart(
            publication.stream_name,
            origin=publication.origin,
            term=publication.lease.term,
            base=base,
        )
        emit(signals.HotLogRebuilt(publication.stream_name, reason))

    def _refill(self, publication: Publication, last: int | None) -> int:
        """Append numbered events that the log lacks, a few batches at a time."""
        refilled = 0
        for _ in range(REFILL_BATCHES_MAX):
            if last is None or last >= publication.head:
                break
            rows = _contiguous(
                self._outbox.read(self._connection, publication.stream_name, last, self._batch_size)
            )
            if not rows or rows[0][0] != last + 1:
                base = rows[0][0] - 1 if rows else publication.head
                self._restart(publication, base, f"the outbox no longer holds position {last + 1}")
                last = base
                continue
            last = self._append(publication, rows)
            refilled += len(rows)
        publication.last = last
        return refilled

    def _append(self, publication: Publication, rows: Rows) -> int | None:
        """Append. Returns the last position; None where the log is ahead of us."""
        name = publication.stream_name
        last = self._hot_log.append(
            name,
            origin=publication.origin,
            term=publication.lease.term,
            first=rows[0][0],
            entries=[encode_entry(body) for _, body in rows],
        )
        if last > publication.head:
            return None
        publication.is_unchecked = False
        emit(signals.BatchAppended(name, last, len(rows)))
        return last

    def confirm(self, publication: Publication) -> None:
        """Record how far the log reaches, if that is news. May come late: nobody waits for it."""
        if publication.is_unconfirmed:
            assert publication.last is not None
            self._streams.confirm(self._connection, publication.stream_name, publication.last)
            publication.published = publication.last
            emit(signals.BatchConfirmed(publication.stream_name, publication.last))


def _contiguous(rows: Rows) -> Rows:
    """The rows up to the first missing position: entries are appended by counting."""
    for index, (position, _) in enumerate(rows):
        if position != rows[0][0] + index:
            return rows[:index]
    return rows
