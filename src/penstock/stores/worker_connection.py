"""The worker's own connection: one transaction per batch, lent to handlers as what they ask for.

This is the seam through which a worker's transaction comes. A stage is written once, in plain
calls; for `async def` handlers the same calls run on an event loop of their own, where
SQLAlchemy's greenlets turn each of them into an await.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import psycopg
from sqlalchemy import Connection, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from penstock.stores.guard import (
    Guard,
    GuardedAsyncConnection,
    GuardedConnection,
    guard_session,
)
from penstock.stores.patient_pipeline import patient_pipeline
from penstock.stores.postgres import connect_arguments, conninfo, unreachable

T = TypeVar("T")
Parameters = dict[str, Any]
SYNC_DIALECT = "postgresql+psycopg://"
ASYNC_DIALECT = "postgresql+psycopg_async://"


class WorkerConnection(Protocol):
    """What a stage needs of the transaction that it shares with a handler."""

    guard: Guard

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone, and with it the knowledge of a COMMIT's outcome."""

    def run(self, work: Callable[[], T]) -> T:
        """Run a stage's work where the connection lives."""

    def begin(self, query: str, parameters: Parameters) -> tuple[Any, ...]:
        """BEGIN and a first statement, in one round trip; returns its row."""

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""

    def commit_after(self, query: str, parameters: Parameters) -> None:
        """A last statement and COMMIT, in one round trip; an error in it prevents the COMMIT."""

    def rollback(self) -> None:
        """Undo the batch."""

    def close(self) -> None:
        """Give the connection up."""

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
        self._session_factory = session_factory or sessionmaker()
        self.guard = driver.guard

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.closed

    def run(self, work: Callable[[], T]) -> T:
        """Run it here and now."""
        return work()

    def begin(self, query: str, parameters: Parameters) -> tuple[Any, ...]:
        """BEGIN and a first statement, in one round trip; returns its row."""
        cursor = self._driver.cursor()
        if self._pipeline is not None:
            cursor.execute(query, parameters)
        else:
            # Leaving the pipeline is the round trip, so nothing inside may ask for results.
            with self._driver.pipeline():
                cursor.execute(query, parameters)
        row: tuple[Any, ...] | None = cursor.fetchone()
        assert row is not None
        return row

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""
        self._driver.execute(query, parameters)

    def commit_after(self, query: str, parameters: Parameters) -> None:
        """A last statement and COMMIT, in one round trip; an error in it prevents the COMMIT."""
        cursor = self._driver.cursor()
        if self._pipeline is not None:
            cursor.execute(query, parameters)
            cursor.execute("COMMIT", prepare=False)
            self._pipeline.sync()
        else:
            with self._driver.pipeline():
                cursor.execute(query, parameters)
                cursor.execute("COMMIT", prepare=False)
        self._forget_transaction()

    def rollback(self) -> None:
        """Undo the batch."""
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
        return self._driver

    def cursor(self) -> psycopg.Cursor[Any]:
        """A psycopg cursor; one for the whole batch, since making them costs more than using."""
        return self._driver.cursor()

    @contextmanager
    def pipelined(self) -> Iterator[None]:
        """Send statements without waiting for their results."""
        with patient_pipeline(self._driver) as pipeline:
            self._pipeline = pipeline
            try:
                yield
            finally:
                self._pipeline = None


class AsyncWorkerConnection:
    """For `async def` handlers: the same transaction, on an event loop in a thread of its own."""

    def __init__(
        self,
        url: str,
        application_name: str,
        session_factory: async_sessionmaker[AsyncSession] | None = None,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-handlers", daemon=True
        )
        self._thread.start()
        self._session_factory = session_factory or async_sessionmaker()
        try:
            self._sqlalchemy: AsyncConnection = self._on_loop(self._open(url, application_name))
        except psycopg.OperationalError as error:
            self._end_loop()
            raise unreachable(url, error) from error
        self.guard = self._driver.guard

    async def _open(self, url: str, application_name: str) -> AsyncConnection:
        arguments = connect_arguments(application_name)

        async def create() -> GuardedAsyncConnection:
            return await GuardedAsyncConnection.connect(conninfo(url), **arguments)

        engine = create_async_engine(ASYNC_DIALECT, async_creator=create, poolclass=NullPool)
        connection = await engine.connect()
        raw = await connection.get_raw_connection()
        driver = raw.driver_connection
        assert isinstance(driver, GuardedAsyncConnection)
        self._driver = driver
        return connection

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _await(self, make: Callable[[GuardedAsyncConnection], Coroutine[Any, Any, T]]) -> T:
        """Await on the loop; only inside `run`, whose greenlet makes that possible."""
        assert self._sqlalchemy.sync_connection is not None
        proxy: Any = self._sqlalchemy.sync_connection.connection
        result: T = proxy.run_async(make)
        return result

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.closed

    def run(self, work: Callable[[], T]) -> T:
        """Run it on the loop, in a greenlet that may await."""
        return self._on_loop(self._sqlalchemy.run_sync(lambda _: work()))

    def begin(self, query: str, parameters: Parameters) -> tuple[Any, ...]:
        """BEGIN and a first statement, in one round trip; returns its row."""

        async def begin(driver: GuardedAsyncConnection) -> Any:
            cursor = driver.cursor()
            async with driver.pipeline():
                await cursor.execute(query, parameters)
            return await cursor.fetchone()

        row: tuple[Any, ...] = self._await(begin)
        return row

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""
        self._await(lambda driver: driver.execute(query, parameters))

    def commit_after(self, query: str, parameters: Parameters) -> None:
        """A last statement and COMMIT, in one round trip; an error in it prevents the COMMIT."""

        async def commit(driver: GuardedAsyncConnection) -> None:
            async with driver.pipeline():
                cursor = driver.cursor()
                await cursor.execute(query, parameters)
                await cursor.execute("COMMIT", prepare=False)

        self._await(commit)
        self._forget_transaction()

    def rollback(self) -> None:
        """Undo the batch."""
        if not self._driver.closed:
            self._await(lambda driver: driver.rollback())
        self._forget_transaction()

    def _forget_transaction(self) -> None:
        assert self._sqlalchemy.sync_connection is not None
        if (transaction := self._sqlalchemy.sync_connection.get_transaction()) is not None:
            transaction.close()

    def close(self) -> None:
        """Give the connection up, at once and however it is; a second time is harmless."""
        if not self._loop.is_closed():
            self._on_loop(self._close())
            self._end_loop()

    async def _close(self) -> None:
        await self._driver.close()
        await self._sqlalchemy.invalidate()
        await self._sqlalchemy.close()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        self._loop.close()

    def call(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        """Call a handler and wait for it."""
        return self._await(lambda _: function(*arguments))

    def session(self) -> AsyncSession:
        """A new SQLAlchemy session on this transaction, of which SQLAlchemy learns here."""
        assert self._sqlalchemy.sync_connection is not None
        self._sqlalchemy.sync_connection.begin()
        session = self._session_factory(
            bind=self._sqlalchemy, join_transaction_mode="rollback_only"
        )
        guard_session(session.sync_session, self.guard)
        return session

    def connection(self) -> psycopg.AsyncConnection[Any]:
        """The psycopg connection."""
        return self._driver

    def cursor(self) -> psycopg.AsyncCursor[Any]:
        """A psycopg cursor."""
        return self._driver.cursor()

    def pipelined(self) -> AbstractContextManager[Any]:
        """Async handlers await their results anyway."""
        return nullcontext()
