"""Puts events into the outbox through whatever connection the application holds.

The order of keys, the wake-up of the publisher and the check of identities happen on the server,
in `events.send_many`: one statement, one round trip, however many events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import psycopg
import sqlalchemy
from sqlalchemy.exc import DBAPIError

from penstock.core.outgoing import OutgoingEvent, batch_json
from penstock.core.require import require
from penstock.errors import EventIdentityConflict, SchemaMismatch, UsageError
from penstock.stores.contracts import (
    promises_of,
    require_kept,
    require_kept_async,
    require_kept_through_sqlalchemy,
)
from penstock.stores.queries import Queries
from penstock.telemetry.bus import emit
from penstock.telemetry.signals import EventsInserted

_IDENTITY_CONFLICT = "PS010"
_SCHEMA_MISSING = frozenset({"42P01", "42883", "3F000"})


def insert_through_sqlalchemy(
    connection: sqlalchemy.Connection, schema: str, events: Sequence[OutgoingEvent]
) -> None:
    """Insert in the connection's transaction, with any driver."""
    require(
        connection.dialect.name == "postgresql",
        f"Events cannot be stored in {connection.dialect.name}, so this transaction cannot commit. "
        "Send through a session on PostgreSQL; in tests without a server, do not commit.",
        UsageError,
    )
    statement = sqlalchemy.text(Queries("outbox.sql", schema)["send_many_sqlalchemy"])
    with _errors_translated(schema):
        require_kept_through_sqlalchemy(connection, schema, promises_of(events))
        # Fetched, because behind a server-side cursor the function runs no earlier.
        connection.execute(statement, {"batch": batch_json(events)}).scalar_one()
    emit(EventsInserted(len(events)))


def insert(
    connection: psycopg.Connection[Any], schema: str, events: Sequence[OutgoingEvent]
) -> None:
    """Insert in the transaction of a psycopg connection."""
    query = Queries("outbox.sql", schema)["send_many"]
    # A plain cursor: the connection's own factory may want another notation of parameters.
    with _errors_translated(schema), psycopg.Cursor(connection) as cursor:
        require_kept(connection, schema, promises_of(events))
        cursor.execute(query, {"batch": batch_json(events)})
    emit(EventsInserted(len(events)))


async def insert_async(
    connection: psycopg.AsyncConnection[Any], schema: str, events: Sequence[OutgoingEvent]
) -> None:
    """Insert in the transaction of an asynchronous psycopg connection."""
    query = Queries("outbox.sql", schema)["send_many"]
    with _errors_translated(schema):
        await require_kept_async(connection, schema, promises_of(events))
        async with psycopg.AsyncCursor(connection) as cursor:
            await cursor.execute(query, {"batch": batch_json(events)})
    emit(EventsInserted(len(events)))


@contextmanager
def _errors_translated(schema: str) -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        _raise_translated(error, error.orig, schema)
    except psycopg.Error as error:
        _raise_translated(error, error, schema)


def _raise_translated(
    error: Exception, driver_error: BaseException | None, schema: str
) -> NoReturn:
    # The cause is the driver's error, because SQLAlchemy's own would quote the payloads.
    sqlstate = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
    if sqlstate == _IDENTITY_CONFLICT:
        raise EventIdentityConflict(
            f"{_first_line(driver_error)}. This transaction cannot commit; roll it back. To send "
            "the same event again pass the same content, for a new event leave event_uuid out."
        ) from driver_error
    if sqlstate in _SCHEMA_MISSING:
        raise SchemaMismatch(
            f"The events were not sent: {_first_line(driver_error)}. "
            f"Run `penstock migrate` for the schema {schema!r} on this database."
        ) from driver_error
    raise error


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
