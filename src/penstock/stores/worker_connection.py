"""The worker's own connection: one transaction per batch, lent to handlers as what they ask for.

This is the seam through which a worker's transaction comes. A stage is written once, in plain
calls; `async_worker_connection` has the same calls for `async def` handlers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from penstock.core.handlers import require_done
from penstock.errors import ServerReadOnly
from penstock.stores.direct import BEGIN, COMMIT, Answer, Direct
from penstock.stores.guard import (
    Guard,
    GuardedAsyncConnection,
    GuardedConnection,
    guard_session,
    require_first,
)
from penstock.stores.patient_pipeline import PatientPipeline, patient_pipeline
from penstock.stores.postgres import (
    READ_ONLY_STATE,
    accustom,
    connect_arguments,
    conninfo,
    raise_refusal,
    state_of,
)
from penstock.stores.queries import Queries

T = TypeVar("T")
Parameters = dict[str, Any]
SYNC_DIALECT = "postgresql+psycopg://"
CANCEL_SECONDS = 2.0


def nothing() -> None:
    """What there is to do meanwhile, unless somebody knows better."""


class WorkerConnection(Protocol):
    """What a stage needs of the transaction that it shares with a handler."""

    guard: Guard
    meanwhile: Callable[[], None]
    """Called, where the connection can, while the server is at work. It may find nothing to do."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone, and with it the knowledge of a COMMIT's outcome."""

    @property
    def is_spoiled(self) -> bool:
        """Whether no other batch may use it: given up, or in a transaction that was left open."""

    def run(self, work: Callable[[], T]) -> T:
        """Run a stage's work where the connection lives."""

    def begin(self, query: str, parameters: Parameters) -> None:
        """BEGIN and a first statement, sent at once; nobody need wait for it."""

    def first_row(self) -> tuple[Any, ...] | None:
        """The row of the first statement, also after the end; None where it failed."""

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""

    def fetch(self, query: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """The rows of a statement of the worker's own."""

    def commit_after(self, *statements: tuple[str, Parameters]) -> None:
        """Last statements and COMMIT, in one round trip; an error in one prevents the COMMIT."""

    def rollback(self) -> None:
        """Undo the batch."""

    def close(self) -> None:
        """Give the connection up."""

    def cancel(self) -> None:
        """End the query that runs just now, from any thread; its handler gets the error."""

    def interrupt(self) -> None:
        """Cut the connection, from any thread: the server rolls back, whatever the handler does."""

    def call(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        """Call a handler, and wait for it if it is `async def`."""

    def session(self) -> Any:
        """A new SQLAlchemy session on this transaction."""

    def connection(self) -> Any:
        """The psycopg connection."""

    def cursor(self) -> Any:
        """A psycopg cursor."""

    def pipelined(self) -> AbstractContextManager[Any]:
        """Send statements without waiting for their results, where the driver can."""


class SyncWorkerConnection:
    """For plain handlers."""

    def __init__(
        self, url: str, application_name: str, session_factory: sessionmaker[Session] | None = None
    ) -> None:
        arguments = connect_arguments(application_name)
        made: list[GuardedConnection] = []

        def create() -> GuardedConnection:
            require_first(made)
            made.append(GuardedConnection.connect(conninfo(url), **arguments))
            accustom(made[0], relies_on_locks=True)
            return made[0]

        engine = create_engine(SYNC_DIALECT, creator=create, poolclass=NullPool)
        try:
            self._sqlalchemy: Connection = engine.connect()
        except DBAPIError as error:
            raise_refusal(url, error)
        self._driver = driver = made[0]
        self._direct = Direct(driver)
        self._pipeline: PatientPipeline | None = None
        self._first: Answer | None = None
        self._session_factory = session_factory or sessionmaker()
        self.meanwhile = nothing
        self.guard = driver.guard
        event.listen(engine, "invalidate", driver.guard.give_up)

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.closed

    @property
    def is_spoiled(self) -> bool:
        """Whether no other batch may use it: given up, or in a transaction that was left open."""
        return is_spoiled(self._driver)

    def run(self, work: Callable[[], T]) -> T:
        """Run it here and now."""
        return work()

    def begin(self, query: str, parameters: Parameters) -> None:
        """BEGIN and a first statement, sent at once; nobody need wait for it."""
        if self._pipeline is None:
            self._first = self._direct.send(BEGIN, (query, parameters))
            self._driver.catch_up = self._catch_up
        else:
            self._first = self._pipeline.put(self._direct, BEGIN, (query, parameters))

    def first_row(self) -> tuple[Any, ...] | None:
        """The row of the first statement, also after the end; None where it failed."""
        if self._pipeline is None:
            self._catch_up()
        else:
            self._pipeline.catch_up()
        if self._first is None or self._first.result is None:
            return None
        return self._direct.rows(self._first)[0]

    def _catch_up(self) -> None:
        """Wait for what was sent ahead: whoever uses the connection next does so first."""
        if self._driver.catch_up is not None:
            self._driver.catch_up = None
            if self._direct.is_awaiting:
                self._pass_time(self._direct.collect)
            else:
                self._direct.collect()

    def _pass_time(self, wait: Callable[[], None]) -> None:
        try:
            self.meanwhile()
        finally:
            wait()

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""
        self._driver.execute(query, parameters)

    def fetch(self, query: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """The rows of a statement of the worker's own."""
        return self._driver.execute(query, parameters).fetchall()

    def commit_after(self, *statements: tuple[str, Parameters]) -> None:
        """Last statements and COMMIT, in one round trip; an error in one prevents the COMMIT."""
        if self._pipeline is None:
            # Behind what was sent ahead: where that fails, so does this.
            self._driver.catch_up = None
            self._direct.send(*statements, COMMIT)
            self._pass_time(self._direct.collect)
        else:
            self._pipeline.put(self._direct, *statements, COMMIT)
            self._pass_time(self._pipeline.finish)
        self._forget_transaction()

    def rollback(self) -> None:
        """Undo the batch."""
        if self._driver.catch_up is not None:
            self._driver.catch_up = None
            with suppress(psycopg.Error):
                self._direct.collect()
        if not self._driver.closed:
            self._driver.rollback()
        self._forget_transaction()

    def _forget_transaction(self) -> None:
        # To SQLAlchemy the transaction is still open; by now its ROLLBACK has nothing to undo.
        if (transaction := self._sqlalchemy.get_transaction()) is not None:
            transaction.close()

    def close(self) -> None:
        """Give the connection up, at once and however it is; a second time is harmless."""
        # A borrower may never have given it back.
        self.guard.is_active = False
        if not self._sqlalchemy.closed:
            self._driver.close()
            self._sqlalchemy.invalidate()
            self._sqlalchemy.close()

    def cancel(self) -> None:
        """End the query that runs just now, from any thread; its handler gets the error."""
        self._driver.cancel_safe(timeout=CANCEL_SECONDS)

    def interrupt(self) -> None:
        """Cut the connection, from any thread: the server rolls back, whatever the handler does."""
        cut(self._driver)

    def call(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        """Call a handler."""
        value = function(*arguments)
        require_done(value)
        return value

    def session(self) -> Session:
        """A new SQLAlchemy session on this transaction, of which SQLAlchemy learns here."""
        self._sqlalchemy.begin()
        session = self._session_factory(
            bind=self._sqlalchemy, join_transaction_mode="rollback_only"
        )
        guard_session(session, self.guard)
        return session

    def connection(self) -> psycopg.Connection[Any]:
        """The psycopg connection."""
        self._catch_up()
        return self._driver

    def cursor(self) -> psycopg.Cursor[Any]:
        """A psycopg cursor; one for the whole batch, since making them costs more than using."""
        cursor: psycopg.Cursor[Any] = self._driver.cursor()
        return cursor

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Send statements without waiting for their results."""
        with patient_pipeline(self._driver) as pipeline:
            self._pipeline = pipeline
            try:
                yield
            finally:
                self._pipeline = None


def raise_if_read_only(worker: WorkerConnection, cause: Exception) -> None:
    """After a rollback: say so if it is the server, and not the handler, that takes no writes."""
    if state_of(cause) != READ_ONLY_STATE:
        return
    ((is_read_only,),) = worker.fetch(Queries("worker.sql")["is_server_read_only"], {})
    worker.rollback()
    if is_read_only:
        raise ServerReadOnly(
            "PostgreSQL takes no writes: it is read-only, or a standby. Nothing was committed, and "
            "nothing counts as failed; work goes on as soon as it takes them."
        ) from cause


def is_spoiled(driver: GuardedConnection | GuardedAsyncConnection) -> bool:
    """Whether SQLAlchemy has given a connection up, or a transaction was left open."""
    is_open = driver.pgconn.transaction_status not in (
        TransactionStatus.IDLE,
        # It is closed: that comes out at the next use.
        TransactionStatus.UNKNOWN,
    )
    return is_open or driver.guard.given_up is not None


def cut(driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Shut the socket down under the driver, which must not be touched from another thread."""
    with suppress(OSError, psycopg.OperationalError):
        descriptor = os.dup(driver.pgconn.socket)
        with socket.socket(fileno=descriptor) as own:
            own.shutdown(socket.SHUT_RDWR)
