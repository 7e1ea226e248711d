"""The worker's connection for `async def` handlers: the same plain calls, on an event loop.

The loop has a thread of its own, and SQLAlchemy's greenlets turn each call into an await.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

import psycopg
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_only

from penstock.core.handlers import require_done
from penstock.errors import HandlerQuit
from penstock.stores.guard import GuardedAsyncConnection, guard_session, require_first
from penstock.stores.postgres import (
    ISOLATION,
    accustom,
    connect_arguments,
    conninfo,
    raise_refusal,
)
from penstock.stores.worker_connection import (
    CANCEL_SECONDS,
    Parameters,
    cut,
    is_spoiled,
    nothing,
)

T = TypeVar("T")
ASYNC_DIALECT = "postgresql+psycopg_async://"
END_SECONDS = 5.0


class _SharedLoop:
    """One event loop for the handlers of all lanes of a process, in a thread of its own.

    It runs while anybody uses it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._is_over = False
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread

    def enter(self) -> asyncio.AbstractEventLoop:
        """Use the loop from now on."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._loop = asyncio.new_event_loop()
                self._is_over = False
                self._thread = threading.Thread(
                    target=self._run, name="penstock-handlers", daemon=True
                )
                self._thread.start()
            return self._loop

    def leave(self) -> None:
        """Use it no more; the last one ends it."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._is_over = True
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(timeout=END_SECONDS)
                self._loop.close()

    def _run(self) -> None:
        """Until the last one leaves: a handler may stop the loop, or end it from a task."""
        while not self._is_over:
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()


_shared_loop = _SharedLoop()


def enter_loop() -> asyncio.AbstractEventLoop:
    """The event loop of this process's handlers, to be left with `leave_loop`."""
    return _shared_loop.enter()


def leave_loop() -> None:
    """Use the loop no more; the last one ends it."""
    _shared_loop.leave()


class AsyncWorkerConnection:
    """For `async def` handlers: the same transaction, as a task on the process's event loop."""

    def __init__(
        self,
        url: str,
        application_name: str,
        session_factory: async_sessionmaker[AsyncSession] | None = None,
    ) -> None:
        self._loop = _shared_loop.enter()
        self._is_closed = False
        self._session_factory = session_factory or async_sessionmaker()
        try:
            self._sqlalchemy: AsyncConnection = self._on_loop(self._open(url, application_name))
        except BaseException as error:
            _shared_loop.leave()
            if isinstance(error, DBAPIError):
                raise_refusal(url, error)
            raise
        self.guard = self._driver.guard
        # The loop has other handlers to go on with.
        self.meanwhile = nothing
        self._first_row: tuple[Any, ...] | None = None

    async def _open(self, url: str, application_name: str) -> AsyncConnection:
        arguments = connect_arguments(application_name)

        made: list[GuardedAsyncConnection] = []

        async def create() -> GuardedAsyncConnection:
            require_first(made)
            made.append(await GuardedAsyncConnection.connect(conninfo(url), **arguments))
            # It asks the server, which may keep silent: the loop goes on meanwhile.
            await asyncio.to_thread(accustom, made[0], relies_on_locks=True)
            await made[0].set_isolation_level(ISOLATION)
            return made[0]

        engine = create_async_engine(ASYNC_DIALECT, async_creator=create, poolclass=NullPool)
        connection = await engine.connect()
        self._driver = made[0]
        event.listen(engine.sync_engine, "invalidate", self._driver.guard.give_up)
        return connection

    def _on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _await(self, make: Callable[[GuardedAsyncConnection], Coroutine[Any, Any, T]]) -> T:
        """Await on the loop; only inside `run`, whose greenlet makes that possible.

        Not through SQLAlchemy's connection: that may have been given up.
        """
        result: T = await_only(make(self._driver))
        return result

    @property
    def is_lost(self) -> bool:
        """Whether the connection is gone."""
        return self._driver.closed

    @property
    def is_spoiled(self) -> bool:
        """Whether no other batch may use it: given up, or in a transaction that was left open."""
        return is_spoiled(self._driver)

    def run(self, work: Callable[[], T]) -> T:
        """Run it on the loop, in a greenlet that may await."""
        return self._on_loop(self._sqlalchemy.run_sync(lambda _: work()))

    def begin(self, query: str, parameters: Parameters) -> None:
        """BEGIN and a first statement, in one round trip; awaited, so that the code is plain."""

        async def begin(driver: GuardedAsyncConnection) -> Any:
            cursor = driver.cursor()
            async with _one_trip(driver):
                await cursor.execute(query, parameters)
            return await cursor.fetchone()

        self._first_row = None
        self._first_row = self._await(begin)

    def first_row(self) -> tuple[Any, ...] | None:
        """The row of the first statement, also after the end; None where it failed."""
        return self._first_row

    def execute(self, query: str, parameters: Parameters) -> None:
        """A statement of the worker's own."""
        self._await(lambda driver: driver.execute(query, parameters))

    def fetch(self, query: str, parameters: Parameters) -> list[tuple[Any, ...]]:
        """The rows of a statement of the worker's own."""

        async def fetch(driver: GuardedAsyncConnection) -> list[tuple[Any, ...]]:
            return await (await driver.execute(query, parameters)).fetchall()

        return self._await(fetch)

    async def run_within(self, work: Callable[[], T]) -> T:
        """Run a stage's work from inside a handler."""
        return await self._sqlalchemy.run_sync(lambda _: work())

    def commit_after(self, *statements: tuple[str, Parameters]) -> None:
        """Last statements and COMMIT, in one round trip; an error in one prevents the COMMIT."""

        async def commit(driver: GuardedAsyncConnection) -> None:
            async with _one_trip(driver):
                cursor = driver.cursor()
                for query, parameters in statements:
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
        self.guard.is_active = False
        if not self._is_closed:
            self._is_closed = True
            self._on_loop(self._close())
            _shared_loop.leave()

    async def _close(self) -> None:
        await self._driver.close()
        await self._sqlalchemy.invalidate()
        await self._sqlalchemy.close()

    def cancel(self) -> None:
        """End the query that runs just now, from any thread; its handler gets the error."""
        self._on_loop(self._driver.cancel_safe(timeout=CANCEL_SECONDS))

    def interrupt(self) -> None:
        """Cut the connection, from any thread: the server rolls back, whatever the handler does."""
        cut(self._driver)

    def call(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        """Call a handler and wait for it."""
        value = self._await(lambda _: _uncancelled(function(*arguments)))
        require_done(value)
        return value

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


async def _uncancelled(handling: Awaitable[T]) -> T:
    """Await a handler. One that has cancelled its own task fails, and the task goes on."""
    value = await handling
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while task.uncancel():
            pass
        raise HandlerQuit("The handler cancelled the task that it runs in, which ends nobody here.")
    return value


@asynccontextmanager
async def _one_trip(driver: GuardedAsyncConnection) -> AsyncIterator[None]:
    """Statements that are sent together; left without an error, as `patient_pipeline` is."""
    failure: BaseException | None = None
    try:
        async with driver.pipeline():
            try:
                yield
            except BaseException as error:  # noqa: BLE001 - raised again below
                failure = error
    except psycopg.Error:
        if failure is None:
            raise
    if failure is not None:
        raise failure
