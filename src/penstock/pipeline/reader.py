"""Reads a stream without a gap: from the hot log, else from PostgreSQL, else from the archive."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from penstock.core.wire import Entry, Hole, decode_entry, decode_record
from penstock.errors import (
    ArchiveDamaged,
    EntryForged,
    MacKeyUnknown,
    MalformedEntry,
    PositionMissing,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.pipeline.trust import Trust
from penstock.stores.cold_tier import ColdTier
from penstock.stores.hot_log import HotLog
from penstock.stores.outage import Outage
from penstock.stores.warm_tier import WarmTier
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted

HEAD_CHECK_SECONDS = 1.0
# A hot log in which the next position is not what it should be is asked again after this time.
USELESS_SECONDS = 0.1
_LACKING = MalformedEntry("it is not in the hot log")


class Stretch(NamedTuple):
    """Entries that follow a position without a gap, and how far they reach, holes included."""

    entries: list[Entry]
    through: int


class Reader(Protocol):
    """A stream, or a part of it, without a gap."""

    @property
    def is_polling(self) -> bool:
        """Whether nobody wakes this reader, so that its caller has to rest by itself."""

    def is_near(self, after: int) -> bool:
        """Whether what follows is read at once, rather than fetched from an archive."""

    def read(
        self, *, after: int, count: int, wait_seconds: float, unless: int | None = None
    ) -> Stretch:
        """Up to `count` entries that follow `after`. Raises PositionMissing, never skips.

        It stops waiting when the descriptor `unless` becomes readable.
        """


class TierReader:
    """Entries after a position, contiguous, from whichever tier has them."""

    def __init__(
        self,
        consumer: str,
        stream_name: str,
        hot_log: HotLog,
        warm_tier: WarmTier,
        cold_tier: ColdTier | None = None,
        *,
        brownout: bool = True,
        incarnation: Callable[[], str] | None = None,
    ) -> None:
        self._consumer = consumer
        self._stream_name = stream_name
        self._hot_log = hot_log
        self._warm_tier = warm_tier
        self._cold_tier = cold_tier
        self._brownout = brownout
        self._trust = Trust(stream_name, hot_log, warm_tier, incarnation)
        self._origin: str | None = None
        self._head_seen = 0
        self._head_checked_at = 0.0
        self._useless_until = 0.0
        self._hot_from = 0
        self._warm_from = 0
        self._gap_told: tuple[int, str] | None = None
        self._redis = Outage(consumer, "Redis")
        self._archive = Outage(consumer, "the archive")
        self._is_unpacked = False
        """Whether the cold tier holds on to what it has unpacked."""

    @property
    def is_polling(self) -> bool:
        """Whether the hot log is away or of no use, so that nobody wakes this reader."""
        return self._redis.is_going_on or time.monotonic() < self._useless_until

    def is_near(self, after: int) -> bool:
        """Whether what follows is read at once, rather than fetched from an archive."""
        return after + 1 >= self._warm_from

    def read(
        self, *, after: int, count: int, wait_seconds: float, unless: int | None = None
    ) -> Stretch:
        """Up to `count` entries that follow `after`. Raises PositionMissing, never skips.

        It stops waiting when the descriptor `unless` becomes readable.
        """
        if not self._hot_log.keeps_entries:
            if wait_seconds:
                self._hot_log.read(
                    self._stream_name, after=after, count=count, wait_seconds=wait_seconds
                )
                # Whoever has waited asks again at once, and need not be told twice.
                return Stretch([], after)
            return self._read_below(after, count)
        if after + 1 < self._hot_from or time.monotonic() < self._useless_until:
            return self._read_instead(after, count)
        raw = self._read_hot(after, count, wait_seconds, unless)
        if raw is None:
            return self._read_below(after, count) if self._brownout else Stretch([], after)
        return self._read_through(after, count, raw)

    def _read_through(self, after: int, count: int, raw: list[tuple[int, bytes]]) -> Stretch:
        """What the hot log gave, as far as it is right; otherwise what the next tier has."""
        if raw:
            stretch, problem = self._decode_hot(after, raw)
            if stretch.through == after:
                return self._fill_gap(after, count, problem)
            self._gap_told = None
            if stretch.entries and is_wanted(signals.HotTierRead):
                emit(signals.HotTierRead(self._consumer, after + 1, stretch.through))
            return stretch
        if self._is_overdue(after):
            return self._fill_gap(after, count, _LACKING)
        return Stretch([], after)

    def _fill_gap(self, after: int, count: int, problem: MalformedEntry) -> Stretch:
        """Read from the next tier what the hot log lacks, and say so once."""
        # A server that is full lacks whatever comes, until the log goes on.
        told = (0 if problem is _LACKING else after + 1, str(problem))
        if told != self._gap_told:
            self._gap_told = told
            if isinstance(problem, EntryForged):
                emit(signals.ForgeryFound(self._consumer, after + 1, str(problem)))
            emit(signals.GapFound(self._consumer, after + 1, str(problem)))
        return self._read_instead(after, count)

    def _read_instead(self, after: int, count: int) -> Stretch:
        """Read from the next tier, for as long as that leads on."""
        hot_from, self._hot_from = self._hot_from, 0
        stretch = self._read_below(after, count)
        if stretch.through > after:
            self._hot_from = hot_from
        else:
            # Whatever the log holds there would wake this reader at once, again and again.
            self._useless_until = time.monotonic() + USELESS_SECONDS
        return stretch

    def _read_hot(
        self, after: int, count: int, wait_seconds: float, unless: int | None
    ) -> list[tuple[int, bytes]] | None:
        """What the hot log has; None where it is away. Said once, then asked now and then."""
        if not self._redis.is_worth_trying:
            return None
        try:
            raw = self._hot_log.read(
                self._stream_name,
                after=after,
                count=count,
                wait_seconds=0.0 if self._redis.is_going_on else wait_seconds,
                unless=unless,
            )
        except (ServerUnavailable, ServerUnsuitable) as error:
            self._redis.begin(error)
            return None
        self._redis.end()
        return raw

    def _decode_hot(
        self, after: int, raw: Iterable[tuple[int, bytes]]
    ) -> tuple[Stretch, MalformedEntry]:
        """The contiguous beginning of what the hot log gave, and why it ends there."""
        entries: list[Entry] = []
        expected = after + 1
        try:
            for position, record in self._verified(raw):
                if isinstance(record, Hole) and record.first <= expected <= record.last:
                    return self._up_to(entries, after, record), MalformedEntry("a hole")
                if position != expected:
                    # Until there, nobody need ask it again: it may be a long way.
                    self._hot_from = record.first if isinstance(record, Hole) else position
                    raise MalformedEntry(f"the hot log goes on at {position}")
                assert isinstance(record, Entry)
                entries.append(record)
                expected += 1
        except MalformedEntry as problem:
            return Stretch(entries, expected - 1), problem
        return Stretch(entries, expected - 1), MalformedEntry("it is not in the hot log")

    def _verified(self, raw: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Entry | Hole]]:
        """What was signed by the publisher, for its place. Raises MalformedEntry at the first."""
        origin = self._read_origin()
        keys = self._trust.keys()
        for position, data in raw:
            try:
                record = decode_entry(self._stream_name, position, data, keys)
            except MacKeyUnknown:
                if (newer := self._trust.newer_keys()) is None:
                    raise
                keys = newer
                record = decode_entry(self._stream_name, position, data, keys)
            if origin is not None and record.origin != origin:
                raise MalformedEntry(f"its entry comes from another database ({record.origin})")
            yield position, record

    def _read_origin(self) -> str | None:
        if self._origin is None:
            self._origin = self._warm_tier.origin()
        return self._origin

    def _up_to(self, entries: list[Entry], after: int, hole: Hole) -> Stretch:
        """What comes before a hole; where nothing does, the hole itself is passed."""
        if entries:
            return Stretch(entries, entries[-1].position)
        emit(signals.HolePassed(self._consumer, after + 1, hole.last))
        return Stretch([], hole.last)

    def _is_overdue(self, after: int) -> bool:
        """Whether the next position was given out a while ago and still is not in the hot log."""
        now = time.monotonic()
        if now - self._head_checked_at < HEAD_CHECK_SECONDS:
            return False
        self._head_checked_at = now
        self._trust.look_again()
        seen, self._head_seen = self._head_seen, self._warm_tier.head()
        if seen <= after:
            return False
        # So is all that was seen then: nobody need ask the log for it again.
        self._hot_from = seen + 1
        return True

    def _read_below(self, after: int, count: int) -> Stretch:
        """What the tiers below the hot log have, the first one first that can have it."""
        if after + 1 < self._warm_from:
            stretch = self._read_cold(after, count)
            if stretch is not None:
                return stretch
            self._warm_from = 0
        try:
            stretch = self._read_warm(after, count)
        except PositionMissing:
            stretch = self._read_cold(after, count)
            if stretch is None:
                self._warm_from = 0
                raise
            return stretch
        self._leave_cold()
        return stretch

    def _read_warm(self, after: int, count: int) -> Stretch:
        rows = self._warm_tier.read(after, count)
        if not rows and (head := self._warm_tier.head()) > after:
            # Numbered a moment ago, or gone with everything behind it.
            rows = self._warm_tier.read(after, count)
            if not rows:
                self._warm_from = head + 1
                raise PositionMissing(
                    f"{self._stream_name}/{after + 1} is in no tier, nor is anything behind it. "
                    f"{self._consumer} has skipped nothing and waits."
                )
        stretch, follows = self._decode(after, rows)
        if follows is not None and stretch.through == after:
            # The outbox is pruned from its front: until there, nobody need ask it again.
            self._warm_from = follows
            raise PositionMissing(
                f"{self._stream_name}/{after + 1} is in no tier; the outbox goes on at {follows}. "
                f"{self._consumer} has skipped nothing and waits."
            )
        if stretch.entries:
            emit(signals.WarmTierRead(self._consumer, after + 1, stretch.through))
        return stretch

    def _read_cold(self, after: int, count: int) -> Stretch | None:
        """What the archive has; None: not the next position. Nothing, while its store is away."""
        if self._cold_tier is None:
            return None
        if not self._archive.is_worth_trying:
            return Stretch([], after)
        self._is_unpacked = True
        try:
            rows = self._cold_tier.read(after, count)
            stretch, _ = self._decode(after, rows, origin=self._read_origin())
        except (ServerUnavailable, ServerUnsuitable) as error:
            self._archive.begin(error)
            return Stretch([], after)
        except (ArchiveDamaged, MalformedEntry) as error:
            raise PositionMissing(
                f"{self._stream_name}/{after + 1} cannot be read from the archive: {error} "
                f"{self._consumer} has skipped nothing and waits; `penstock archive verify` tells "
                "what else is wrong there."
            ) from error
        self._archive.end()
        if stretch.entries:
            emit(signals.ColdTierRead(self._consumer, after + 1, stretch.through))
        return stretch if stretch.through > after else None

    def _leave_cold(self) -> None:
        """Behind the archive nobody needs its objects in memory."""
        if self._is_unpacked and self._cold_tier is not None:
            self._is_unpacked = False
            self._cold_tier.close()

    def _decode(
        self, after: int, rows: Iterable[tuple[int, str]], origin: str | None = None
    ) -> tuple[Stretch, int | None]:
        """The contiguous beginning of what a tier gave, and where it goes on behind a gap."""
        entries: list[Entry] = []
        for position, body in rows:
            record = decode_record(self._stream_name, position, body.encode())
            if origin is not None and record.origin != origin:
                raise MalformedEntry(f"its entry comes from another database ({record.origin}).")
            expected = after + 1 + len(entries)
            first = record.first if isinstance(record, Hole) else position
            if isinstance(record, Hole) and first <= expected:
                return self._up_to(entries, after, record), None
            if first != expected or isinstance(record, Hole):
                return Stretch(entries, expected - 1), first
            entries.append(record)
        return Stretch(entries, after + len(entries)), None
