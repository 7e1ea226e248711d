"""Moving a consumer by hand: the next event that it handles is the one at this position."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import psycopg

from penstock.errors import ConsumerUnknown, OperationRefused, UsageError
from penstock.ops.consumers import changing, lock, require_no_replay
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Target = Literal["earliest", "latest"] | int | datetime

DEADLOCKS_MAX = 5
DIGITS_MAX = 100
"""More than any position has; Python refuses to read thousands."""


@dataclass(frozen=True, slots=True)
class SeekPlan:
    """What a seek would do, as things stand; `epoch` notices when another seek comes first."""

    consumer: str
    epoch: int
    old_checkpoint: int
    new_checkpoint: int
    passed_over: int
    """Positions that would never be handled."""

    @property
    def position(self) -> int:
        """The next position to be handled."""
        return self.new_checkpoint + 1

    @property
    def is_backward(self) -> bool:
        """Whether the consumer comes by positions that it has passed."""
        return self.new_checkpoint < self.old_checkpoint


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a consumer stands, the first event that is kept, the last that there is."""

    consumer: str
    stream_name: str
    epoch: int
    floor: int
    first: int
    head: int
    is_foreign: bool
    """Another service numbers the stream."""


@dataclass(frozen=True, slots=True)
class Sought:
    """What a seek did."""

    plan: SeekPlan
    unsettled: int
    """Settled events that will be handled again."""


def parse_target(text: str) -> Target:
    """A position, earliest, latest, or a moment with its time zone. Raises UsageError."""
    match text.strip().lower():
        case "earliest" | "latest" as name:
            return name
        case digits if digits.isdecimal() and len(digits) <= DIGITS_MAX:
            return int(digits)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"--to {text!r} is neither a position, nor earliest or latest, nor a time like "
            "2030-01-31T06:00:00+00:00. Nothing was changed."
        ) from None
    if moment.tzinfo is None:
        raise UsageError(
            f"--to {text!r} has no time zone. Nothing was changed; write for example "
            f"{moment.isoformat()}+00:00."
        )
    return moment


class Seeker:
    """Moves consumers, in one transaction each, while their workers run."""

    def __init__(self, connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
        assert connection.autocommit, "every operation begins a transaction of its own"
        self._connection = connection
        self._sql = Queries("operator.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)
        self._cleanup_sql = Queries("cleanup.sql", schema)

    def plan(self, consumer: str, target: Target) -> SeekPlan:
        """Find out what a seek would do. Raises OperationRefused for places that are not there."""
        require_no_replay(consumer, "moved")
        place = self._place(consumer)
        return self._planned(place, self._position(target, place))

    def seek(self, plan: SeekPlan, *, again: bool, by: str, reason: str = "") -> Sought:
        """Carry out a plan. Workers lose their leases and come back with the new epoch.

        A consumer that went on since the plan was made is no obstacle: less is passed over.
        """
        for _ in range(DEADLOCKS_MAX):
            try:
                with changing(self._connection, self._sql):
                    return self._move(plan, again=again, by=by, reason=reason)
            except psycopg.errors.DeadlockDetected:
                # Somebody took the lanes in another order; one of the two has to begin anew.
                continue
        raise OperationRefused(
            f"The workers of {plan.consumer} were in the way {DEADLOCKS_MAX} times. Nothing was "
            "changed; try again, or pause it first."
        )

    def _move(self, plan: SeekPlan, *, again: bool, by: str, reason: str) -> Sought:
        locked = lock(self._connection, self._sql, plan.consumer)
        # What is kept now is kept until the books say that this consumer needs it.
        self._run(self._cleanup_sql["hold_pruning"], {"stream_name": locked.stream_name})
        place = self._place(plan.consumer)
        if place.epoch != plan.epoch:
            raise OperationRefused(
                f"{plan.consumer} was moved, or got other lanes, just now. Nothing was changed; "
                "look at `penstock consumers list` and try again."
            )
        current = self._planned(place, plan.position)
        if current.is_backward and not again:
            raise _would_pass_by(current)
        to = {"consumer": plan.consumer, "checkpoint": plan.new_checkpoint}
        unsettled = self._run(self._sql["unsettle"], to).rowcount if again else 0
        self._run(self._sql["begin_epoch"], {**to, "lanes": locked.lane_count})
        self._run(self._sql["start_no_later"], to)
        if again:
            self._run(self._sql["settled_again"], to)
        self._run(self._sql["delete_suspects_before"], to)
        self._run(
            self._sql["record_seek"],
            {**to, "old_checkpoint": current.old_checkpoint, "by": by, "reason": reason},
        )
        return Sought(current, unsettled)

    def _run(self, query: str, parameters: dict[str, Any]) -> psycopg.Cursor[Any]:
        return self._connection.execute(query, parameters)

    def _place(self, consumer: str) -> _Place:
        row = self._run(self._sql["place"], {"consumer": consumer}).fetchone()
        if row is None:
            raise ConsumerUnknown(f"{consumer} is gone: somebody renamed or forgot it just now.")
        return _Place(consumer, *row)

    def _planned(self, place: _Place, position: int) -> SeekPlan:
        _require_reachable(position, place)
        passed_over = max(0, position - 1 - place.floor)
        if passed_over:
            row = self._run(
                self._sql["count_settled"],
                {"consumer": place.consumer, "after": place.floor, "last": position - 1},
            ).fetchone()
            assert row is not None
            passed_over -= int(row[0])
        return SeekPlan(place.consumer, place.epoch, place.floor, position - 1, passed_over)

    def _position(self, target: Target, place: _Place) -> int:
        match target:
            case "earliest":
                return place.first
            case "latest":
                return place.head + 1
            case datetime() if place.is_foreign:
                raise OperationRefused(
                    f"{place.stream_name} is a stream of another service: which event was sent at "
                    "a moment, this database does not know. Nothing was changed; write a "
                    f"position, earliest ({place.first}) or latest ({place.head + 1})."
                )
            case datetime():
                row = self._run(
                    self._outbox_sql["position_at_time"],
                    {"stream_name": place.stream_name, "moment": target},
                ).fetchone()
                return int(row[0]) if row and row[0] else place.head + 1
        return target


def _require_reachable(position: int, place: _Place) -> None:
    if position < 1:
        raise UsageError("Positions begin at 1. Nothing was changed.")
    if position > place.head + 1:
        raise OperationRefused(
            f"Stream {place.stream_name} has given out the positions up to {place.head}, so "
            f"{position} is beyond what comes next. Nothing was changed; --to latest means "
            f"{place.head + 1}."
        )
    if position <= place.floor and position < place.first:
        raise OperationRefused(
            f"Position {position} of {place.stream_name} is not kept any more. Nothing was "
            f"changed; the first that can be handled again is {place.first} (--to earliest)."
        )


def _would_pass_by(plan: SeekPlan) -> OperationRefused:
    return OperationRefused(
        f"{plan.consumer} has finished everything up to {plan.old_checkpoint}. Moved back to "
        f"{plan.position}, it would pass by the events that are settled there. Nothing was "
        "changed. --again makes it handle them once more, with all their writes; "
        "`penstock replay` delivers a range again without touching the live position."
    )
