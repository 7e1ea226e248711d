"""What to do with a batch that failed: find the culprit with as few transactions as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.core.wire import Entry


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries to settle in one transaction. A careful batch learns of every error at once."""

    entries: tuple[Entry, ...]
    through: int
    """The position up to which nothing else is this lane's; the checkpoint moves there."""
    is_careful: bool = False
    is_suspect: bool = False
    """One entry, run alone because an attempt at it may have ended its process."""
    is_parked: bool = False
    """Entries out of the parked ones: the checkpoint is past them already."""
    attempt: int = 1
    """Which attempt this is. Beyond the first, a batch has one entry."""
    is_redriven: bool = False
    """Out of the dead letters: whatever fails goes back there."""
    called: frozenset[int] | None = None
    """Where all is called that will be, and only to be settled: the positions that were new."""
    is_early: bool = False
    """One event that nobody has numbered yet: its position is a guess. Without entries: whichever
    is there when it is begun."""
    setbacks: int = 0
    """How often it was set aside before, whether its handler was called then or not."""

    @property
    def is_owed(self) -> bool:
        """Whether it was tried before: then it is handled or a dead letter, and never passed by."""
        return self.is_redriven or self.setbacks > 0 or self.attempt > 1

    @property
    def first(self) -> int:
        """The first position."""
        return self.entries[0].position

    @property
    def last(self) -> int:
        """The last position that this batch settles or passes."""
        return self.through

    def after(self, position: int) -> Batch | None:
        """What is left of the batch behind a position."""
        rest = tuple(entry for entry in self.entries if entry.position > position)
        return replace(self, entries=rest) if rest else None

    def until(self, position: int) -> Batch | None:
        """The part of the batch up to a position, which it settles and does not pass."""
        part = tuple(entry for entry in self.entries if entry.position <= position)
        return replace(self, entries=part, through=position) if part else None


def isolate(batch: Batch, culprit: int | None) -> list[Batch]:
    """The batches to try next, in order, after `batch` failed at `culprit` (None: unknown)."""
    entries = batch.entries
    if culprit is None and not batch.is_careful:
        # Statements were sent ahead of their results; run again with each one awaited.
        return [replace(batch, is_careful=True)]
    if len(entries) == 1:
        return [batch]
    if culprit is None:
        return split(batch)
    parts = [
        tuple(entry for entry in entries if entry.position < culprit),
        tuple(entry for entry in entries if entry.position == culprit),
        tuple(entry for entry in entries if entry.position > culprit),
    ]
    return _chained([part for part in parts if part], batch)


def split(batch: Batch) -> list[Batch]:
    """Batches of one, in order; the last goes as far as all of them together."""
    return _chained([(entry,) for entry in batch.entries], batch)


def _chained(parts: Sequence[tuple[Entry, ...]], batch: Batch) -> list[Batch]:
    ends = [part[-1].position for part in parts[:-1]] + [batch.through]
    return [
        replace(batch, entries=part, through=end) for part, end in zip(parts, ends, strict=True)
    ]
