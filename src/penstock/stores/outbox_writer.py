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
from sqlalchemy.exc import StatementError

from penstock.core.outgoing import OutgoingEvent, batch_json
from penstock.core.require import require
from penstock.errors import (
    EventIdentityConflict,
    SchemaMismatch,
    StreamConfidential,
    StreamRestricted,
    UsageError,
)
from penstock.stores.contracts import keeping, promises_of
from penstock.stores.queries import Queries
from penstock.stores.questions import (
    Questions,
    ask,
    ask_async,
    ask_through_sqlalchemy,
    place_of,
    place_under,
)
from penstock.stores.sealing import forget, sealing
from penstock.telemetry.bus import emit
from penstock.telemetry.signals import EventsInserted

_IDENTITY_CONFLICT = "PS010"
_NOT_SEALED = "PS020"
_NOT_ALLOWED = "42501"
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
    with errors_translated(schema):
        questions = preparing(place_under(connection), schema, events)
        batch = ask_through_sqlalchemy(connection, questions)
        # Fetched, because behind a server-side cursor the function runs no earlier.
        connection.execute(statement, {"batch": batch}).scalar_one()
    emit(EventsInserted(len(events)))


def insert(
    connection: psycopg.Connection[Any], schema: str, events: Sequence[OutgoingEvent]
) -> None:
    """Insert in the transaction of a psycopg connection."""
    query = Queries("outbox.sql", schema)["send_many"]
    # A plain cursor: the connection's own factory may want another notation of parameters.
    with errors_translated(schema), psycopg.Cursor(connection) as cursor:
        batch = ask(connection, preparing(place_of(connection), schema, events))
        cursor.execute(query, {"batch": batch})
    emit(EventsInserted(len(events)))


async def insert_async(
    connection: psycopg.AsyncConnection[Any], schema: str, events: Sequence[OutgoingEvent]
) -> None:
    """Insert in the transaction of an asynchronous psycopg connection."""
    query = Queries("outbox.sql", schema)["send_many"]
    with errors_translated(schema):
        batch = await ask_async(connection, preparing(place_of(connection), schema, events))
        async with psycopg.AsyncCursor(connection) as cursor:
            await cursor.execute(query, {"batch": batch})
    emit(EventsInserted(len(events)))


def preparing(place: object, schema: str, events: Sequence[OutgoingEvent]) -> Questions[str]:
    """What comes before the INSERT: contracts kept, confidential events sealed. Gives the batch."""
    yield from keeping(place, schema, promises_of(events))
    return batch_json((yield from sealing(place, schema, events)))


@contextmanager
def errors_translated(schema: str) -> Iterator[None]:
    """What the database refuses, in our words. No event is quoted."""
    try:
        yield
    except StatementError as error:
        # It would print the parameters, and they are the events.
        error.hide_parameters = True
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
    if sqlstate == _NOT_SEALED:
        forget()
        raise StreamConfidential(
            f"{_first_line(driver_error)}. Nothing was stored; this transaction cannot commit, "
            "roll it back. The policy or its key has changed a moment ago: send again."
        ) from driver_error
    if sqlstate == _NOT_ALLOWED and "row-level security" in str(driver_error):
        forget()
        raise StreamRestricted(
            "PostgreSQL keeps this database role from sending to a restricted stream. Nothing was "
            "sent; this transaction cannot commit, roll it back. `penstock policy show` tells "
            "which roles may."
        ) from driver_error
    if sqlstate in _SCHEMA_MISSING:
        raise SchemaMismatch(
            f"The events were not sent: {_first_line(driver_error)}. "
            f"Run `penstock migrate` for the schema {schema!r} on this database."
        ) from driver_error
    raise error


def _first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]
