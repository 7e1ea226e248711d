"""The worker's own connection: one transaction per batch, lent to handlers as what they ask for.

This is the seam through which a worker's transaction comes. A stage is written once, in plain
calls; `async_worker_connection` has the same calls for `async def` handlers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeVar

import psycopg
from sqlalchemy import Connection, create_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from penstock.stores.guard import Guard, GuardedConnection, guard_session
from penstock.stores.patient_pipeline import PatientPipeline, patient_pipeline
from penstock.stores.postgres import connect_arguments, conninfo, unreachable

T = TypeVar("T")
Parameters = dict[str, Any]
SYNC_DIALECT = "postgresql+psycopg://"
CANCEL_SECONDS = 2.0


class WorkerConnection(Protocol):
    """What a stage needs of the transaction that it shares with a handler."""

    guard: Guard

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone, and with it the knowledge of a COMMIT's outcome."""

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

    def commit_after(self, query: str, parameters: Parameters) -> None:
        """A last statement and COMMIT, in one round trip; an error in it prevents the COMMIT."""

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
        engine = create_engine(
            SYNC_DIALECT,
            creator=lambda: GuardedConnection.connect(conninfo(url), **arguments),
            poolclass=NullPool,
        )
        try:
            self._sqlalchemy: Connection = engine.connect()
        except psycopg.OperationalError as error:
            raise unreachable(url, error) from error
        driver = self._sqlalchemy.connection.driver_connection
        assert isinstance(driver, GuardedConnection)
        self._driver = driver
        self._pipeline: psycopg.Pipeline | None = None
        self._ahead = ExitStack()
        self._first = driver.cursor()
        self._last = driver.cursor()
        # Apart from the statement before it: a cursor keeps how it adapts the values of one query.
        self._commit = driver.cursor()
        self._session_factory = session_factory or sessionmaker()
        self.guard = driver.guard

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.closed

    def run(self, work: Callable[[], T]) -> T:
        """Run it here and now."""
        return work()

    def begin(self, query: str, parameters: Parameters) -> None:
        """BEGIN and a first statement, sent at once; nobody need wait for it."""
        self._go_ahead()
        self._first.execute(query, parameters)
        if isinstance(self._pipeline, PatientPipeline):
            self._pipeline.send(sync=self._driver.catch_up is not None)

    def first_row(self) -> tuple[Any, ...] | None:
        """The row of the first statement, also after the end; None where it failed."""
        self._catch_up()
        if self._pipeline is None and self._first.pgresult is None:
            return None
        row: tuple[Any, ...] | None = self._first.fetchone()
        return row

    def _go_ahead(self) -> None:
        """Enter a pipeline, unless in one; the next who uses the connection leaves it."""
        if self._pipeline is None:
            self._pipeline = self._ahead.enter_context(patient_pipeline(self._driver))
            self._driver.catch_up = self._catch_up

    def _catch_up(self) -> None:
        """Wait for what was sent ahead. A pipelined batch does that where it ends."""
        if self._driver.catch_up is not None:
            pipeline, self._pipeline = self._pipeline, None
            self._driver.catch_up = None
            with self._ahead:
                if isinstance(pipeline, PatientPipeline):
                    pipeline.finish(sync=False)

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""
        self._driver.execute(query, parameters)

    def fetch(self, query: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """The rows of a statement of the worker's own."""
        return self._driver.execute(query, parameters).fetchall()

    def commit_after(self, query: str, parameters: Parameters) -> None:
        """A last statement and COMMIT, in one round trip; an error in it prevents the COMMIT."""
        self._go_ahead()
        assert self._pipeline is not None
        self._last.execute(query, parameters)
        self._commit.execute("COMMIT", prepare=False)
        if isinstance(self._pipeline, PatientPipeline):
            self._pipeline.finish(sync=True)
        else:
            self._pipeline.sync()
        self._catch_up()
        self._forget_transaction()

    def rollback(self) -> None:
        """Undo the batch."""
        with suppress(psycopg.Error):
            self._catch_up()
        if not self._driver.closed:
            self._driver.rollback()
        self._forget_transaction()

    def _forget_transaction(self) -> None:
        # To SQLAlchemy the transaction is still open; by now its ROLLBACK has nothing to undo.
        if (transaction := self._sqlalchemy.get_transaction()) is not None:
            transaction.close()

    def close(self) -> None:
        """Give the connection up, at once and however it is; a second time is harmless."""
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
        return function(*arguments)

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


def cut(driver: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> None:
    """Shut the socket down under the driver, which must not be touched from another thread."""
    with suppress(OSError, psycopg.OperationalError):
        descriptor = os.dup(driver.pgconn.socket)
        with socket.socket(fileno=descriptor) as own:
            own.shutdown(socket.SHUT_RDWR)
