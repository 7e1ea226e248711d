"""Handlers that take too long, and leases that cannot be renewed while one runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest

from penstock import Event, Retry
from penstock.telemetry import signals
from tests.lanes_at_work import Counted, Shop
from tests.publishing import told
from tests.waiting import SOON_SECONDS, wait_until

INSERT = "INSERT INTO effect (key, number) VALUES (%s, %s)"


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    with closing(Shop(database_url, redis_url)) as shop:
        yield shop


def test_a_query_that_takes_too_long_is_cancelled(shop: Shop) -> None:
    slow = threading.Event()

    def handle(event: Counted, connection: psycopg.Connection[Any]) -> None:
        connection.execute(INSERT, (event.key, event.number))
        if event.number == 2 and not slow.is_set():
            slow.set()
            connection.execute("SELECT pg_sleep(600)")

    shop.send(3, keys=1)
    with (
        told(signals.BatchRolledBack) as undone,
        shop.publisher(),
        shop.worker(handler=handle, timeout_seconds=0.3),
    ):
        shop.wait_until_handled()
    assert "timeout_seconds=0.3" in undone[0].reason


def test_a_computation_that_takes_too_long_is_interrupted(shop: Shop) -> None:
    slow = threading.Event()

    def handle(event: Counted, connection: psycopg.Connection[Any]) -> None:
        connection.execute(INSERT, (event.key, event.number))
        if not slow.is_set():
            slow.set()
            while True:
                pass

    shop.send(3, keys=1)
    with shop.publisher(), shop.worker(handler=handle, timeout_seconds=0.3):
        shop.wait_until_handled()


class Recounted(Event, type="limits.recounted", version=2):
    number: int


are_lost: set[int] = set()


@Recounted.upcast(from_version=1)
def lose_the_way(old: dict[str, Any]) -> dict[str, Any]:
    while old["number"] in are_lost:
        pass
    return old


@pytest.mark.parametrize("shape", ["plain", "list"])
def test_an_upcaster_that_takes_too_long_is_interrupted(shop: Shop, shape: str) -> None:
    def handle(event: Recounted, connection: psycopg.Connection[Any]) -> None:
        connection.execute(INSERT, ("old", event.number))

    def handle_list(events: list[Recounted], connection: psycopg.Connection[Any]) -> None:
        for event in events:
            handle(event, connection)

    handler: Any = handle if shape == "plain" else handle_list
    shop.connection.execute(
        "SELECT events.send('counts', 'limits.recounted', jsonb_build_object('number', n),"
        " key => n::text) FROM generate_series(1, 3) AS n"
    )
    are_lost.add(2)
    with (
        told(signals.EventParked) as parked,
        shop.publisher(),
        shop.worker(handler=handler, timeout_seconds=0.3, retry=Retry.fixed(seconds=0.01)),
        ExitStack() as stack,
    ):
        stack.callback(are_lost.clear)
        wait_until(lambda: bool(parked), what="the event is set aside")
        are_lost.clear()
        wait_until(lambda: sorted(shop.effects()["old"]) == [1, 2, 3], what="all are handled")
    assert {signal.position for signal in parked} == {2}


def test_an_async_handler_that_takes_too_long_is_cancelled(shop: Shop) -> None:
    slow = threading.Event()

    async def handle(event: Counted, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(INSERT, (event.key, event.number))
        if not slow.is_set():
            slow.set()
            await asyncio.Event().wait()

    shop.send(3, keys=1)
    with (
        told(signals.BatchRolledBack) as undone,
        shop.publisher(),
        shop.worker(handler=handle, timeout_seconds=0.3),
    ):
        shop.wait_until_handled()
    assert "timeout_seconds=0.3" in undone[0].reason


@pytest.mark.slow
def test_a_handler_is_stopped_before_a_lease_that_cannot_be_renewed_ends(
    database_url: str, redis_url: str
) -> None:
    is_handling, may_end = threading.Event(), threading.Event()

    def handle(event: Counted, connection: psycopg.Connection[Any]) -> None:
        connection.execute(INSERT, (event.key, event.number))
        if not is_handling.is_set():
            is_handling.set()
            may_end.wait(SOON_SECONDS)

    settings = {"lease_seconds": 6.0, "lease_renew_seconds": 1.0}
    with (
        closing(Shop(database_url, redis_url, **settings)) as shop,
        psycopg.connect(database_url) as blocker,
        shop.publisher(),
        shop.worker(handler=handle),
    ):
        shop.send(1, keys=1)
        assert is_handling.wait(SOON_SECONDS)
        # The renewal has to wait for this lock, and gives up.
        blocker.execute("SELECT 1 FROM events.stream_lease WHERE role LIKE 'consumer:%' FOR UPDATE")
        wait_until(lambda: not _handling(shop), what="the handler's transaction is over")
        ((seconds_left,),) = shop.connection.execute(
            "SELECT extract(epoch FROM lease_until - clock_timestamp()) "
            "FROM events.stream_lease WHERE role LIKE 'consumer:%'"
        ).fetchall()
        assert seconds_left > 0
        assert shop.effects() == {}
        blocker.rollback()
        may_end.set()
        shop.wait_until_handled()


def _handling(shop: Shop) -> int:
    """How many transactions of handlers are open."""
    row = shop.connection.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'penstock shop.count' AND state LIKE 'idle in transaction%'"
    ).fetchone()
    assert row is not None
    return int(row[0])
