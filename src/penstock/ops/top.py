"""What a live view asks: the status, and a few parked keys and dead letters of the newest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from penstock.ops.check import Problem, find_problems
from penstock.ops.revealing import masked_letter
from penstock.ops.status import Status, read_status
from penstock.stores.dead_letters import DeadLetters, FullLetter, TouchedBy, key_from
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]

SHOWN_MAX: Final = 20
LOOKED_AT_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class ParkedHead:
    """The first event of a parked key."""

    consumer: str
    stream_name: str
    position: int
    key: str | None
    waiting: int
    """How many events of its key wait behind it."""
    attempts: int
    next_attempt_in_seconds: float | None
    held: bool
    last_error: str | None


@dataclass(frozen=True, slots=True)
class NewLetter:
    """A dead letter, in one line."""

    id: int
    consumer: str
    stream_name: str
    position: int
    reason: str
    error_type: str | None
    error_message: str | None
    age_ms: int


@dataclass(frozen=True, slots=True)
class Sight:
    """Everything that a screen shows, as it was at one moment."""

    status: Status
    problems: tuple[Problem, ...]
    parked: tuple[ParkedHead, ...]
    letters: tuple[NewLetter, ...]


@dataclass(frozen=True, slots=True)
class OpenLetter:
    """A dead letter in full, without what is sealed of it."""

    full: FullLetter
    operations: tuple[TouchedBy, ...]


def look(
    connection: Connection, schema: str = DEFAULT_SCHEMA, *, stream: str | None = None
) -> Sight:
    """Look once, at everything or at one stream, within bounds, on a connection in autocommit."""
    status = read_status(connection, schema)
    if stream is not None:
        status = only(status, stream)
    queries = Queries("top.sql", schema)
    bounds = {"stream_name": stream, "limit": SHOWN_MAX, "looked_at": LOOKED_AT_MAX}
    with connection.transaction():
        connection.execute(queries["limit_time"])
        parked = connection.execute(queries["parked"], bounds).fetchall()
        letters = connection.execute(queries["letters"], bounds).fetchall()
    return Sight(
        status,
        find_problems(status),
        tuple(map(_head, parked)),
        tuple(NewLetter(*row) for row in letters),
    )


def _head(row: tuple[Any, ...]) -> ParkedHead:
    consumer, stream_name, position, key, *rest = row
    return ParkedHead(consumer, stream_name, position, key_from(key), *rest)


def latest_letter(
    connection: Connection, consumer: str, schema: str = DEFAULT_SCHEMA
) -> OpenLetter | None:
    """The newest dead letter of a consumer as anybody may see it; None where there is none."""
    queries = Queries("top.sql", schema)
    with connection.transaction():
        connection.execute(queries["limit_time"])
        row = connection.execute(queries["latest_letter"], {"consumer": consumer}).fetchone()
        if row is None or row[0] is None:
            return None
        letters = DeadLetters(connection, schema)
        found = letters.read([row[0]])
        if not found:
            return None
        touched = letters.operations(consumer, found[0].letter.event_uuid)
    return OpenLetter(masked_letter(found[0]), tuple(touched))


def only(status: Status, stream: str) -> Status:
    """The status without other streams and whoever reads them."""
    return replace(
        status,
        streams=tuple(each for each in status.streams if each.name == stream),
        consumers=tuple(each for each in status.consumers if each.stream_name == stream),
        leases=tuple(each for each in status.leases if each.stream_name == stream),
    )
