"""The table `timer`, as those use it who fire: each question is one statement, on autocommit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
import psycopg

from penstock.core.outgoing import OutgoingEvent, batch_json
from penstock.core.timers import seal_uuid
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Firing:
    """What came of firing what is due."""

    moment: datetime
    """Until when they were due, by the database's clock."""
    fired: int
    met_special: bool
    """Whether the next one due has to be prepared: it recurs, or it is confidential."""
    left_due: bool
    """Whether something is due that was not fired."""
    busy_slots: frozenset[int]
    """Keys that transactions of others hold."""
    wait_seconds: float | None
    """Until the next one is due; None: there is none."""
    late_seconds: float


@dataclass(frozen=True, slots=True)
class DueTimer:
    """A timer that is due, as it was read."""

    timer_id: str
    generation: int
    event: OutgoingEvent
    """What waits, sealed where it is; under an identity that is not an event's."""
    due_at: datetime
    schedule: str | None
    """How it recurs, as JSON."""
    moment: datetime
    """When it was read, by the database's clock."""


@dataclass(frozen=True, slots=True)
class PreparedTimer:
    """What is to become of a timer: events, and another firing or none."""

    timer: DueTimer
    events: Sequence[OutgoingEvent]
    next_due_at: datetime | None
    shredded_key_id: str | None = None
    """The key that was destroyed, where that is why there is no event."""

    @property
    def size_bytes(self) -> int:
        """About how much its events are."""
        return sum(len(event.payload) + len(event.metadata) for event in self.events)


@dataclass(frozen=True, slots=True)
class PreparedFiring:
    """What came of firing prepared timers: the ids of those that were, and keys that were busy."""

    fired: frozenset[str]
    busy_slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class Exceptions:
    """What a pass leaves alone: keys that are busy, streams without a key, timers tried before."""

    busy: Collection[int] = ()
    streams: Collection[str] = ()
    timer_ids: Collection[str] = ()


class Timekeeping:
    """Fires timers; callers bring an autocommit connection."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("timekeeping.sql", schema)

    def fire(
        self,
        connection: Connection,
        batch_size: int,
        but: Exceptions,
        *,
        since: datetime | None = None,
    ) -> Firing | None:
        """Fire what is due, in order, up to what has to be prepared; None: somebody else does.

        `since` is a hint: what was due before it is left for another time.
        """
        parameters = {
            "batch_size": batch_size,
            "busy": list(but.busy),
            "without": list(but.streams),
            "since": since,
        }
        row = connection.execute(self._sql["fire"], parameters).fetchone()
        assert row is not None
        moment, fired, met_special, left_due, busy_slots, wait_seconds, late_seconds = row
        if fired is None:
            return None
        busy = frozenset(busy_slots)
        return Firing(moment, fired, met_special, left_due, busy, wait_seconds, late_seconds or 0.0)

    def read_due(self, connection: Connection, batch_size: int, but: Exceptions) -> list[DueTimer]:
        """What is due, in order, to be prepared."""
        parameters = {
            "batch_size": batch_size,
            "busy": list(but.busy),
            "without": list(but.streams),
            "passed_by": list(but.timer_ids),
        }
        return [_due(row) for row in connection.execute(self._sql["read_due"], parameters)]

    def fire_prepared(
        self, connection: Connection, timers: Sequence[PreparedTimer]
    ) -> PreparedFiring | None:
        """Fire what is still as it was read; None: somebody else is at it."""
        batch = "[" + ",".join(map(_prepared_json, timers)) + "]"
        row = connection.execute(self._sql["fire_prepared"], {"batch": batch}).fetchone()
        assert row is not None
        fired, busy_slots = row
        return None if fired is None else PreparedFiring(frozenset(fired), frozenset(busy_slots))

    def hold(self, connection: Connection, timer: DueTimer, reason: str) -> bool:
        """Set a timer aside that cannot be fired; False: it was changed meanwhile."""
        parameters = {
            "timer_id": timer.timer_id,
            "generation": timer.generation,
            "reason": reason,
        }
        return connection.execute(self._sql["hold"], parameters).rowcount > 0


def _due(row: Sequence[Any]) -> DueTimer:
    timer_id, generation, stream_name, event_type, version, key, key_id, *rest = row
    payload, metadata, due_at, schedule, moment = rest
    event = OutgoingEvent(
        seal_uuid(timer_id),
        stream_name,
        event_type,
        version,
        key,
        payload,
        metadata,
        key_id=key_id,
    )
    return DueTimer(
        timer_id, generation, event, due_at.astimezone(UTC), schedule, moment.astimezone(UTC)
    )


def _prepared_json(timer: PreparedTimer) -> str:
    next_due_at = timer.next_due_at
    names = orjson.dumps(
        {
            "timer_id": timer.timer.timer_id,
            "generation": timer.timer.generation,
            "next_due_at": None if next_due_at is None else next_due_at.isoformat(),
        }
    ).decode()
    return f'{names[:-1]},"events":{batch_json(timer.events)}}}'
