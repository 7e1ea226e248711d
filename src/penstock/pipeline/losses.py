"""Connections that break at an event: once is chance, again and again is the event's own doing."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from penstock.core.isolation import Batch, split
from penstock.core.wire import Entry
from penstock.errors import ConnectionBroken, ResourceUnavailable, ServerReadOnly, ServerUnavailable
from penstock.pipeline.calling import HandlerFailed
from penstock.stores.parked import Letter

LOSSES_MAX = 3
SUSPECT_FROM = 2


class Losses:
    """What one consumer's lanes have lost in this process, whatever became of the lanes."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}
        """By the first position of what was being handled."""
        self._suspect_to = 0
        self.letters: deque[tuple[Entry, Letter]] = deque()
        """Dead letters of settled events, not written yet: those of a batch for each lane."""

    def note(self, batch: Batch, error: ServerUnavailable) -> bool:
        """One more. Returns whether that is no chance any more, but the event's doing."""
        if isinstance(error, ServerReadOnly | ResourceUnavailable):
            return False
        count = self._in_a_row[batch.first] = self._in_a_row.get(batch.first, 0) + 1
        if count >= SUSPECT_FROM:
            self._suspect_to = max(self._suspect_to, batch.last)
        return count >= LOSSES_MAX and len(batch.entries) == 1

    def forget(self, batch: Batch) -> None:
        """What began there is settled."""
        self._in_a_row.pop(batch.first, None)

    def parts(self, batch: Batch) -> list[Batch]:
        """The batch; or its events one by one, where one of them may be to blame."""
        if batch.first > self._suspect_to:
            return [batch]
        return split(replace(batch, is_careful=True))


def failure_of(batch: Batch, error: ServerUnavailable) -> HandlerFailed:
    """What a lost connection comes to where the event is to blame for it."""
    return HandlerFailed(broken("event", error), batch.first, is_alone=True)


def broken(what: str, error: ServerUnavailable) -> ConnectionBroken:
    """How to say it."""
    return ConnectionBroken(
        f"The connection breaks each time that this {what} is handled, also alone. Nothing of it "
        "was kept. Look for what its handler does to its session, and into the log of the "
        f"server. The last time: {error}"
    )
