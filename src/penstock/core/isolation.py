"""What to do with a batch that failed: find the culprit with as few transactions as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        return Batch(rest, self.through, self.is_careful, self.is_suspect) if rest else None


def isolate(batch: Batch, culprit: int | None) -> list[Batch]:
    """The batches to try next, in order, after `batch` failed at `culprit` (None: unknown)."""
    entries = batch.entries
    if len(entries) == 1:
        return [Batch(entries, batch.through, is_careful=True, is_suspect=batch.is_suspect)]
    if culprit is None and not batch.is_careful:
        # Statements were sent ahead of their results; run again with each one awaited.
        return [Batch(entries, batch.through, is_careful=True)]
    if culprit is None:
        return split(entries, batch.through, is_careful=True)
    parts = [
        tuple(entry for entry in entries if entry.position < culprit),
        tuple(entry for entry in entries if entry.position == culprit),
        tuple(entry for entry in entries if entry.position > culprit),
    ]
    return _chained([part for part in parts if part], batch.through, batch.is_careful)


def split(
    entries: Sequence[Entry], through: int, *, is_careful: bool = False, is_suspect: bool = False
) -> list[Batch]:
    """Batches of one, in order; the last goes as far as all of them together."""
    return _chained([(entry,) for entry in entries], through, is_careful, is_suspect)


def _chained(
    parts: Sequence[tuple[Entry, ...]], through: int, is_careful: bool, is_suspect: bool = False
) -> list[Batch]:
    ends = [part[-1].position for part in parts[:-1]] + [through]
    return [Batch(part, end, is_careful, is_suspect) for part, end in zip(parts, ends, strict=True)]
