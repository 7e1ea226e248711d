"""Puts claims into the inbox, in the transaction of whatever connection the application holds.

Two statements. The lock decides who may look: whoever has it not cannot know whether the event is
handled or its handling is about to roll back. The insert decides whether it is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import psycopg
import sqlalchemy
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from sqlalchemy.exc import DBAPIError, InvalidRequestError, UnboundExecutionError
from sqlalchemy.orm import Session

from penstock.core.claims import Claim, lock_number
from penstock.core.require import require
from penstock.errors import (
    AlreadyHandled,
    LockContention,
    SchemaMismatch,
    UnsafeTransaction,
    UsageError,
)
from penstock.stores.queries import Queries

_FAILED_TRANSACTION = "25P02"
_SERIALISATION_FAILURE = "40001"
_SCHEMA_MISSING = frozenset({"42P01", "3F000"})
# Behind a server-side cursor an INSERT cannot run.
_OPTIONS = {"stream_results": False}


def claim_in_session(session: Session, schema: str, claim: Claim) -> None:
    """Claim in the session's transaction, which begins here if it has to."""
    with _errors_translated(schema, claim):
        connection = session.connection()
    claim_through_sqlalchemy(connection, schema, claim)


def claim_through_sqlalchemy(connection: sqlalchemy.Connection, schema: str, claim: Claim) -> None:
    """Claim in the connection's transaction, with any driver."""
    require(
        connection.dialect.name == "postgresql",
        f"Events cannot be claimed in {connection.dialect.name}. Nothing was claimed; pass a "
        "session on PostgreSQL.",
        UsageError,
    )
    queries = Queries("inbox.sql", schema)
    with _errors_translated(schema, claim):
        if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
            raise UnsafeTransaction(
                "In autocommit mode a claim would be done before your data is. Nothing was "
                'claimed; use a connection without isolation_level="AUTOCOMMIT".'
            )
        lock = connection.execute(
            sqlalchemy.text(queries["lock_sqlalchemy"]), _lock(claim), execution_options=_OPTIONS
        )
        _require_locked(claim, lock.one())
        insert = connection.execute(
            sqlalchemy.text(queries["insert_sqlalchemy"]), _row(claim), execution_options=_OPTIONS
        )
        _require_new(claim, insert.one_or_none())


def claim_through_psycopg(connection: psycopg.Connection[Any], schema: str, claim: Claim) -> None:
    """Claim in the transaction of a psycopg connection, which begins here if it has to."""
    queries = Queries("inbox.sql", schema)
    _require_safe(connection)
    # A plain cursor: the connection's own factory may want another notation of parameters.
    with (
        _errors_translated(schema, claim),
        psycopg.Cursor(connection, row_factory=tuple_row) as cursor,
    ):
        _require_locked(claim, cursor.execute(queries["lock"], _lock(claim)).fetchone())
        _require_new(claim, cursor.execute(queries["insert"], _row(claim)).fetchone())


async def claim_through_psycopg_async(
    connection: psycopg.AsyncConnection[Any], schema: str, claim: Claim
) -> None:
    """Claim in the transaction of an asynchronous psycopg connection."""
    queries = Queries("inbox.sql", schema)
    _require_safe(connection)
    with _errors_translated(schema, claim):
        async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
            await cursor.execute(queries["lock"], _lock(claim))
            _require_locked(claim, await cursor.fetchone())
            await cursor.execute(queries["insert"], _row(claim))
            _require_new(claim, await cursor.fetchone())


def _lock(claim: Claim) -> dict[str, Any]:
    return {"number": lock_number(claim)}


def _row(claim: Claim) -> dict[str, Any]:
    return {"consumer": claim.consumer, "event_id": claim.event_id}


def _require_locked(claim: Claim, row: Any) -> None:
    assert row is not None
    require(
        row[0],
        f"Another transaction is handling event {claim.event_id!r} for {claim.consumer} just now, "
        "and may still roll back: the event is not done yet. Nothing was claimed; roll back and "
        "have it delivered again (over HTTP: 503 with Retry-After).",
        LockContention,
    )


def _require_new(claim: Claim, row: Any) -> None:
    require(
        row is not None,
        f"{claim.consumer} has handled event {claim.event_id!r} already, or this very transaction "
        "has claimed it before. Nothing was claimed; do nothing, and tell the other side that the "
        "event has arrived (over HTTP: 200).",
        AlreadyHandled,
    )


def _require_safe(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    status = connection.info.transaction_status
    # While a pipeline is under way, nobody can tell whether a transaction has begun.
    if connection.autocommit and status in (TransactionStatus.IDLE, TransactionStatus.ACTIVE):
        raise UnsafeTransaction(
            "This psycopg connection is in autocommit mode, so a claim would be done before your "
            "data is. Nothing was claimed; claim inside `with connection.transaction():`, and "
            "outside of a pipeline."
        )


@contextmanager
def _errors_translated(schema: str, claim: Claim) -> Iterator[None]:
    try:
        yield
    except UnboundExecutionError as error:
        raise UsageError(
            "This session has no default database, so it is not clear where the claim belongs. "
            "Nothing was claimed; pass session.connection(bind_arguments={...}) instead."
        ) from error
    except InvalidRequestError as error:
        raise _failed_transaction() from error
    except DBAPIError as error:
        _raise_translated(error, error.orig, schema, claim)
    except psycopg.Error as error:
        _raise_translated(error, error, schema, claim)


def _raise_translated(
    error: Exception, driver_error: BaseException | None, schema: str, claim: Claim
) -> NoReturn:
    sqlstate = getattr(driver_error, "sqlstate", None) or getattr(driver_error, "pgcode", None)
    if sqlstate == _SERIALISATION_FAILURE:
        # Most likely it is done, but this transaction is too old to know, and cannot commit.
        raise LockContention(
            f"Another transaction has claimed event {claim.event_id!r} for {claim.consumer} since "
            "this one began, which therefore cannot commit. Nothing was claimed; roll back and "
            "claim again in a new transaction, or have it delivered again (over HTTP: 503)."
        ) from driver_error
    if sqlstate == _FAILED_TRANSACTION:
        raise _failed_transaction() from driver_error
    if sqlstate in _SCHEMA_MISSING:
        raise SchemaMismatch(
            f"Nothing was claimed: {str(driver_error).partition(chr(10))[0]}. "
            f"Run `penstock migrate` for the schema {schema!r} on this database."
        ) from driver_error
    raise error


def _failed_transaction() -> UnsafeTransaction:
    return UnsafeTransaction(
        "There is no transaction to claim in: it has failed, has ended, or was not begun. Nothing "
        "was claimed; roll back and begin again."
    )
