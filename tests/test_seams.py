"""What an application may put in the place of Penstock's own: sessions, surroundings, servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from penstock import Pipeline, Retry
from penstock.errors import RegistrationError, ServerUnavailable, ServerUnsuitable, UsageError
from tests.events import Placed
from tests.test_redis_log import fake_server
from tests.waiting import SOON_SECONDS, wait_until


class OwnSession(Session):
    """An application's own kind of session."""


class OwnAsyncSession(AsyncSession):
    """The same for asyncio."""


@contextmanager
def working(pipeline: Pipeline, *roles: str) -> Iterator[None]:
    """The pipeline at work in a thread, as a process would run it."""
    stop = threading.Event()
    thread = threading.Thread(target=pipeline.run_worker, args=(roles, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(SOON_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize("is_async", [False, True])
def test_handlers_get_the_applications_own_sessions_in_its_own_surroundings(
    database_url: str, redis_url: str, is_async: bool
) -> None:
    seen: list[bool] = []
    surroundings: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        surroundings.append("entered")
        yield

    def plain(event: Placed, session: Session) -> None:
        seen.append(isinstance(session, OwnSession))
        session.execute(text("SELECT 1"))

    async def asynchronous(event: Placed, session: AsyncSession) -> None:
        seen.append(isinstance(session, OwnAsyncSession))
        await session.execute(text("SELECT 1"))

    pipeline = Pipeline(
        "shop",
        database_url=database_url,
        redis_url=redis_url,
        session_factory=(
            async_sessionmaker(class_=OwnAsyncSession)
            if is_async
            else sessionmaker(class_=OwnSession)
        ),
        around=around,
    )
    pipeline.consumer("orders", name="bill")(asynchronous if is_async else plain)
    pipeline.send_now("orders", Placed(n=1))
    with working(pipeline, "publisher", "consumer:bill"):
        wait_until(lambda: bool(seen), what="the event is handled")
    assert seen == [True]
    assert surroundings
    pipeline.engine.dispose()


def test_surroundings_that_swallow_errors_swallow_no_event(
    database_url: str, redis_url: str
) -> None:
    calls: list[int] = []

    def handle(event: Placed, session: Session) -> None:
        calls.append(event.n)
        if calls.count(event.n) == 1:
            raise LookupError

    pipeline = Pipeline(
        "shop",
        database_url=database_url,
        redis_url=redis_url,
        around=lambda: suppress(Exception),
    )
    retry = Retry.fixed(seconds=0.02)
    pipeline.consumer("orders", name="bill", retry=retry)(handle)
    pipeline.timer("reminders", retry=retry)(handle)
    pipeline.send_now("orders", Placed(n=1))
    pipeline.timers.publish({"n": 2}, "reminders", activate_in=timedelta())
    with working(pipeline, "publisher", "consumer:bill", "timer:reminders"):
        wait_until(lambda: sorted(calls) == [1, 1, 2, 2], what="both are handled")
    pipeline.engine.dispose()


def test_an_unknown_role_is_named(database_url: str) -> None:
    pipeline = Pipeline("shop", database_url=database_url)
    with pytest.raises(RegistrationError, match="There is no consumer 'bill'"):
        pipeline.run_worker(["consumer:bill"], threading.Event())
    with pytest.raises(UsageError, match="There is no role 'gardener'"):
        pipeline.run_worker(["gardener"], threading.Event())


def test_an_unsuitable_redis_is_told_apart_from_an_absent_one(database_url: str) -> None:
    with fake_server(b"redis_version:5.0.7\r\n") as (url, _):
        pipeline = Pipeline("shop", database_url=database_url, redis_url=url)
        with pytest.raises(ServerUnsuitable, match=r"Redis 5\.0\.7 .* is too old"):
            pipeline.check_hot_log()
    absent = Pipeline("shop", database_url=database_url, redis_url="redis://127.0.0.1:1/0")
    with pytest.raises(ServerUnavailable):
        absent.check_hot_log()
    Pipeline("shop", database_url=database_url, redis_url=None).check_hot_log()


def test_consumers_work_from_the_outbox_beside_an_unsuitable_redis(database_url: str) -> None:
    handled = threading.Event()

    def handler(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        handled.set()

    with fake_server(b"redis_version:5.0.7\r\n") as (url, _):
        pipeline = Pipeline("shop", database_url=database_url, redis_url=url)
        pipeline.consumer("orders", name="bill")(handler)
        pipeline.send_now("orders", Placed(n=1))
        with working(pipeline, "publisher", "consumer:bill"):
            wait_until(handled.is_set, what="the event is handled")
    pipeline.engine.dispose()
