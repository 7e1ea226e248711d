"""Redriving dead letters: put them back into their keys, watch, and stop when they fail again."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import psycopg

from penstock.core.options import Guarantee
from penstock.core.wire import Entry
from penstock.errors import MalformedEntry, OperationRefused
from penstock.ops.dead_letters import Walk, reporting_loss
from penstock.ops.status import ConsumerState, ConsumerStatus, read_status
from penstock.stores.dead_letters import Criteria, DeadLetters, Letter, State
from penstock.stores.operations import End, Operation
from penstock.stores.queries import DEFAULT_SCHEMA

STOP_AFTER = 10
CHUNK_MAX = 1000
IN_FLIGHT_MAX = 5000
"""How many letters may be on their way at once."""
LOOK_SECONDS = 0.05
NOTE_SECONDS = 1.0
STALL_SECONDS = 10.0
REHEARSALS_MAX = 100
RATE_BURST_SECONDS = 0.2

Connection = psycopg.Connection[Any]
MOVABLE = (State.DEAD, State.HELD)


# ── decisions ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Tally:
    """How a redrive stands at one look."""

    moved: int = 0
    in_flight: int = 0
    failed: int = 0
    discarded: int = 0
    """By others, or forgotten together with their consumer."""
    skipped: int = 0
    """Passed by, since there is nothing left in them to handle."""

    @property
    def handled(self) -> int:
        """Moved, and nothing else became of them."""
        others = self.in_flight + self.failed + self.discarded + self.skipped
        return max(0, self.moved - others)

    def as_json(self) -> dict[str, int]:
        """What became of those that were moved."""
        return {
            "handled": self.handled,
            "failed": self.failed,
            "discarded": self.discarded,
            "skipped": self.skipped,
            "in_flight": self.in_flight,
        }

    def after_moving(self, count: int) -> Tally:
        """The same with so many more on their way, or fewer."""
        return replace(self, moved=self.moved + count, in_flight=self.in_flight + count)

    def room(self, stop_after: int) -> int:
        """How many letters may follow: as many as were handled, and a few to begin with."""
        window = min(IN_FLIGHT_MAX, stop_after + self.handled)
        return max(0, min(CHUNK_MAX, window - self.in_flight))


def failures_in_a_row(before: Tally, now: Tally, so_far: int) -> int:
    """How many letters have failed since the last look that saw a success."""
    if now.handled > before.handled:
        return 0
    return so_far + max(0, now.failed - before.failed)


@dataclass(slots=True)
class Pace:
    """Not more than so many letters a second; None: as fast as it goes."""

    per_second: float | None
    _allowed: float = 1.0
    _asked_at: float | None = None

    def allowance(self, now: float) -> int:
        """How many letters may be moved at this moment."""
        if self.per_second is None:
            return CHUNK_MAX
        burst = max(1.0, self.per_second * RATE_BURST_SECONDS)
        passed = 0.0 if self._asked_at is None else now - self._asked_at
        self._allowed = min(burst, self._allowed + passed * self.per_second)
        self._asked_at = now
        return int(self._allowed)

    def spend(self, count: int) -> None:
        """So many were moved."""
        self._allowed -= count


# ── the redrive ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What to redrive, how carefully, and in whose name."""

    criteria: Criteria
    by: str
    reason: str = ""
    stop_after: int = STOP_AFTER
    per_second: float | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Redriven:
    """What a redrive did."""

    operation_id: int
    ended_as: End
    tally: Tally
    taken_back: int
    left_alone: int
    """Letters that were on their way already, in other hands, or gone."""

    @property
    def is_clean(self) -> bool:
        """Whether it came to its end, and all that it moved was handled or passed by."""
        return self.ended_as == "done" and not (self.tally.failed or self.tally.discarded)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "operation_id": self.operation_id,
            "ended_as": self.ended_as,
            "moved": self.tally.moved,
            **self.tally.as_json(),
            "taken_back": self.taken_back,
            "left_alone": self.left_alone,
        }


