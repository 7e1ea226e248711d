"""An event in a transaction of its own: the pipeline brings the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock import Pipeline, RawEvent
from penstock.stores.migrations import migrate
from tests.waiting import wait_until

END_CONNECTIONS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name = 'penstock shop' AND datname = current_database()"
)
IS_ALONE = (
    "SELECT NOT EXISTS (SELECT FROM pg_stat_activity"
    " WHERE application_name = 'penstock shop' AND datname = current_database())"
)
SENT = "SELECT payload ->> 'n' FROM events.outbox_event ORDER BY id"


@pytest.fixture
def server(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """The server's own view of things."""
    migrate(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def numbered(n: int) -> RawEvent:
    return RawEvent("counted", {"n": n})


def sent(server: psycopg.Connection[Any]) -> list[str]:
    return [n for (n,) in server.execute(SENT)]


def end_connections(server: psycopg.Connection[Any]) -> None:
    """All of the pipeline's: there is one, and in the end none."""
    assert server.execute(END_CONNECTIONS).fetchall() == [(True,)]
    wait_until(lambda: server.execute(IS_ALONE).fetchall() == [(True,)], what="it is gone")


def test_connections_that_a_server_has_ended_meanwhile_are_replaced(
    database_url: str, server: psycopg.Connection[Any]
) -> None:
    pipeline = Pipeline("shop", database_url=database_url)
    for n in range(3):
        pipeline.send_now("counts", numbered(n))
        end_connections(server)
    pipeline.engine.dispose()
    assert sent(server) == ["0", "1", "2"]


def test_so_they_are_for_asyncio(database_url: str, server: psycopg.Connection[Any]) -> None:
    pipeline = Pipeline("shop", database_url=database_url)

    async def send_all() -> None:
        for n in range(3):
            await pipeline.send_now_async("counts", numbered(n))
            end_connections(server)
        await pipeline.async_engine.dispose()

    asyncio.run(send_all())
    assert sent(server) == ["0", "1", "2"]
