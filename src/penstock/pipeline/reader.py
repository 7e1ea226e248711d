"""Reads a stream without a gap: from the hot log, and what that lacks from PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.core.mac import MacKeys
from penstock.core.wire import Entry, Hole, decode_entry, decode_record
from penstock.errors import (
    EntryForged,
    MacKeyUnknown,
    MalformedEntry,
    PositionMissing,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.stores.hot_log import HotLog
from penstock.stores.outage import Outage
from penstock.stores.warm_tier import WarmTier
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

HEAD_CHECK_SECONDS = 1.0
# How often to look whether a key was added that entries are signed with already.
KEYS_CHECK_SECONDS = 1.0
# A hot log in which the next position is not what it should be is asked again after this time.
USELESS_SECONDS = 0.1


class Stretch(NamedTuple):
    """Entries that follow a position without a gap, and how far they reach, holes included."""

    entries: list[Entry]
    through: int


class TierReader:
    """Entries after a position, contiguous, from whichever tier has them."""

    def __init__(
        self,
        consumer: str,
        stream_name: str,
        hot_log: HotLog,
        warm_tier: WarmTier,
        *,
        brownout: bool = True,
    ) -> None:
        self._consumer = consumer
        self._stream_name = stream_name
        self._hot_log = hot_log
        self._warm_tier = warm_tier
        self._brownout = brownout
        self._origin: str | None = None
        self._keys: MacKeys | None = None
        self._keys_read_at = 0.0
        self._head_seen = 0
        self._head_checked_at = 0.0
        self._useless_until = 0.0
        self._hot_from = 0
        self._gap_told: tuple[int, str] | None = None
        self._redis = Outage(consumer, "Redis")

    @property
    def is_polling(self) -> bool:
        """Whether the hot log is away or of no use, so that nobody wakes this reader."""
        return self._redis.is_going_on or time.monotonic() < self._useless_until

    def read(self, *, after: int, count: int, wait_seconds: float) -> Stretch:
        """Up to `count` entries that follow `after`. Raises PositionMissing, never skips."""
        if not self._hot_log.keeps_entries:
            if wait_seconds:
                self._hot_log.read(
                    self._stream_name, after=after, count=count, wait_seconds=wait_seconds
                )
            return self._read_warm(after, count)
        if after + 1 < self._hot_from or time.monotonic() < self._useless_until:
            return self._read_instead(after, count)
        raw = self._read_hot(after, count, wait_seconds)
        if raw is None:
            return self._read_warm(after, count) if self._brownout else Stretch([], after)
        return self._read_through(after, count, raw)

    def _read_through(self, after: int, count: int, raw: list[tuple[int, bytes]]) -> Stretch:
        """What the hot log gave, as far as it is right; otherwise what the next tier has."""
        if raw:
            stretch, problem = self._decode_hot(after, raw)
            return stretch if stretch.through > after else self._fill_gap(after, count, problem)
        if self._is_overdue(after):
            return self._fill_gap(after, count, MalformedEntry("it is not in the hot log"))
        return Stretch([], after)

    def _fill_gap(self, after: int, count: int, problem: MalformedEntry) -> Stretch:
        """Read from the next tier what the hot log lacks, and say so once."""
        told = (after + 1, str(problem))
        if told != self._gap_told:
            self._gap_told = told
            if isinstance(problem, EntryForged):
                emit(signals.ForgeryFound(self._consumer, after + 1, str(problem)))
            emit(signals.GapFound(self._consumer, after + 1, str(problem)))
        return self._read_instead(after, count)

    def _read_instead(self, after: int, count: int) -> Stretch:
        """Read from the next tier, for as long as that leads on."""
        hot_from, self._hot_from = self._hot_from, 0
        stretch = self._read_warm(after, count)
        if stretch.through > after:
            self._hot_from = hot_from
        else:
            # Whatever the log holds there would wake this reader at once, again and again.
            self._useless_until = time.monotonic() + USELESS_SECONDS
        return stretch

    def _read_hot(
        self, after: int, count: int, wait_seconds: float
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
                    self._hot_from = position
                    raise MalformedEntry(f"the hot log goes on at {position}")
                assert isinstance(record, Entry)
                entries.append(record)
                expected += 1
        except MalformedEntry as problem:
            return Stretch(entries, expected - 1), problem
        return Stretch(entries, expected - 1), MalformedEntry("it is not in the hot log")

    def _verified(self, raw: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, Entry | Hole]]:
        """What was signed by the publisher, for its place. Raises MalformedEntry at the first."""
        if self._origin is None:
            self._origin = self._warm_tier.origin()
        origin = self._origin
        keys = self._keys or self._read_keys()
        for position, data in raw:
            try:
                record = decode_entry(self._stream_name, position, data, keys)
            except MacKeyUnknown:
                if time.monotonic() - self._keys_read_at < KEYS_CHECK_SECONDS:
                    raise
                keys = self._read_keys()
                record = decode_entry(self._stream_name, position, data, keys)
            if origin is not None and record.origin != origin:
                raise MalformedEntry(f"its entry comes from another database ({record.origin})")
            yield position, record

    def _read_keys(self) -> MacKeys:
        self._keys_read_at = time.monotonic()
        self._keys = self._warm_tier.keys()
        return self._keys

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
        was_seen_before = self._head_seen > after
        self._head_seen = self._warm_tier.head()
        return was_seen_before

    def _read_warm(self, after: int, count: int) -> Stretch:
        rows = self._warm_tier.read(after, count)
        if not rows and self._warm_tier.head() > after:
            # Numbered a moment ago, or gone with everything behind it.
            rows = self._warm_tier.read(after, count)
            if not rows:
                raise PositionMissing(
                    f"{self._stream_name}/{after + 1} is in no tier, nor is anything behind it. "
                    f"{self._consumer} has skipped nothing and waits."
                )
        entries: list[Entry] = []
        for position, body in rows:
            record = decode_record(self._stream_name, position, body.encode())
            expected = after + 1 + len(entries)
            if isinstance(record, Hole) and record.first <= expected:
                return self._up_to(entries, after, record)
            if position != expected:
                break
            assert isinstance(record, Entry)
            entries.append(record)
        if rows and not entries:
            raise PositionMissing(
                f"{self._stream_name}/{after + 1} is in no tier; the outbox goes on at "
                f"{rows[0][0]}. {self._consumer} has skipped nothing and waits."
            )
        if entries:
            emit(signals.WarmTierRead(self._consumer, after + 1, entries[-1].position))
        return Stretch(entries, after + len(entries))
