"""Penstock's own connections: whatever a role is set to, and in whatever process they are used."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Context, Guarantee, Pipeline, RawEvent, StreamEvent
from penstock.errors import ServerUnavailable
from penstock.ops.workers import read_database_clock
from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.cleanup import Cleanup
from penstock.stores.migrations import migrate
from penstock.stores.postgres import connect
from penstock.stores.worker_connection import SyncWorkerConnection
from penstock.telemetry.signals import BatchRolledBack, EventHandled, LeaseRenewed
from tests.bench_of_one import Workbench
from tests.failing import heard
from tests.proxy import Proxy
from tests.test_pooled import Pooler
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


@pytest.mark.parametrize("way_in", [connect, SyncWorkerConnection, AsyncWorkerConnection])
@pytest.mark.parametrize("setting", ["SET DateStyle", "SET default_transaction_isolation"])
def test_a_connection_that_breaks_while_it_is_set_up_is_no_bug(
    foreign_url: str, way_in: Callable[[str, str], Any], setting: str
) -> None:
    with Proxy.to(foreign_url) as proxy:
        proxy.cut_reply_to(setting.encode())
        with pytest.raises(ServerUnavailable, match="cannot be reached"):
            way_in(proxy.url(foreign_url), "test")
        way_in(proxy.url(foreign_url), "test").close()


def test_a_connection_of_the_engine_that_breaks_while_it_is_set_up_is_no_bug(
    foreign_url: str,
) -> None:
    with Proxy.to(foreign_url) as proxy:
        pipeline = Pipeline("shop", database_url=proxy.url(foreign_url), redis_url=None)
        proxy.cut_reply_to(b"SET DateStyle")
        with pytest.raises(OperationalError):
            pipeline.engine.connect()
        pipeline.engine.connect().close()
        pipeline.engine.dispose()


STRICTER = ["repeatable read", "serializable"]


def set_isolation(database_url: str, isolation: str) -> None:
    statement = "ALTER DATABASE {} SET default_transaction_isolation = {}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        name = sql.Identifier(connection.info.dbname)
        connection.execute(sql.SQL(statement).format(name, sql.Literal(isolation)))


def outlast_renewals(renewals: list[Any]) -> None:
    seen = len(renewals)
    wait_until(lambda: len(renewals) > seen + 1, what="the lease is renewed meanwhile")


@pytest.mark.parametrize("isolation", STRICTER)
@pytest.mark.parametrize("kind", ["plain", "cursor", "asynchronous", "completing"])
def test_a_batch_outlasts_renewals_of_its_lease_whatever_isolation_is_the_default(
    database_url: str, isolation: str, kind: str
) -> None:
    set_isolation(database_url, isolation)
    with heard(LeaseRenewed) as renewals, heard(BatchRolledBack, EventHandled) as told:

        def plain(event: StreamEvent[Any], session: Session) -> None:
            session.execute(text("SELECT 1"))
            outlast_renewals(renewals)

        def cursor(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
            cursor.execute("SELECT 1")
            outlast_renewals(renewals)

        async def asynchronous(event: StreamEvent[Any], session: AsyncSession) -> None:
            await session.execute(text("SELECT 1"))
            await asyncio.to_thread(outlast_renewals, renewals)

        def completing(event: StreamEvent[Any], context: Context) -> None:
            with context.complete() as session:
                plain(event, session)

        is_loose = kind == "completing"
        guarantee = Guarantee.AT_LEAST_ONCE if is_loose else Guarantee.EXACTLY_ONCE
        pipeline = Pipeline(
            "shop", database_url=database_url, redis_url=None, lease_renew_seconds=0.05
        )
        options: dict[str, Any] = {"guarantee": guarantee, "start": "earliest"}
        pipeline.consumer("cities", name="long", **options)(locals()[kind])
        pipeline.send_now("cities", RawEvent("visited", {}))
        with working(pipeline, "publisher", "consumer:long"):
            wait_until(lambda: bool(told), what="the batch has come to an end")
    assert [type(signal) for signal in told] == [EventHandled]
    pipeline.engine.dispose()


@pytest.mark.parametrize("isolation", STRICTER)
def test_cleanup_sees_who_came_before_it_had_its_lock_whatever_isolation_is_the_default(
    database_url: str, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    set_isolation(database_url, isolation)
    prepare = Cleanup._prepare

    def late(event: StreamEvent[Any]) -> None: ...

    def prepare_and_lose_time(self: Cleanup, connection: psycopg.Connection[Any]) -> None:
        prepare(self, connection)
        bench.consumer(late, name="late")

    with closing(Workbench(database_url, None)) as bench, connect(database_url, "test") as janitor:
        bench.send(3)
        bench.publish()
        monkeypatch.setattr(Cleanup, "_prepare", prepare_and_lose_time)
        limits: dict[str, Any] = {"after": 0, "retention_days": 0, "batch_size": 10}
        assert Cleanup().prune_outbox(janitor, "orders", **limits).deleted == 0


@pytest.mark.parametrize("is_behind_a_pooler", [False, True])
def test_own_transactions_are_read_committed_and_those_of_the_application_as_it_says(
    database_url: str, is_behind_a_pooler: bool
) -> None:
    set_isolation(database_url, "serializable")
    ask = "SELECT current_setting('transaction_isolation')"
    found: list[Any] = []
    with Pooler.to(database_url) as pooler:
        url = pooler.url(database_url) if is_behind_a_pooler else database_url
        for kind in (SyncWorkerConnection, AsyncWorkerConnection):
            with closing(kind(url, "test")) as worker:
                worker.run(partial(worker.begin, ask, {}))
                found.append(worker.run(worker.first_row))
        with connect(url, "test") as own:
            with own.transaction():
                found.append(own.execute(ask).fetchone())
            alone = own.execute(ask).fetchone()
        pipeline = Pipeline("shop", database_url=url, redis_url=None)
        with Session(pipeline.engine) as session:
            theirs = session.execute(text(ask)).scalar_one()
        pipeline.engine.dispose()
    assert found == [("read committed",)] * 3
    assert alone == ("serializable" if is_behind_a_pooler else "read committed",)
    assert theirs == "serializable"


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
