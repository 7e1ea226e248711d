"""The stream as the lanes of one process see it: read once, for all of them."""

from __future__ import annotations

import threading
from typing import NamedTuple

from penstock.core.lanes import lane_of
from penstock.core.wire import Entry
from penstock.errors import PositionMissing, ServerUnavailable
from penstock.pipeline.reader import Reader

# What is kept for lanes that are a little behind; further back, a lane reads for itself.
KEPT_ENTRIES_MAX = 5_000
KEPT_BYTES_MAX = 32 * 1024 * 1024
READ_ENTRIES_MAX = 2_000


class Scan(NamedTuple):
    """A lane's own entries, in order, and how far the stream was looked through for them."""

    entries: list[Entry]
    through: int


class StreamWindow:
    """The part of a stream just before its end, kept for all lanes of one consumer.

    It follows the lane that is furthest ahead. Whichever lane needs the next entries first reads
    them for all; the others wait for it.
    """

    def __init__(
        self,
        lanes: int,
        batch_size: int,
        *,
        ahead: Reader,
        behind: Reader,
    ) -> None:
        self._lanes = lanes
        # A lane finds its share of what is read, so that more has to be read for a full batch.
        self._count_max = min(batch_size * lanes, max(READ_ENTRIES_MAX, batch_size))
        self._count = batch_size
        self._ahead = ahead
        self._behind = behind
        self._behind_lock = threading.Lock()
        self._changed = threading.Condition()
        self._is_reading = False
        self._has_more = False
        """Whether the last read was as long as it could be."""
        self._first = 1
        self._entries: list[Entry] = []
        self._owners: list[int] = []
        self._bytes = 0

    def is_polling(self, after: int) -> bool:
        """Whether nobody wakes a lane there: it is behind the window, or the hot log is away."""
        return after + 1 < self._first or self._ahead.is_polling

    def is_near(self, after: int) -> bool:
        """Whether what follows is read at once, or is here already."""
        return self._ahead.is_near(after)

    def read(
        self, lane: int, *, after: int, count: int, wait_seconds: float, unless: int | None = None
    ) -> Scan:
        """A lane's next entries, at most `count`; waits where there is nothing behind `after`.

        An only lane stops waiting when the descriptor `unless` becomes readable. Raises
        PositionMissing, never skips.
        """
        if self._lanes == 1:
            return Scan(
                *self._ahead.read(
                    after=after, count=count, wait_seconds=wait_seconds, unless=unless
                )
            )
        with self._changed:
            if after + 1 >= self._first:
                return self._read_here(lane, after, count, wait_seconds)
        return self._read_behind(lane, after, count)

    def _read_here(self, lane: int, after: int, count: int, wait_seconds: float) -> Scan:
        self._extend(after, wait_seconds)
        found = self._find(lane, after, count)
        if len(found.entries) < count and self._has_more:
            # A full batch costs little more than the few that happen to be here.
            try:
                self._extend(self._last, 0.0)
            except (PositionMissing, ServerUnavailable):
                if found.through == after:
                    raise
                # Whoever has come to the end of what is here meets it again.
                return found
            longer = self._find(lane, after, count)
            if longer.through > found.through:
                return longer
        return found

    @property
    def _last(self) -> int:
        return self._first + len(self._entries) - 1

    def _extend(self, after: int, wait_seconds: float) -> None:
        """See to it that there is something behind `after`, if possible. Holds the lock."""
        last = self._last
        if self._entries and after < last:
            return
        if self._is_reading:
            self._changed.wait(wait_seconds)
            return
        if after != last:
            # This lane is ahead of all others: the window follows it.
            self._forget(len(self._entries))
            self._first = after + 1
        self._is_reading = True
        count = self._count
        self._changed.release()
        try:
            entries, through = self._ahead.read(after=after, count=count, wait_seconds=wait_seconds)
        finally:
            self._changed.acquire()
            self._is_reading = False
            self._changed.notify_all()
        self._has_more = len(entries) == count
        if not entries and through > after:
            # A hole: the window begins anew behind it, and each lane passes it by itself.
            self._forget(len(self._entries))
            self._first = through + 1
            return
        self._entries += entries
        self._owners += self._owners_of(entries)
        size_bytes = sum(len(entry.payload) for entry in entries)
        self._bytes += size_bytes
        if entries:
            # Large events are read in smaller numbers.
            fitting = KEPT_BYTES_MAX * len(entries) // (size_bytes + 1)
            self._count = max(1, min(self._count_max, fitting))
        self._limit()

    def _limit(self) -> None:
        """Forget the oldest entries; at least what was read last stays."""
        while len(self._entries) > KEPT_ENTRIES_MAX or (
            self._bytes > KEPT_BYTES_MAX and len(self._entries) > self._count
        ):
            self._forget(min(self._count, len(self._entries)))

    def _forget(self, count: int) -> None:
        self._bytes -= sum(len(entry.payload) for entry in self._entries[:count])
        del self._entries[:count]
        del self._owners[:count]
        self._first += count

    def _find(self, lane: int, after: int, count: int) -> Scan:
        start = after + 1 - self._first
        if start < 0 or start >= len(self._entries):
            return Scan([], after)
        return _own(lane, count, self._entries[start:], self._owners[start:])

    def _read_behind(self, lane: int, after: int, count: int) -> Scan:
        with self._behind_lock:
            entries, through = self._behind.read(after=after, count=self._count, wait_seconds=0.0)
        if not entries:
            return Scan([], through)
        return _own(lane, count, entries, self._owners_of(entries))

    def _owners_of(self, entries: list[Entry]) -> list[int]:
        return [lane_of(entry.key, entry.event_uuid, self._lanes) for entry in entries]


def _own(lane: int, count: int, entries: list[Entry], owners: list[int]) -> Scan:
    own = [entry for entry, owner in zip(entries, owners, strict=True) if owner == lane]
    if len(own) > count:
        # Up to the next one of its own there is nothing for this lane.
        return Scan(own[:count], own[count].position - 1)
    return Scan(own, entries[-1].position)
