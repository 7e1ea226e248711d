"""Parked keys as operators see them: the first event of each, and what waits behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from penstock.core.wire import Entry, decode_body
from penstock.stores.dead_letters import Attempt, key_from
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class ParkedEvent:
    """A parked event: in a list, the first of its key."""

    consumer: str
    stream_name: str
    position: int
    event_uuid: UUID
    key: str | None
    waiting: int
    """How many events of its key wait behind it."""
    attempts: int
    next_attempt_in_seconds: float | None
    """None: it is held, or waits behind another."""
    held: bool
    last_error: str | None
    parked_at: datetime
    operation_id: int | None
    """The redrive that put it here."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FullParkedEvent:
    """Everything that is known of a parked event."""

    event: ParkedEvent
    behind: int | None
    """The first position of its key, if it is another."""
    letter_id: int | None
    """Its dead letter, where it is held or redriven."""
    history: tuple[Attempt, ...]
    body: str

    def entry(self) -> Entry:
        """The event as it lay on the log. Raises MalformedEntry."""
        return decode_body(self.event.stream_name, self.event.position, self.body.encode())


class Head(NamedTuple):
    """The first event of a parked key."""

    position: int
    held: bool
    letter_id: int | None


class ParkedKeys:
    """The table `parked_event` for readers, on a connection in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._sql = Queries("parked_key.sql", schema)

    def list(self, consumer: str | None, limit: int) -> tuple[int, list[ParkedEvent]]:
        """How many keys are parked, and the first event of each, by consumer and position."""
        rows = self._connection.execute(
            self._sql["list"], {"consumer": consumer, "limit": limit}, prepare=False
        ).fetchall()
        return (rows[0][0] if rows else 0), [_event(row[1:]) for row in rows]

    def read(self, position: int, consumer: str | None) -> Sequence[FullParkedEvent]:
        """What is parked at a position, for one consumer or for all."""
        rows = self._connection.execute(
            self._sql["read"], {"consumer": consumer, "position": position}, prepare=False
        )
        return [_full(row) for row in rows]

    def heads(
        self, consumer: str, *, key_hash: int | None, after: int, limit: int
    ) -> Sequence[Head]:
        """The first events of a consumer's keys, or of one key, from a position on."""
        rows = self._connection.execute(
            self._sql["heads"],
            {"consumer": consumer, "key_hash": key_hash, "after": after, "limit": limit},
            prepare=False,
        )
        return [Head(*row) for row in rows]


def _event(row: Sequence[Any]) -> ParkedEvent:
    consumer, stream_name, position, event_uuid, key, *rest = row
    return ParkedEvent(consumer, stream_name, position, event_uuid, key_from(key), *rest)


def _full(row: Sequence[Any]) -> FullParkedEvent:
    *event, behind, letter_id, history, body = row
    return FullParkedEvent(
        _event(event), behind, letter_id, tuple(map(Attempt.from_json, history)), body
    )
