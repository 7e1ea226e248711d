"""Carries questions about timers into the transaction of whatever the application holds, at once.

What the database refuses is said in Penstock's words, and no event is quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeAlias, TypeVar

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from sqlalchemy.engine import TwoPhaseTransaction
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session

from penstock.core.require import require
from penstock.errors import (
    InvalidTimer,
    SchemaMismatch,
    StreamConfidential,
    StreamRestricted,
    UnsafeTransaction,
    UsageError,
)
from penstock.stores.questions import (
    Questions,
    ask,
    ask_async,
    ask_through_sqlalchemy,
    place_of,
    place_under,
)
from penstock.stores.sealing import forget

T = TypeVar("T")
Asking: TypeAlias = Callable[[object], Questions[T]]
"""Makes the questions for a place, which tells databases apart."""

_NOT_SEALED = "PS020"
_NOT_ALLOWED = "42501"
_FAILED_TRANSACTION = "25P02"
_UNKEEPABLE = frozenset({"23514", "22P02", "22P05", "22008", "22007", "22023"})
_SCHEMA_MISSING = frozenset({"42P01", "42703", "42883", "3F000"})


def ask_in_session(session: Session, schema: str, asking: Asking[T]) -> T:
    """Ask in the session's transaction, which begins here if it has to."""
    with _errors_translated(schema):
        connection = session.connection()
    return ask_in_connection(connection, schema, asking)


def ask_in_connection(connection: sqlalchemy.Connection, schema: str, asking: Asking[T]) -> T:
    """Ask in the connection's transaction, with any driver."""
    require(
        connection.dialect.name == "postgresql",
        f"Timers cannot be kept in {connection.dialect.name}. Nothing was changed; pass a session "
        "on PostgreSQL.",
        UsageError,
    )
    with _errors_translated(schema):
        if isinstance(connection.get_transaction(), TwoPhaseTransaction):
            raise UnsafeTransaction(
                "The outcome of a two-phase transaction is decided elsewhere, so a timer cannot "
                "depend on it. Nothing was changed; use a transaction on one database."
            )
        if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
            raise UnsafeTransaction(
                "In autocommit mode a timer would not be atomic with your data. Nothing was "
                'changed; use a connection without isolation_level="AUTOCOMMIT".'
            )
        return ask_through_sqlalchemy(connection, asking(place_under(connection)))


def ask_in_psycopg(connection: psycopg.Connection[Any], schema: str, asking: Asking[T]) -> T:
    """Ask in the transaction of a psycopg connection, which begins here if it has to."""
    _require_safe(connection)
    with _errors_translated(schema):
        return ask(connection, asking(place_of(connection)))


async def ask_in_psycopg_async(
    connection: psycopg.AsyncConnection[Any], schema: str, asking: Asking[T]
) -> T:
    """Ask in the transaction of an asynchronous psycopg connection."""
    _require_safe(connection)
    with _errors_translated(schema):
        return await ask_async(connection, asking(place_of(connection)))


def _require_safe(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    status = connection.info.transaction_status
    # While a pipeline is under way, nobody can tell whether a transaction has begun.
    if connection.autocommit and status in (TransactionStatus.IDLE, TransactionStatus.ACTIVE):
        raise UnsafeTransaction(
            "This psycopg connection is in autocommit mode, so a timer would not be atomic with "
            "your data. Nothing was changed; do it inside `with connection.transaction():`, and "
            "outside of a pipeline."
        )


@contextmanager
def _errors_translated(schema: str) -> Iterator[None]:
    try:
        yield
    except UnboundExecutionError as error:
        raise UsageError(
            "This session has no default database, so it is not clear where the timer belongs. "
            "Nothing was changed; pass session.connection(bind_arguments={...}) instead."
        ) from error
    except InvalidRequestError as error:
        raise _failed_transaction() from error
    except DBAPIError as error:
        # It would print the parameters, and they are the event.
        error.hide_parameters = True
        _raise_translated(error, error.orig, schema)
    except psycopg.Error as error:
        _raise_translated(error, error, schema)


def _raise_translated(
    error: Exception, driver_error: BaseException | None, schema: str
) -> NoReturn:
    sqlstate = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
    said = str(driver_error).partition("\n")[0]
    if sqlstate == _NOT_SEALED:
        forget()
        raise StreamConfidential(
            f"{said}. Nothing was stored; this transaction cannot commit, roll it back. The policy "
            "or its key has changed a moment ago: schedule again."
        ) from driver_error
    if sqlstate == _NOT_ALLOWED and "row-level security" in str(driver_error):
        forget()
        raise StreamRestricted(
            "PostgreSQL keeps this database role from timers of a restricted stream, or the id is "
            "taken by one. Nothing was changed; this transaction cannot commit, roll it back. "
            "`penstock policy show` tells which roles may."
        ) from driver_error
    if sqlstate in _SCHEMA_MISSING:
        raise SchemaMismatch(
            f"Nothing was done about timers: {said}. "
            f"Run `penstock migrate` for the schema {schema!r} on this database."
        ) from driver_error
    if sqlstate == _FAILED_TRANSACTION:
        raise _failed_transaction() from driver_error
    if sqlstate in _UNKEEPABLE:
        # Not as its cause: the details of such an error quote the row.
        raise InvalidTimer(
            f"PostgreSQL refuses the timer: {said}. Nothing was stored; this transaction cannot "
            "commit, roll it back."
        ) from None
    raise error


def _failed_transaction() -> UnsafeTransaction:
    return UnsafeTransaction(
        "There is no transaction for the timer: it has failed, has ended, or was not begun. "
        "Nothing was changed; roll back and begin again."
    )
