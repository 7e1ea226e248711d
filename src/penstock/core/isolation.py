"""What to do with a batch that failed: find the culprit with as few transactions as possible."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.wire import Entry


@dataclass(frozen=True, slots=True)
class Batch:
    """Entries to settle in one transaction. A careful batch learns of every error at once."""

    entries: tuple[Entry, ...]
    is_careful: bool = False

    @property
    def first(self) -> int:
        """The first position."""
        return self.entries[0].position

    @property
    def last(self) -> int:
        """The last position."""
        return self.entries[-1].position


def isolate(batch: Batch, culprit: int | None) -> list[Batch]:
    """The batches to try next, in order, after `batch` failed at `culprit` (None: unknown)."""
    entries = batch.entries
    if len(entries) == 1:
        return [Batch(entries, is_careful=True)]
    if culprit is None and not batch.is_careful:
        # Statements were sent ahead of their results; run again with each one awaited.
        return [Batch(entries, is_careful=True)]
    if culprit is None:
        return [Batch((entry,), is_careful=True) for entry in entries]
    parts = [
        tuple(entry for entry in entries if entry.position < culprit),
        tuple(entry for entry in entries if entry.position == culprit),
        tuple(entry for entry in entries if entry.position > culprit),
    ]
    return [Batch(part, batch.is_careful) for part in parts if part]
