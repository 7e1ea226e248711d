"""Handlers that are interrupted in a statement: SQLAlchemy gives their connection up, we do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Guarantee, Pipeline, Retry
from penstock.errors import RollbackInTransactionError
from penstock.stores.guard import GuardedCursor
from penstock.stores.worker_connection import SyncWorkerConnection
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from penstock.telemetry.signals import EventFailed, ServerLost, Signal
from tests.events import Placed
from tests.settling import effects, settle
from tests.test_seams import working
from tests.waiting import wait_until

EVENTS = 6
SECOND, TROUBLED = 2, 3
INSERT = text("INSERT INTO effect (n) VALUES (:n)")
SLOW = text("SELECT pg_sleep(60)")
OUTCOMES = "SELECT DISTINCT outcome FROM events.processed_event"
LIMIT_SECONDS = 0.2


class Once:
    """Lets something happen to one event, the first time it is handled."""

    def __init__(self, troubled: int = TROUBLED) -> None:
        self._troubled = troubled
        self._is_over = False

    def now(self, event: Placed) -> bool:
        if self._is_over or event.n != self._troubled:
            return False
        self._is_over = True
        return True


@pytest.fixture(autouse=True)
def failed() -> Iterator[set[int]]:
    """Which events have failed: none but the troubled ones.

    Nobody may have taken any of it for a server that went away either.
    """
    failed, lost = set[int](), list[Signal]()

    def note(signal: Signal) -> None:
        if isinstance(signal, EventFailed):
            failed.add(signal.position)
        elif isinstance(signal, ServerLost):
            lost.append(signal)

    subscribe_to_all(note)
    yield failed
    unsubscribe(note)
    assert lost == []
    assert failed <= {TROUBLED, EVENTS}


def effects_of(database_url: str, handler: Callable[..., Any], **options: Any) -> list[int]:
    """What a handler leaves behind once all events are settled, having checked that none died."""
    retry = Retry.fixed(seconds=0.02, attempts_max=5)
    settle(database_url, handler, EVENTS, retry=retry, **options)
    with psycopg.connect(database_url) as connection:
        assert connection.execute(OUTCOMES).fetchall() == [("handled",)]
    return effects(database_url)


ALL = list(range(1, EVENTS + 1))


# ── plain handlers ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_handler_whose_time_ends_in_a_query(database_url: str, batch_size: int) -> None:
    once = Once()

    def handle(event: Placed, session: Session) -> None:
        session.execute(INSERT, {"n": event.n})
        if once.now(event):
            session.execute(SLOW)

    limits = {"timeout_seconds": LIMIT_SECONDS, "batch_size": batch_size}
    assert effects_of(database_url, handle, **limits) == ALL


def of_the_session(session: Session) -> None:
    session.invalidate()


def of_its_connection(session: Session) -> None:
    session.connection().invalidate()


@pytest.mark.parametrize("invalidate", [of_the_session, of_its_connection])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_handler_that_invalidates(
    database_url: str, invalidate: Callable[[Session], None], is_first: bool
) -> None:
    once = Once()

    def handle(event: Placed, session: Session) -> None:
        if is_first and once.now(event):
            invalidate(session)
        session.execute(INSERT, {"n": event.n})
        if once.now(event):
            invalidate(session)

    assert effects_of(database_url, handle) == ALL


def test_there_is_no_second_connection(database_url: str) -> None:
    worker = SyncWorkerConnection(database_url, "penstock test worker")
    worker.session().connection().invalidate()
    worker.rollback()
    with pytest.raises(RollbackInTransactionError, match="has given up the connection"):
        worker.session().execute(text("SELECT 1"))
    worker.close()


def test_a_handler_that_swallows_an_interrupt(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, execute = Once(), GuardedCursor.execute

    def interrupted(cursor: GuardedCursor, query: Any, *arguments: Any, **more: Any) -> Any:
        if "'slow'" in str(query):
            raise KeyboardInterrupt
        return execute(cursor, query, *arguments, **more)

    monkeypatch.setattr(GuardedCursor, "execute", interrupted)

    def handle(event: Placed, session: Session) -> None:
        session.execute(INSERT, {"n": event.n})
        if once.now(event):
            with suppress(KeyboardInterrupt):
                session.execute(text("SELECT 'slow'"))

    assert effects_of(database_url, handle) == ALL


def test_a_handler_that_leaves_its_session_unable_to_write(database_url: str) -> None:
    """Even to set the event aside; a new connection has none of it."""
    once = Once(SECOND)

    def handle(event: Placed, session: Session) -> None:
        if once.now(event):
            session.execute(text("SET default_transaction_read_only = on"))
        session.execute(INSERT, {"n": event.n})

    assert effects_of(database_url, handle, batch_size=1) == ALL


# ── async handlers ─────────────────────────────────────────────────────────────────────────────


async def by_asyncio(session: AsyncSession) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        await session.execute(SLOW)


async def swallowed(session: AsyncSession) -> None:
    with suppress(TimeoutError):
        await by_asyncio(session)


async def by_hand(session: AsyncSession) -> None:
    await session.invalidate()


async def by_its_limit(session: AsyncSession) -> None:
    await session.execute(SLOW)


@pytest.mark.parametrize("trouble", [by_asyncio, swallowed, by_hand, by_its_limit])
def test_an_async_handler_that_is_cancelled_in_a_query(
    database_url: str, trouble: Callable[[AsyncSession], Any]
) -> None:
    once = Once()

    async def handle(event: Placed, session: AsyncSession) -> None:
        await session.execute(INSERT, {"n": event.n})
        if once.now(event):
            await trouble(session)

    limits = {"timeout_seconds": LIMIT_SECONDS} if trouble is by_its_limit else {}
    assert effects_of(database_url, handle, **limits) == ALL


# ── what is completed by hand ──────────────────────────────────────────────────────────────────


def quits(session: Session) -> None:
    raise SystemExit(3)


def is_slow(session: Session) -> None:
    session.execute(SLOW)


@pytest.mark.parametrize("trouble", [quits, is_slow])
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_a_completion_that_is_interrupted(
    database_url: str, trouble: Callable[[Session], None], is_swallowed: bool
) -> None:
    once = Once()

    def handle(event: Placed, context: Context) -> None:
        with suppress(*([SystemExit] if is_swallowed else [])), context.complete() as session:
            session.execute(INSERT, {"n": event.n})
            if once.now(event):
                trouble(session)

    options = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    limits = {"timeout_seconds": LIMIT_SECONDS} if trouble is is_slow else {}
    done = [n for n in ALL if not (is_swallowed and trouble is quits and n == TROUBLED)]
    assert effects_of(database_url, handle, **options, **limits) == done


async def waits(session: AsyncSession) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize("trouble", [waits, by_its_limit])
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_async_completion_that_is_cancelled(
    database_url: str, trouble: Callable[[AsyncSession], Any], is_swallowed: bool
) -> None:
    once = Once()

    async def complete(event: Placed, context: Context) -> None:
        async with context.complete() as session:
            await session.execute(INSERT, {"n": event.n})
            if once.now(event):
                await trouble(session)

    async def handle(event: Placed, context: Context) -> None:
        with suppress(*([TimeoutError] if is_swallowed else [])):
            await asyncio.wait_for(complete(event, context), LIMIT_SECONDS)

    options = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    # In a query, the connection is given up, so that the event fails though its handler returns.
    is_left_out = is_swallowed and trouble is waits
    done = [n for n in ALL if not (is_left_out and n == TROUBLED)]
    assert effects_of(database_url, handle, **options) == done


def test_what_came_before_an_interrupted_completion_has_not_failed(
    database_url: str, failed: set[int]
) -> None:
    once, calls = Once(), Counter[int]()

    def handle(event: Placed, context: Context) -> None:
        calls[event.n] += 1
        if once.now(event):
            with context.complete() as session:
                of_its_connection(session)
                raise LookupError

    options = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    effects_of(database_url, handle, **options)
    assert failed == {TROUBLED}
    # Nor was it called again: it is settled on another connection.
    assert calls == Counter([*ALL, TROUBLED])


@pytest.mark.parametrize("troubled", [TROUBLED, EVENTS])
def test_a_completion_that_is_never_left(database_url: str, troubled: int) -> None:
    once, kept = Once(troubled), list[Any]()

    def handle(event: Placed, context: Context) -> None:
        block = context.complete()
        block.__enter__().execute(INSERT, {"n": event.n})
        if once.now(event):
            kept.append(block)
        else:
            block.__exit__(None, None, None)

    options = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    assert effects_of(database_url, handle, **options) == ALL


def test_what_came_before_a_completion_that_is_never_left_is_not_called_again(
    database_url: str,
) -> None:
    once, calls, kept = Once(), Counter[int](), list[Any]()

    def handle(event: Placed, context: Context) -> None:
        calls[event.n] += 1
        if once.now(event):
            kept.append(context.complete())
            kept[0].__enter__().execute(INSERT, {"n": event.n})

    options = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    assert effects_of(database_url, handle, **options) == []
    # In its transaction, which is left open, nothing can be settled.
    assert calls == Counter([*ALL, TROUBLED])


# ── timers in Redis ────────────────────────────────────────────────────────────────────────────


def test_a_timer_whose_handler_is_cancelled_in_a_query(database_url: str, redis_url: str) -> None:
    once = Once()
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)

    @pipeline.timer("reminders", max_concurrent=1, retry=Retry.fixed(seconds=0.02))
    async def remind(event: Placed, session: AsyncSession) -> None:
        await session.execute(INSERT, {"n": event.n})
        if once.now(event):
            await by_asyncio(session)

    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        for n in ALL:
            pipeline.timers.publish(
                {"n": n}, "reminders", timer_id=str(n), activate_in=timedelta(milliseconds=n)
            )
        with working(pipeline, "timer:reminders"):
            wait_until(
                lambda: (
                    connection.execute("SELECT n FROM effect ORDER BY n").fetchall()
                    == [(n,) for n in ALL]
                ),
                what="all timers have their effects",
            )
