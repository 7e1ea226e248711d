"""Penstock's own connections: whatever a role is set to, and in whatever process they are used."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Pipeline, RawEvent, StreamEvent
from penstock.ops.workers import read_database_clock
from penstock.stores.migrations import migrate
from penstock.stores.postgres import connect
from tests.test_seams import working
from tests.waiting import wait_until

# Its first letter is not in LATIN1.
CITY = "Łódź"


@pytest.fixture
def foreign_url(database_url: str) -> str:
    """A database whose connections write dates and letters as psycopg would not."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        for setting in ("client_encoding = 'LATIN1'", "DateStyle = 'German'"):
            statement = sql.SQL("ALTER DATABASE {} SET {}").format(name, sql.SQL(setting))
            connection.execute(statement)
    return database_url


def test_a_foreign_date_style_or_encoding_changes_nothing(foreign_url: str) -> None:
    migrate(foreign_url)
    seen: list[str] = []
    pipeline = Pipeline("shop", database_url=foreign_url, redis_url=None)

    @pipeline.consumer("cities", name="plain")
    def plain(event: StreamEvent[Any], session: Session) -> None:
        assert session.execute(text("SELECT now()")).scalar_one() >= event.created_at
        seen.append(event.payload["city"])

    @pipeline.consumer("cities", name="cursor")
    def by_cursor(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("SELECT now(), %s::text", [event.payload["city"]])
        seen.append(cursor.fetchall()[0][1])

    @pipeline.consumer("cities", name="asynchronous")
    async def asynchronous(event: StreamEvent[Any], session: AsyncSession) -> None:
        row = (await session.execute(text("SELECT now(), :city"), event.payload)).one()
        seen.append(row[1])

    visited = RawEvent("visited", {"city": CITY})
    pipeline.send_now("cities", visited, key=CITY)

    async def send_async() -> None:
        await pipeline.send_now_async("cities", visited, key=CITY)
        await pipeline.async_engine.dispose()

    asyncio.run(send_async())
    with Session(pipeline.engine) as session, session.begin():
        pipeline.schedule(session, "cities", visited, timer_id=CITY, delay=timedelta())
        (pending,) = pipeline.pending(session)
        assert pending.timer_id == CITY
    roles = ("publisher", "timers", "consumer:plain", "consumer:cursor", "consumer:asynchronous")
    with working(pipeline, *roles):
        wait_until(lambda: len(seen) == 9, what="three events in three consumers")
    assert set(seen) == {CITY}
    with connect(foreign_url, "test") as connection:
        assert read_database_clock(connection, "events").tzinfo is not None
    pipeline.engine.dispose()


FORKING = """
import os, sys
from sqlalchemy import text
from penstock import Pipeline
from penstock.stores.kms import kms_for
from penstock.stores.redis_link import RedisLink, new_client

pipeline = Pipeline("shop", database_url=sys.argv[1], redis_url=None)
client = new_client(sys.argv[2], 3)
link = RedisLink(client)
redis_mine = link.call("CLIENT", "ID")
kms = kms_for("alias/shop")

def backend():
    with pipeline.engine.connect() as connection:
        return connection.execute(text("SELECT pg_backend_pid()")).scalar_one()

mine = backend()
child = os.fork()
if child == 0:
    has_own = backend() != mine and link.call("CLIENT", "ID") != redis_mine
    link.close()
    os._exit(0 if has_own and kms_for("alias/shop") is not kms else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, "the child talks on its parent's connection"
assert backend() == mine, "the parent's connection was closed"
assert link.call("CLIENT", "ID") == redis_mine, "the parent's connection to Redis was closed"
"""


def test_a_forked_process_leaves_its_parents_connections_alone(
    database_url: str, redis_url: str
) -> None:
    command = [sys.executable, "-c", FORKING, database_url, redis_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
