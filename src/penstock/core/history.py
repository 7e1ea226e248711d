"""What is audited: everything that senders, outbox and consumers wrote down, in one snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.core.lanes import lane_of

HANDLED = "handled"
PARKED = "parked"
DEAD = "dead"
SKIPPED = "skipped"
DISCARDED = "discarded"
OUTCOMES = frozenset({HANDLED, PARKED, DEAD, SKIPPED, DISCARDED})


@dataclass(frozen=True, slots=True)
class SentRow:
    """One row of the outbox; `key_sequence` counts the commits of its key."""

    event_uuid: str
    key: str | None
    key_sequence: int
    position: int | None
    is_old: bool = False
    """Published so long ago that the rows which settled it may have been pruned."""


@dataclass(frozen=True, slots=True)
class HoleRow:
    """One row of `hole`: positions that no event will ever have."""

    first: int
    last: int

    def overlap(self, first: int, last: int) -> int:
        """How many of the positions first … last lie in it."""
        return max(0, min(last, self.last) - max(first, self.first) + 1)


@dataclass(frozen=True, slots=True)
class Effect:
    """What a handler wrote for one event."""

    event_uuid: str
    key: str | None
    key_sequence: int


@dataclass(frozen=True, slots=True)
class SettledRow:
    """One row of `processed_event`."""

    event_uuid: str
    position: int
    outcome: str = HANDLED


@dataclass(frozen=True, slots=True)
class ParkedRow:
    """One row of `parked_event`."""

    event_uuid: str
    position: int
    key_hash: int
    is_due: bool = False
    """Whether it has a time for its next attempt, however far away."""
    is_held: bool = False
    is_redriven: bool = False


@dataclass(frozen=True, slots=True)
class Seek:
    """An operator moved the consumer from one checkpoint to another."""

    old_checkpoint: int
    new_checkpoint: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerHistory:
    """What one consumer has done; effects in the order of their commits."""

    name: str
    effects: tuple[Effect, ...]
    settled: tuple[SettledRow, ...]
    checkpoints: tuple[int, ...]
    """How far each lane has come; a consumer without lanes has one."""
    start_position: int = 1
    end_position: int | None = None
    """Where a replay ends; None: everything from the start on is due."""
    settled_to: int = 0
    """Lanes of an earlier count may have settled events up to here, beyond the checkpoints."""
    given_up_to: int = 0
    """Somebody has begun to forget it: settled rows up to here may be gone, however young."""
    parked: tuple[ParkedRow, ...] = ()
    dead: frozenset[str] = frozenset()
    """The events that have a dead letter."""
    seeks: tuple[Seek, ...] = ()
    """In the order in which they were made."""
    redriven: frozenset[str] = frozenset()
    """Events that operators have put back into their keys: those come late, and are excused."""
    knows_effects: bool = True
    """False: nobody but the application knows them, and it was not asked."""

    def checkpoint_over(self, row: SentRow) -> int:
        """How far the lane has come that the event belongs to."""
        return self.checkpoints[lane_of(row.key, row.event_uuid, len(self.checkpoints))]

    @property
    def floor(self) -> int:
        """What every lane has passed. Only rows up to here are ever pruned."""
        return min(self.checkpoints)

    def last_due(self, head: int) -> int:
        """The last position that is due to it, in a stream of this head."""
        return head if self.end_position is None else min(head, self.end_position)


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Everything that is known of one stream, in one snapshot."""

    acknowledged: frozenset[str]
    """Events of transactions whose COMMIT was answered."""
    refused: frozenset[str] = frozenset()
    """Events of transactions that were rolled back: there must be no trace of them."""
    unknown: frozenset[str] = frozenset()
    """Events whose sender died or lost its connection at COMMIT: both outcomes are right."""
    outbox: tuple[SentRow, ...]
    head: int
    holes: tuple[HoleRow, ...] = ()
    first: int = 1
    """Of the positions before it nothing is said: they were pruned, or are looked at elsewhere."""
    last: int | None = None
    """Nor of those behind it; None: they are looked at up to the head."""
    consumers: tuple[ConsumerHistory, ...] = ()

    @property
    def end(self) -> int:
        """The last position that is looked at."""
        return self.head if self.last is None else self.last

    def hole_over(self, position: int | None) -> HoleRow | None:
        """The hole that a position lies in."""
        if position is None:
            return None
        return next((hole for hole in self.holes if hole.first <= position <= hole.last), None)


def passed_over(seeks: Iterable[Seek]) -> list[tuple[int, int]]:
    """The ranges (after, to] that operators moved a consumer over and have not moved it back to."""
    ranges: list[tuple[int, int]] = []
    for seek in seeks:
        # Whatever lies behind the place that it was moved to is its business again.
        ranges = [(after, min(to, seek.new_checkpoint)) for after, to in ranges]
        if seek.new_checkpoint > seek.old_checkpoint:
            ranges.append((seek.old_checkpoint, seek.new_checkpoint))
    return ranges
