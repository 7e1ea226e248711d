"""Which of a lane's events may have ended a process, and for which of them that is certain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psycopg

from penstock.core.isolation import Batch, split
from penstock.core.wire import Entry
from penstock.stores.suspects import Suspects

STRIKES_MAX = 3


class Suspicion:
    """What one lane suspects: nothing, unless whoever held it before died or hung."""

    def __init__(
        self,
        consumer: str,
        suspects: Suspects,
        control: Callable[[], psycopg.Connection[Any]],
        worker_id: str,
    ) -> None:
        self._consumer = consumer
        self._suspects = suspects
        self._control = control
        self._worker_id = worker_id
        self._left = 0
        self._last = 0
        self._unfinished: frozenset[int] = frozenset()

    def look(self, head: int | None) -> None:
        """Before a lease is taken: what began and never ended, and how far the stream is.

        How far another service's stream was, nobody knows for sure: whatever comes is suspect.
        """
        self._last = sys.maxsize if head is None else head
        self._unfinished = self._suspects.unfinished(self._control(), self._consumer)

    def begin(self, count: int) -> None:
        """A lease begins: so many of the next events may have ended its last holder's process."""
        self._left = count

    def parts(self, batch: Batch) -> list[Batch]:
        """The events of the batch, which comes next, one by one; none, where it is not suspect."""
        is_next = self._left > 0 and batch.first <= self._last
        if not is_next and not any(e.position in self._unfinished for e in batch.entries):
            return []
        self._left = max(0, self._left - len(batch.entries))
        return split(replace(batch, is_suspect=True))

    def start(self, entry: Entry) -> tuple[list[dict[str, Any]], bool]:
        """Record that an attempt begins. Returns all such starts, and whether they are too many.

        Committed before the attempt: if it ends this process, that is known.
        """
        starts = self._suspects.start(self._control(), self._consumer, entry, self._worker_id)
        others = {start["worker_id"] for start in starts} - {self._worker_id}
        return starts, len(others) >= STRIKES_MAX

    def finish(self, position: int) -> None:
        """The attempt has ended, and this process has not."""
        self._suspects.finish(self._control(), self._consumer, position)
