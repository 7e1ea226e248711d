"""What a lane knows of its parked events: whether there are any, and when the next is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from penstock.core.isolation import Batch
from penstock.core.lanes import key_hash
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry
from penstock.stores.parked import Parked, ParkedRow
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

# Somebody may redrive at any time. While he does, a lane looks more often.
LOOK_SECONDS = 1.0
LOOK_SOON_SECONDS = 0.05
SOON_SECONDS = 3.0
# Parked keys that a lane remembers; beyond, it asks with every batch.
KEYS_MAX = 10_000


class Parking:
    """The parked events of one lane, which its owner alone parks and drains."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        lane: int,
        lanes: int,
        *,
        parked: Parked,
        control: Callable[[], psycopg.Connection[Any]],
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._lane = lane
        self._lanes = lanes
        self._parked = parked
        self.control = control
        self.has_any = False
        """Whether live events may have to wait behind parked ones."""
        self._keys: set[int] | None = set()
        """Which keys are parked. It may hold some that are not any more; None: nobody knows."""
        self._suspects_left = 0
        self._is_new = True
        self._look_at = 0.0
        self._soon_until = 0.0
        self._put_off: set[int] = set()
        """Of which positions it was told that they cannot be opened."""

    def begin(self, *, suspects: int) -> None:
        """A lease begins. So many events may have ended the process of its last holder.

        Nothing is asked here: whatever fails after a lease is taken must find it in a lane's
        hands. Until somebody has looked, there may be anything.
        """
        self._suspects_left = suspects
        self._is_new = True
        self.has_any = True
        self._keys = None
        self._look_at = 0.0
        self._put_off.clear()

    @property
    def blocks_stream(self) -> bool:
        """Whether nothing may be handled before what is parked."""
        return self.has_any and self._options.order == "stream"

    @property
    def due_seconds(self) -> float:
        """In how many seconds there is something to do, or to look for."""
        return max(0.0, self._look_at - time.monotonic())

    def waiting(self, entries: Sequence[Entry]) -> frozenset[int] | None:
        """The positions that have to wait behind a parked event; None: only the books know.

        The lane's owner alone parks, so it knows its parked keys. One that an operator has emptied
        is taken for parked until the next look; what is parked there meanwhile is due at once.
        """
        if self._options.order != "key" or not self.has_any:
            return frozenset()
        keys = self._keys
        if keys is None:
            return None
        return frozenset(
            entry.position for entry in entries if key_hash(entry.key, entry.event_uuid) in keys
        )

    def note(self, entry: Entry, delay_seconds: float | None) -> None:
        """A failed event was parked; None: it is held."""
        self.has_any = True
        if self._keys is not None:
            self._keys.add(key_hash(entry.key, entry.event_uuid))
        if delay_seconds is not None:
            self._look_at = min(self._look_at, time.monotonic() + delay_seconds)

    def put_off(self, batch: Batch, reason: str, seconds: float) -> None:
        """Its time comes later, without an attempt: the others need not wait for its data key."""
        self._parked.put_off(self.control(), self._consumer, batch, seconds)
        if batch.first not in self._put_off:
            self._put_off.add(batch.first)
            emit(signals.ConsumerBlocked(self._consumer, batch.first, reason))

    def due(self) -> list[Batch]:
        """Batches of what may be tried now, in order; those that failed before, one by one."""
        if self.due_seconds > 0:
            return []
        if self._is_new or not self.has_any:
            self._look_first()
        if not self.has_any:
            return []
        rows = self._parked.due(
            self.control(),
            self._consumer,
            self._options.stream_name,
            lane=self._lane,
            lanes=self._lanes,
            count=self._options.batch_size,
            in_order=self._options.order != "none",
        )
        if not rows:
            self._look()
            return []
        self._soon_until = time.monotonic() + SOON_SECONDS
        return self._batches(rows)

    def _look_first(self) -> None:
        if self._is_new and self._options.order == "none":
            self._parked.let_overtake(self.control(), self._consumer)
        self._look()
        self._is_new = False

    def _look(self) -> None:
        look = self._parked.look(
            self.control(),
            self._consumer,
            lane=self._lane,
            lanes=self._lanes,
            keys_max=KEYS_MAX,
        )
        self.has_any, due_seconds = look.has_any, look.due_seconds
        self._keys = None if look.keys is None else set(look.keys)
        now = time.monotonic()
        pause_seconds = LOOK_SOON_SECONDS if now < self._soon_until else LOOK_SECONDS
        if due_seconds is not None:
            # One that is due and was not tried waits behind another that is not.
            pause_seconds = min(pause_seconds, max(due_seconds, LOOK_SOON_SECONDS))
        self._look_at = now + pause_seconds

    def _batches(self, rows: list[ParkedRow]) -> list[Batch]:
        is_suspect = self._suspects_left > 0
        self._suspects_left = max(0, self._suspects_left - len(rows))
        batches: list[Batch] = []
        together: list[ParkedRow] = []
        for row in rows:
            if row.is_alone or is_suspect:
                batches += _flushed(together)
                batches.append(_batch([row], is_careful=True, is_suspect=is_suspect))
            elif together and together[-1].is_redriven != row.is_redriven:
                batches += _flushed(together)
                together.append(row)
            else:
                together.append(row)
        return batches + _flushed(together)


def _flushed(together: list[ParkedRow]) -> list[Batch]:
    batches = [_batch(together)] if together else []
    together.clear()
    return batches


def _batch(rows: list[ParkedRow], *, is_careful: bool = False, is_suspect: bool = False) -> Batch:
    return Batch(
        tuple(row.entry for row in rows),
        rows[-1].entry.position,
        is_careful=is_careful,
        is_suspect=is_suspect,
        is_parked=True,
        attempt=rows[0].attempts + 1,
        setbacks=rows[0].setbacks,
        is_redriven=rows[0].is_redriven,
    )
