"""Makes the hot log hold what PostgreSQL has numbered: every position once, in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.core.leases import Lease
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.wire import Hole, decode_entry, decode_record, encode_entry, is_hole, sent_us_of
from penstock.errors import MalformedEntry, ServerUnavailable
from penstock.pipeline.leasing import Connection
from penstock.stores.hot_log import Fence, HotLog, HotLogClosed, HotLogGap
from penstock.stores.key_copies import KeyCopies, KeyShelf
from penstock.stores.mac_keys import keys_for
from penstock.stores.outage import Outage
from penstock.stores.outbox import Outbox
from penstock.stores.streams import Streams
from penstock.telemetry import signals, tracing
from penstock.telemetry.bus import emit

REFILL_BATCHES_MAX = 4
Rows = Sequence[tuple[int, str]]


@dataclass(slots=True)
class Publication:
    """A leased stream: how far it is numbered, and how far the hot log follows."""

    lease: Lease
    origin: str
    head: int
    published: int
    fence: Fence | None = None
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
    obstacle: Outage = field(init=False)
    """Something else in the place of the hot log, which is then as good as away."""

    def __post_init__(self) -> None:
        self.obstacle = Outage("publisher", f"the hot log of {self.stream_name}")

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
    """Appends numbered events, fills what a server lost, and replaces what it cannot explain."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        hot_log: HotLog,
        outbox: Outbox,
        streams: Streams,
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._hot_log = hot_log
        self._outbox = outbox
        self._streams = streams
        self._batch_size = settings.publish_batch_size
        self._keys: MacKeys | None = None
        self._signed: dict[tuple[str, int, str], bytes] = {}
        """Entries that were signed ahead, by everything that they are made of."""
        self._opened: set[str] = set()
        self._copies = (
            KeyCopies(settings, hot_log, "publisher") if isinstance(hot_log, KeyShelf) else None
        )

    def renew_keys(self) -> None:
        """A key that was added meanwhile signs from here on; data keys are copied as they are."""
        self._keys = keys_for(self._settings, self._connection)
        self._signed = {}
        if self._copies is not None and self._opened:
            # A server that is away has been noticed, or will be, where that matters more.
            with suppress(ServerUnavailable):
                self._copies.refresh_all(self._connection, self._opened, self._keys)

    def sign(self, stream_name: str, rows: Rows) -> None:
        """Sign events ahead, which are about to be durable; `follow` finds them if they are."""
        if self._keys is not None and self._hot_log.keeps_entries:
            self._signed = {
                (stream_name, place, body): encode_entry(stream_name, place, body, self._keys)
                for place, body in rows
            }

    def follow(self, publication: Publication, rows: Rows) -> int:
        """Bring the log up to the head, in bounded time. Returns how many entries it refilled.

        `rows` are events that were numbered just now. Raises StreamForeign, LeaseLost, and what
        servers raise; the log has to be opened again after any of these.
        """
        last, publication.last = publication.last, None
        if last is not None and not rows and publication.is_unchecked:
            last = self._checked(publication, last)
        try:
            if last is None:
                last = self._open(publication)
            if rows and rows[0][0] == last + 1:
                publication.last = self._append(publication, last, rows, is_fresh=True)
                return 0
            return self._refill(publication, last)
        except (HotLogClosed, HotLogGap):
            # Entries went away since we looked. The next round opens the log and looks again.
            publication.last = None
            return 0

    def _checked(self, publication: Publication, last: int) -> int | None:
        """The last position if the log agrees; None where it has to be opened again."""
        publication.is_unchecked = False
        found = self._hot_log.last(publication.stream_name, publication.fence)
        return last if found == last else None

    def _open(self, publication: Publication) -> int:
        """Fence the log for our term and compare it with the books. Returns where to go on."""
        name, term = publication.stream_name, publication.lease.term
        if self._keys is None:
            self.renew_keys()
        base = self._streams.refill_base(self._connection, name, self._settings.hot_log_length_max)
        incarnation = self._streams.incarnation(self._connection)
        publication.fence = Fence(publication.origin, incarnation, term)
        last = self._hot_log.open(name, publication.fence, base=base)
        emit(signals.HotLogOpened(name, term, base))
        self._opened.add(name)
        # Only now: until the log was fenced, a predecessor could still number and append.
        state = self._streams.read(self._connection, name)
        publication.head, publication.published = state.head, state.published
        publication.is_unchecked = False
        if last is not None and last > state.head:
            self._replace(publication, base, last)
            return base
        if last is not None and self._streams.is_in_hole(self._connection, name, last):
            self._restart(publication, base, f"it ends at {last}, which lies in a hole")
            return base
        if last is not None and not self._is_as_numbered(publication, last):
            self._restart(publication, base, f"its entry at {last} is not the one in PostgreSQL")
            return base
        if (last or 0) < state.published:
            emit(signals.HotLogLost(name, last or 0, state.published))
        return base if last is None else last

    def _is_as_numbered(self, publication: Publication, last: int) -> bool:
        """Whether the log ends with the outbox's event. Copies that went apart share positions."""
        name = publication.stream_name
        rows = self._outbox.read(self._connection, name, last - 1, 1)
        page = self._hot_log.read(name, after=last - 1, count=1, wait_seconds=0.0)
        if not rows or not page or not rows[0][0] == page[0][0] == last:
            # Pruned or trimmed: there is nothing to compare.
            return True
        return page[0][1].partition(b"\n")[2] == rows[0][1].encode()

    def _replace(self, publication: Publication, base: int, last: int) -> None:
        """Begin a log anew that is ahead of PostgreSQL."""
        reached = self._last_signed(publication)
        if reached is None:
            reason = f"its last id, {last}-0, is no event of this database"
        else:
            reason = f"it reaches {reached}, and PostgreSQL has given out {publication.head} only"
            self.step_over(
                publication, reached, f"the hot log reached {reached}: PostgreSQL lost commits"
            )
        self._restart(publication, base, reason)

    def _last_signed(self, publication: Publication) -> int | None:
        """The last entry behind the head that this database made and has forgotten."""
        assert self._keys is not None
        name, reached, after = publication.stream_name, None, publication.head
        while page := self._hot_log.read(
            name, after=after, count=self._batch_size, wait_seconds=0.0
        ):
            after = page[-1][0]
            signed = [
                position for position, raw in page if self._is_ours(publication, position, raw)
            ]
            if not signed:
                break
            reached = signed[-1]
        return reached

    def _is_ours(self, publication: Publication, position: int, raw: bytes) -> bool:
        assert self._keys is not None
        try:
            record = decode_entry(publication.stream_name, position, raw, self._keys)
        except MalformedEntry:
            return False
        return record.origin == publication.origin

    def step_over(self, publication: Publication, reached: int, reason: str) -> None:
        """Leave a hole where positions may be in use that PostgreSQL does not know."""
        first, last = self._streams.step_over(
            self._connection, publication.lease, reached=reached, reason=reason
        )
        publication.head = last
        emit(signals.PositionsSkipped(publication.stream_name, first, last, reason))

    def _restart(self, publication: Publication, base: int, reason: str) -> None:
        assert publication.fence is not None
        self._hot_log.restart(publication.stream_name, publication.fence, base=base)
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
            first = _first_position(publication.stream_name, rows)
            if first is None or first > last + 1:
                base = publication.head if first is None else first - 1
                self._restart(publication, base, f"the outbox no longer holds position {last + 1}")
                last = base
                continue
            last = self._append(publication, last, rows)
            refilled += len(rows)
        publication.last = last
        return refilled

    def _append(
        self, publication: Publication, last: int, rows: Rows, *, is_fresh: bool = False
    ) -> int | None:
        """Append events, or one hole. Returns the last position; None where the log is ahead."""
        assert self._keys is not None
        assert publication.fence is not None
        name, (position, body) = publication.stream_name, rows[0]
        signed, self._signed = self._signed, {}
        with _span(name, rows, is_fresh=is_fresh):
            last = self._hot_log.append(
                name,
                publication.fence,
                first=last + 1,
                hole_last=position if is_hole(body) else None,
                entries=[
                    signed.get((name, place, text)) or encode_entry(name, place, text, self._keys)
                    for place, text in rows
                ],
            )
        if last > publication.head:
            return None
        publication.is_unchecked = False
        again = max(0, min(position + len(rows) - 1, publication.published) - position + 1)
        emit(signals.BatchAppended(name, last, len(rows), again, sent_us_of(body)))
        return last

    def confirm(self, publication: Publication) -> None:
        """Record how far the log reaches, if that is news. May come late: nobody waits for it."""
        if publication.is_unconfirmed:
            assert publication.last is not None
            self._streams.confirm(self._connection, publication.stream_name, publication.last)
            count = publication.last - publication.published
            publication.published = publication.last
            emit(signals.BatchConfirmed(publication.stream_name, publication.last, count))

    def announce(self, publication: Publication, rows: Rows) -> None:
        """PostgreSQL alone: readers wait for a notification, and numbered is published."""
        publication.last = publication.head
        if publication.head > publication.published:
            with _span(publication.stream_name, rows, is_fresh=True):
                self._outbox.announce(self._connection)
                self._streams.confirm(self._connection, publication.stream_name, publication.head)
            count = publication.head - publication.published
            publication.published = publication.head
            emit(signals.BatchConfirmed(publication.stream_name, publication.head, count))


def _span(stream_name: str, rows: Rows, *, is_fresh: bool) -> AbstractContextManager[Any]:
    tracer = tracing.active()
    if tracer is None:
        return tracing.NOTHING
    return tracer.publishing(stream_name, rows, is_fresh=is_fresh)


def _contiguous(rows: Rows) -> Rows:
    """The rows up to the first missing position or hole: entries are appended by counting."""
    for index, (position, body) in enumerate(rows):
        if is_hole(body):
            return rows[: max(index, 1)]
        if position != rows[0][0] + index:
            return rows[:index]
    return rows


def _first_position(stream_name: str, rows: Rows) -> int | None:
    """The position with which the rows begin; a hole stands at its last."""
    if not rows:
        return None
    position, body = rows[0]
    record = decode_record(stream_name, position, body.encode()) if is_hole(body) else None
    return record.first if isinstance(record, Hole) else position
