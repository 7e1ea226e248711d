"""Handlers at which the connection breaks: once is chance, each time is the event's own doing."""

from __future__ import annotations

import select
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Guarantee, Pipeline, Retry
from penstock.errors import ServerUnavailable
from penstock.pipeline.losses import LOSSES_MAX
from penstock.stores import outage
from penstock.telemetry.signals import EventFailed, TimerBuried
from tests.bench_of_one import Workbench
from tests.events import Placed
from tests.failing import drive, heard
from tests.settling import effects, settle
from tests.test_seams import working
from tests.waiting import SOON_SECONDS, wait_until

EVENTS = 6
QUOTED = "4000 0000 0000 0002"
TROUBLED = 3
ALL = list(range(1, EVENTS + 1))
REST = [n for n in ALL if n != TROUBLED]
INSERT = "INSERT INTO effect (n) VALUES (%s)"
END_IT = "SELECT pg_terminate_backend(pg_backend_pid())"


def by_session(event: Placed, session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
    if event.n == TROUBLED:
        session.execute(text(END_IT))


def by_connection(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT, (event.n,))
    if event.n == TROUBLED:
        connection.execute(END_IT)


def by_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    """In a pipeline, where nobody knows at once whose statement it was."""
    cursor.execute(INSERT, (event.n,))
    if event.n == TROUBLED:
        cursor.execute(END_IT)


async def by_async_session(event: Placed, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
    if event.n == TROUBLED:
        await session.execute(text(END_IT))


def by_list(events: list[Placed], cursor: psycopg.Cursor[Any]) -> None:
    for event in events:
        by_cursor(event, cursor)


def by_libpq(event: Placed, connection: psycopg.Connection[Any]) -> None:
    """Past every guard; the server refuses the COMMIT, and undoes everything."""
    connection.execute(INSERT, (event.n,))
    if event.n == TROUBLED:
        connection.pgconn.exec_(b"COMMIT")


def by_waiting(event: Placed, session: Session) -> None:
    """Longer than the server lets a transaction be idle."""
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
    if event.n == TROUBLED:
        session.execute(text("SET LOCAL idle_in_transaction_session_timeout = '20ms'"))
        driver: Any = session.connection().connection.driver_connection
        select.select([driver], [], [], SOON_SECONDS)
        session.execute(text("SELECT 1"))


def by_quoting(event: Placed, connection: psycopg.Connection[Any]) -> None:
    """With words of its own about it, in which the event is."""
    try:
        by_connection(event, connection)
    except psycopg.OperationalError:
        raise psycopg.OperationalError(QUOTED) from None


def by_completing(event: Placed, context: Context) -> None:
    with context.complete() as session:
        by_session(event, session)


def run(database_url: str, handler: Callable[..., Any], **options: Any) -> list[int]:
    """Handle all events; returns the effects that are left."""
    retry = Retry.fixed(seconds=0.02, attempts_max=2)
    settle(database_url, handler, EVENTS, retry=retry, **options)
    return effects(database_url)


@pytest.mark.parametrize("batch_size", [1, 100])
@pytest.mark.parametrize(
    "handler",
    [
        by_session,
        by_connection,
        by_cursor,
        by_async_session,
        by_list,
        by_libpq,
        by_waiting,
        by_quoting,
        by_completing,
    ],
)
def test_an_event_that_breaks_its_connection_each_time_is_buried(
    database_url: str, handler: Callable[..., Any], batch_size: int
) -> None:
    looser = {"guarantee": Guarantee.AT_LEAST_ONCE, "start": "earliest"}
    options = looser if handler is by_completing else {}
    assert run(database_url, handler, batch_size=batch_size, **options) == REST
    with psycopg.connect(database_url) as connection:
        letters = connection.execute(
            "SELECT position, reason, error_type, error_message FROM events.dead_letter"
        ).fetchall()
    ((*letter, message),) = letters
    assert letter == [TROUBLED, "exhausted", "penstock.errors.ConnectionBroken"]
    assert "breaks each time that this event is handled, also alone" in message
    if handler not in (by_libpq, by_quoting):
        assert "terminating connection" in message or "server closed" in message
    assert QUOTED not in message


@pytest.mark.parametrize("batch_size", [1, 100])
def test_events_at_which_a_connection_breaks_now_and_then_have_not_failed(
    database_url: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "PAUSE_LONGEST_SECONDS", 0.1)
    calls = Counter[int]()

    def handle(event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        calls[event.n] += 1
        if calls[event.n] < LOSSES_MAX:
            session.execute(text(END_IT))

    with heard(EventFailed) as failed:
        assert run(database_url, handle, batch_size=batch_size) == ALL
    assert failed == []


def test_a_timer_that_breaks_its_connection_each_time_is_buried(
    database_url: str, redis_url: str
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)
    retry = Retry.fixed(seconds=0.02, attempts_max=2)
    pipeline.timer("reminders", max_concurrent=1, retry=retry)(by_session)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        for n in ALL:
            pipeline.timers.publish({"n": n}, "reminders", timer_id=str(n), activate_in=timedelta())
        with heard(TimerBuried) as said, working(pipeline, "timer:reminders"):
            wait_until(lambda: bool(said), what="it is buried")
            wait_until(
                lambda: (
                    connection.execute("SELECT n FROM effect ORDER BY n").fetchall()
                    == [(n,) for n in REST]
                ),
                what="the others are handled",
            )
    (buried,) = said
    assert (buried.timer_id, buried.reason) == (str(TROUBLED), "exhausted")


def test_a_connection_that_is_cut_for_its_lease_is_no_events_doing(database_url: str) -> None:
    with closing(Workbench(database_url, None)) as bench:

        def handle(event: Placed, connection: psycopg.Connection[Any]) -> None:
            lease = lane._lease
            assert lease is not None
            bench.keepers[0].forget(lease, "it could not be renewed in time")
            connection.execute(END_IT)

        lane = bench.consumer(handle, batch_size=1)
        bench.send(1)
        bench.publish()
        with pytest.raises(ServerUnavailable, match="broke in mid-batch"):
            drive(lane, until=lambda: False)
        assert lane._losses._in_a_row == {}
