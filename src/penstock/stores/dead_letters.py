"""Dead letters as operators see them: chosen by criteria, grouped, read one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import psycopg

from penstock.core.wire import Entry, decode_body
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]

IDS_SHOWN = 10
"""How many letters of a group are named."""


class State(StrEnum):
    """Where a dead letter is."""

    DEAD = "dead"
    HELD = "held"
    """Its key waits for it, too."""
    REDRIVING = "redriving"
    """A worker handles it, or will."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criteria:
    """Which letters are meant; what is None is not asked for."""

    ids: tuple[int, ...] | None = None
    consumer: str | None = None
    stream_name: str | None = None
    event_type: str | None = None
    error: str | None = None
    """A part of the error's type."""
    fingerprint: str | None = None
    reason: str | None = None
    key_hash: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    first: int | None = None
    last: int | None = None
    states: tuple[State, ...] | None = None

    def parameters(self) -> dict[str, Any]:
        """The same for a query."""
        lists = {"ids": _list(self.ids), "states": _list(self.states)}
        return {**asdict(self), **lists}

    def as_json(self) -> dict[str, Any]:
        """What was asked for, for the records."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in given.items()
        }


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter in a list."""

    id: int
    consumer: str
    stream_name: str
    position: int
    event_uuid: UUID
    event_type: str
    version: int
    key: str | None
    reason: str
    error_type: str | None
    error_message: str | None
    fingerprint: str | None
    attempts: int
    buried_at: datetime
    redrives: int
    state: State

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Group:
    """Letters of a consumer that died of the same."""

    consumer: str
    error_type: str | None
    fingerprint: str | None
    count: int
    held: int
    redriving: int
    first_buried_at: datetime
    last_buried_at: datetime
    example: str | None
    ids: tuple[int, ...]
    """The newest ones, not more than IDS_SHOWN."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at handling an event; an attempt that ended its process left no error."""

    at: str | None
    host: str | None
    error: str | None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Attempt:
        """From what a worker wrote."""
        return cls(value.get("at"), value.get("host"), value.get("error"))


@dataclass(frozen=True, slots=True)
class TouchedBy:
    """An operation that an event was part of: who, when, why."""

    id: int
    kind: str
    requested_by: str
    reason: str
    started_at: datetime
    ended_at: datetime | None
    ended_as: str | None


@dataclass(frozen=True, slots=True)
class FullLetter:
    """Everything that is known of a dead letter."""

    letter: Letter
    traceback: str | None
    handler: str | None
    host: str | None
    attempts: tuple[Attempt, ...]
    body: str

    def entry(self) -> Entry:
        """The event as it lay on the log. Raises MalformedEntry."""
        return decode_body(self.letter.stream_name, self.letter.position, self.body.encode())


@dataclass(frozen=True, slots=True)
class Place:
    """Where a letter is found: its number, its consumer, its event."""

    id: int
    consumer: str
    stream_name: str
    position: int
    event_uuid: UUID


class DeadLetters:
    """The table `dead_letter` for readers, on a connection in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._sql = Queries("dead_letter.sql", schema)

    def list(self, criteria: Criteria, limit: int) -> tuple[int, list[Letter]]:
        """How many match, and the newest of them, newest last."""
        rows = self._chosen("list", criteria, limit=limit).fetchall()
        return (rows[0][0] if rows else 0), [_letter(row[1:]) for row in rows]

    def groups(self, criteria: Criteria, limit: int | None = None) -> tuple[int, Sequence[Group]]:
        """How many groups match, and those with the newest letters, newest last."""
        rows = self._chosen("groups", criteria, limit=limit, ids_shown=IDS_SHOWN).fetchall()
        return (rows[0][0] if rows else 0), [_group(row[1:]) for row in rows]

    def page(
        self, criteria: Criteria, *, last_id: int, after: tuple[int, int], limit: int
    ) -> Sequence[tuple[int, int]]:
        """The next letters after a (position, id), as (position, id), in this order."""
        position, letter_id = after
        rows = self._chosen(
            "page",
            criteria,
            last_id=last_id,
            after_position=position,
            after_id=letter_id,
            limit=limit,
        )
        return [(position, letter_id) for letter_id, position in rows]

    def last_id(self) -> int:
        """The number of the newest letter; 0 without any."""
        return int(self._value("last_id"))

    def find(
        self,
        ids: Sequence[int],
        event_uuids: Sequence[UUID],
        places: Sequence[tuple[str, int]],
    ) -> Sequence[Place]:
        """The letters with these numbers, of these events, or at these places of a stream."""
        rows = self._connection.execute(
            self._sql["find"],
            {
                "ids": list(ids),
                "event_uuids": list(event_uuids),
                "stream_names": [stream for stream, _ in places],
                "positions": [position for _, position in places],
            },
        )
        return [Place(*row) for row in rows]

    def read(self, ids: Sequence[int]) -> Sequence[FullLetter]:
        """These letters in full, in the order of positions."""
        rows = self._connection.execute(self._sql["read"], {"ids": list(ids)})
        return [_full(row) for row in rows]

    def operations(self, consumer: str, event_uuid: UUID) -> Sequence[TouchedBy]:
        """What operators did to an event of a consumer, oldest first."""
        rows = self._connection.execute(
            self._sql["operations"], {"consumer": consumer, "event_uuid": event_uuid}
        )
        return [TouchedBy(*row) for row in rows]

    def guarantees(self, consumers: Sequence[str]) -> dict[str, str]:
        """What consumers promise; those that are not in the books are missing."""
        rows = self._connection.execute(self._sql["guarantees"], {"consumers": list(consumers)})
        return dict(rows.fetchall())

    def clock(self) -> datetime:
        """What time it is where all hosts agree."""
        moment: datetime = self._value("read_clock")
        return moment

    def _value(self, query: str) -> Any:
        row = self._connection.execute(self._sql[query]).fetchone()
        assert row is not None
        return row[0]

    def _chosen(self, query: str, criteria: Criteria, **more: Any) -> psycopg.Cursor[Any]:
        # Never prepared: a plan for all criteria would be one for none of them.
        return self._connection.execute(
            self._sql[query], {**criteria.parameters(), **more}, prepare=False
        )


def key_from(text: str) -> str | None:
    """The key as an entry has it, in JSON; None where there is none, or no entry."""
    key: str | None = json.loads(text) if text else None
    return key


def _letter(row: tuple[Any, ...]) -> Letter:
    values = [*row[:7], key_from(row[7]), *row[8:15], State(row[15])]
    return Letter(*values)


def _group(row: tuple[Any, ...]) -> Group:
    values = [*row[:-1], tuple(row[-1])]
    return Group(*values)


def _full(row: tuple[Any, ...]) -> FullLetter:
    *listed, traceback, handler, host, attempts, body = row
    return FullLetter(
        _letter(tuple(listed)),
        traceback,
        handler,
        host,
        tuple(map(Attempt.from_json, attempts)),
        body,
    )


def _list(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)