@dataclass(slots=True)
class Redrive:
    """Moves letters while running workers handle them, on a connection in autocommit."""

    connection: Connection
    plan: Plan
    schema: str = DEFAULT_SCHEMA
    on_look: Callable[[Tally], None] = lambda _tally: None
    on_stall: Callable[[str], None] = lambda _why: None
    _tally: Tally = field(default_factory=Tally)
    _streak: int = 0
    _left_alone: int = 0
    _changed_at: float = 0.0
    _noted_at: float = -math.inf
    _has_told: bool = False

    def run(self, is_interrupted: Callable[[], bool] = lambda: False) -> Redriven:
        """Redrive everything that was chosen, until that is done, fails, or is interrupted."""
        with reporting_loss(
            "Workers finish what is on its way; run the same command again for the rest."
        ):
            criteria = movable(self.plan.criteria)
            walk = Walk(DeadLetters(self.connection, self.schema), criteria, self.plan.limit)
            operation = Operation(
                self.connection,
                "redrive",
                self.plan.criteria.as_json(),
                consumer=criteria.consumer,
                by=self.plan.by,
                reason=self.plan.reason,
                schema=self.schema,
            )
            ended_as = self._drive(operation, walk, is_interrupted)
            taken_back = self._take_back(operation) if ended_as == "stopped" else 0
            self._look(operation)
            operation.note(self._tally.as_json())
            operation.end(ended_as, self._tally.failed)
        return Redriven(operation.id, ended_as, self._tally, taken_back, self._left_alone)

    def _drive(self, operation: Operation, walk: Walk, is_interrupted: Callable[[], bool]) -> End:
        pace = Pace(self.plan.per_second)
        self._changed_at = time.monotonic()
        while not is_interrupted():
            has_tried = self._move(operation, walk, pace)
            self._look(operation)
            if self._streak >= self.plan.stop_after:
                return "stopped"
            if self._tally.in_flight == 0 and walk.is_over:
                return "done"
            self._tell_of_stall()
            if not has_tried:
                threading.Event().wait(LOOK_SECONDS)
        return "interrupted"

    def _move(self, operation: Operation, walk: Walk, pace: Pace) -> bool:
        room = min(self._tally.room(self.plan.stop_after), pace.allowance(time.monotonic()))
        ids = walk.take(room) if room else []
        if not ids:
            return False
        moved = operation.move(ids)
        pace.spend(moved)
        self._left_alone += len(ids) - moved
        self._tally = self._tally.after_moving(moved)
        return True

    def _look(self, operation: Operation) -> None:
        before, self._tally = self._tally, Tally(self._tally.moved, *operation.look())
        self._streak = failures_in_a_row(before, self._tally, self._streak)
        now = time.monotonic()
        if self._tally != before:
            self._changed_at = now
        if now - self._noted_at >= NOTE_SECONDS:
            self._noted_at = now
            operation.note(self._tally.as_json())
        self.on_look(self._tally)

    def _take_back(self, operation: Operation) -> int:
        taken_back = 0
        while taken := operation.take_back(CHUNK_MAX):
            taken_back += taken
            self._tally = self._tally.after_moving(-taken)
        return taken_back

    def _tell_of_stall(self) -> None:
        is_stalled = time.monotonic() - self._changed_at >= STALL_SECONDS
        if is_stalled and self._tally.in_flight and not self._has_told:
            self._has_told = True
            self.on_stall(self._why_stalled())

    def _why_stalled(self) -> str:
        consumers = read_status(self.connection, self.schema).consumers
        asked = self.plan.criteria.consumer
        idle = [
            f"{consumer.name} is {consumer.state.value}{_who_would_serve(consumer)}"
            for consumer in consumers
            if consumer.state is not ConsumerState.RUNNING and asked in (None, consumer.name)
        ]
        cause = (
            f"It seems not to be running: {'; '.join(idle)}."
            if idle
            else "Workers are alive; a letter waits while an earlier event of its key is parked "
            "(`penstock parked list`), or while its handler runs."
        )
        return f"Nothing was handled for {STALL_SECONDS:g} s. {cause} Going on to wait."


def _who_would_serve(consumer: ConsumerStatus) -> str:
    if consumer.replay_of is None:
        return ""
    return f", until `penstock replay --resume {consumer.name}` runs"


def movable(criteria: Criteria) -> Criteria:
    """The same without letters that are on their way already."""
    asked = MOVABLE if criteria.states is None else criteria.states
    return replace(criteria, states=tuple(state for state in asked if state in MOVABLE))


def require_redrivable(letters: DeadLetters, consumers: Sequence[str], *, force: bool) -> None:
    """Refuse consumers that nobody serves, and those that asked for at most one attempt."""
    guarantees = letters.guarantees(consumers)
    for consumer in consumers:
        if consumer not in guarantees:
            raise OperationRefused(
                f"{consumer} is not in the books, so no worker would handle its letters. Nothing "
                "was changed; they can be discarded."
            )
        if guarantees[consumer] == Guarantee.AT_MOST_ONCE and not force:
            raise OperationRefused(
                f"{consumer} handles its events at most once, and each of these letters has had "
                "its attempt: whatever that did before it failed would happen again. Nothing was "
                "changed; --force redrives them all the same."
            )


# ── dry run ────────────────────────────────────────────────────────────────────────────────────


class Rehearsal(Protocol):
    """What a handler would have done with an event."""

    @property
    def outcome(self) -> str:
        """`would succeed`, `would fail` or `would call` (something outside)."""

    @property
    def detail(self) -> str:
        """Why, or what."""


class RehearsesEvents(Protocol):
    """An application that can try a handler and roll everything back."""

    def rehearse(self, consumer: str, entry: Entry, /) -> Rehearsal:
        """Call the consumer's handler in a transaction that never commits."""


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """A letter and how its rehearsal went."""

    letter: Letter
    outcome: str
    detail: str

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {**self.letter.as_json(), "outcome": self.outcome, "detail": self.detail}


def rehearse(
    application: RehearsesEvents, letters: DeadLetters, criteria: Criteria, limit: int
) -> Iterator[Rehearsed]:
    """Try the chosen letters one by one, in the order of positions; nothing is written."""
    walk = Walk(letters, movable(criteria), limit)
    while ids := walk.take(1):
        for full in letters.read(ids):
            try:
                result = application.rehearse(full.letter.consumer, full.entry())
            except MalformedEntry as error:
                yield Rehearsed(full.letter, "would fail", str(error))
            else:
                yield Rehearsed(full.letter, result.outcome, result.detail)


def require_rehearsable(letters: DeadLetters, consumers: Sequence[str]) -> None:
    """Refuse consumers whose handlers cannot be rolled back."""
    for consumer, guarantee in letters.guarantees(consumers).items():
        if guarantee != Guarantee.EXACTLY_ONCE:
            raise OperationRefused(
                f"{consumer} is not an exactly-once consumer: what its handler does could not be "
                "rolled back. Nothing was called; choose others, or redrive a single letter."
            )
