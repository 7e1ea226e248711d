"""A timer belongs to the transaction that made it, through every kind of session, and at once."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from penstock import Pipeline, RawEvent
from penstock.core.recurrence import Recurrence
from penstock.errors import (
    InvalidEvent,
    InvalidTimer,
    TimerExists,
    UnsafeTransaction,
    UsageError,
)
from penstock.stores.postgres import sqlalchemy_url
from penstock.stores.servers import Servers
from tests.claiming import ASYNC, KINDS, Caller, Undo, caller
from tests.databases import new_database
from tests.events import Placed

every_kind = pytest.mark.parametrize("kind", KINDS)
AN_HOUR = timedelta(hours=1)
NOON = datetime(2100, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def watcher(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Another session: it sees what is committed."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("TRUNCATE events.timer")
        yield connection


@pytest.fixture
def pipeline(database_url: str, watcher: psycopg.Connection[Any]) -> Iterator[Pipeline]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    yield pipeline
    pipeline.engine.dispose()


@pytest.fixture
def session(pipeline: Pipeline) -> Iterator[Session]:
    with Session(pipeline.engine) as session:
        yield session


def waiting(watcher: psycopg.Connection[Any]) -> list[str]:
    query = "SELECT timer_id FROM events.timer ORDER BY due_at, timer_id"
    return [row[0] for row in watcher.execute(query)]


def due_of(watcher: psycopg.Connection[Any], timer_id: str) -> datetime:
    query = "SELECT due_at FROM events.timer WHERE timer_id = %s"
    row = watcher.execute(query, [timer_id]).fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


async def call(who: Caller, pipeline: Pipeline, verb: str, *given: Any, **options: Any) -> Any:
    """`pipeline.verb(session, …)`, or its twin."""
    name = f"{verb}_async" if who.kind in ASYNC else verb
    done = getattr(pipeline, name)(who.session, *given, **options)
    return await done if inspect.isawaitable(done) else done


# ── one transaction ────────────────────────────────────────────────────────────────────────────


@every_kind
def test_a_timer_exists_if_its_transaction_commits(
    kind: str, database_url: str, pipeline: Pipeline, watcher: psycopg.Connection[Any]
) -> None:
    async def scenario() -> None:
        async with caller(kind, database_url) as who:
            schedule = {"timer_id": "t1", "delay": AN_HOUR}
            await call(who, pipeline, "schedule", "orders", Placed(n=1), **schedule)
            await who.rollback()
            assert waiting(watcher) == []
            given = await call(who, pipeline, "schedule", "orders", Placed(n=1), **schedule)
            assert waiting(watcher) == []
            await who.commit()
            assert (given, waiting(watcher)) == ("t1", ["t1"])

    asyncio.run(scenario())


@every_kind
def test_later_calls_of_the_same_transaction_see_it(
    kind: str, database_url: str, pipeline: Pipeline, watcher: psycopg.Connection[Any]
) -> None:
    async def scenario() -> None:
        async with caller(kind, database_url) as who:
            for name in ("a", "b", "c"):
                options = {"timer_id": name, "delay": AN_HOUR}
                await call(who, pipeline, "schedule", "orders", Placed(n=1), **options)
            assert await call(who, pipeline, "cancel", "b") is True
            assert await call(who, pipeline, "cancel", "b") is False
            assert await call(who, pipeline, "reschedule", "a", at=NOON) is True
            assert await call(who, pipeline, "reschedule", "b", delay=AN_HOUR) is False
            seen = await call(who, pipeline, "pending")
            assert [timer.timer_id for timer in seen] == ["c", "a"]
            await who.commit()

    asyncio.run(scenario())
    assert waiting(watcher) == ["c", "a"]
    assert due_of(watcher, "a") == NOON


@every_kind
def test_a_savepoint_takes_its_timers_along(
    kind: str, database_url: str, pipeline: Pipeline, watcher: psycopg.Connection[Any]
) -> None:
    async def scenario() -> None:
        async with caller(kind, database_url) as who:
            options = {"timer_id": "before", "delay": AN_HOUR}
            await call(who, pipeline, "schedule", "orders", Placed(n=1), **options)
            begin = "transaction" if kind.startswith("psycopg") else "begin_nested"
            savepoint = getattr(who.session, begin)()
            with suppress(Undo):
                if kind in ASYNC:
                    async with savepoint:
                        await call(who, pipeline, "cancel", "before")
                        raise Undo
                with savepoint:
                    await call(who, pipeline, "cancel", "before")
                    raise Undo
            await who.commit()

    asyncio.run(scenario())
    assert waiting(watcher) == ["before"]


@every_kind
def test_the_other_twin_is_refused_and_says_which_one_to_call(
    kind: str, database_url: str, pipeline: Pipeline
) -> None:
    async def scenario() -> None:
        async with caller(kind, database_url) as who:
            if kind in ASYNC:
                with pytest.raises(UsageError, match="write `await cancel_async"):
                    pipeline.cancel(who.session, "t1")
            else:
                with pytest.raises(UsageError, match=r"write `cancel\(\.\.\.\)`"):
                    await pipeline.cancel_async(who.session, "t1")

    asyncio.run(scenario())


def test_what_cannot_be_atomic_is_refused(pipeline: Pipeline, database_url: str) -> None:
    def schedule(session: Any) -> None:
        pipeline.schedule(session, "orders", Placed(n=1), delay=AN_HOUR)

    url = sqlalchemy_url(database_url)
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    unsafe = pytest.raises(UnsafeTransaction, match="Nothing was changed")
    with psycopg.connect(database_url, autocommit=True) as connection, unsafe:
        schedule(connection)
    with Session(engine) as session, unsafe:
        schedule(session)
    engine.dispose()
    with Session(pipeline.engine, twophase=True) as session, unsafe:
        schedule(session)
    with pipeline.engine.connect() as plain, plain.begin_twophase(), unsafe:
        schedule(plain)
    with psycopg.connect(database_url) as connection:
        with suppress(psycopg.Error):
            connection.execute("SELECT 1/0")
        with unsafe:
            schedule(connection)
    with Session(create_engine("sqlite://")) as session, pytest.raises(UsageError, match="sqlite"):
        schedule(session)
    with pytest.raises(UsageError, match="through a builtins dict"):
        schedule({})
    # Inside of a block it is atomic, whatever the mode.
    with psycopg.connect(database_url, autocommit=True) as connection, connection.transaction():
        schedule(connection)


# ── when ───────────────────────────────────────────────────────────────────────────────────────

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "Pass at=, delay=, every= or cron="),
    ({"at": NOON, "delay": AN_HOUR}, "at and delay both say when"),
    ({"at": NOON.replace(tzinfo=None)}, "at has no time zone"),
    ({"at": "2100-01-01"}, "at is a str"),
    ({"at": NOON.replace(year=9998)}, "in the year 9998"),
    ({"delay": 60}, "delay is a int"),
    ({"delay": timedelta.max}, "longer than 36,525 days"),
    ({"every": 60}, "every= is a timedelta"),
    ({"every": timedelta(milliseconds=999)}, "at least 1 s"),
    ({"every": AN_HOUR, "cron": "* * * * *"}, "not by both"),
    ({"cron": "* * *"}, "no cron expression"),
    ({"cron": "0 9 * * *", "zone": "Europe/Atlantis"}, "no time zone 'Europe/Atlantis'"),
    ({"delay": AN_HOUR, "zone": "Europe/Berlin"}, "zone= belongs to cron="),
    ({"every": AN_HOUR, "catch_up": "some"}, "catch_up is"),
    ({"delay": AN_HOUR, "on_conflict": "ignore"}, "on_conflict must be"),
    ({"delay": AN_HOUR, "timer_id": ""}, "timer_id must be"),
    ({"delay": AN_HOUR, "timer_id": "a\nb"}, "timer_id must be"),
    ({"delay": AN_HOUR, "timer_id": "x" * 201}, "timer_id must be"),
    ({"delay": AN_HOUR, "timer_id": 7}, "timer_id must be"),
]


def test_what_leaves_doubt_is_refused_before_anything_is_written(
    pipeline: Pipeline, session: Session
) -> None:
    for options, words in WRONG:
        with pytest.raises(InvalidTimer, match=words):
            pipeline.schedule(session, "orders", Placed(n=1), **options)
        assert not session.in_transaction()


def test_what_leaves_doubt_is_refused_elsewhere_too(pipeline: Pipeline, session: Session) -> None:
    with pytest.raises(InvalidTimer, match="Pass at= or delay="):
        pipeline.reschedule(session, "t1")
    with pytest.raises(InvalidTimer, match="before has no time zone"):
        pipeline.pending(session, before=NOON.replace(tzinfo=None))
    with pytest.raises(InvalidTimer, match="limit must be"):
        pipeline.pending(session, limit=0)
    with pytest.raises(InvalidEvent, match="cannot name a stream"):
        pipeline.schedule(session, "no stream", Placed(n=1), delay=AN_HOUR)


def test_a_moment_is_the_same_in_every_zone(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    at = NOON.astimezone(timezone(timedelta(hours=5, minutes=30)))
    pipeline.schedule(session, "orders", Placed(n=1), at=at, timer_id="t1")
    session.commit()
    assert due_of(watcher, "t1") == NOON
    assert [timer.due_at.tzinfo for timer in pipeline.pending()] == [UTC]


def test_a_delay_counts_hours_on_the_databases_clock(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    # Days of the calendar are 23 or 25 hours long twice a year in this zone.
    session.execute(text("SET TIME ZONE 'Europe/Berlin'"))
    for days in (-1, 0, 200, 400):
        delay = timedelta(days=days, microseconds=7)
        name = f"{days} days"
        before = session.execute(text("SELECT clock_timestamp()")).scalar_one()
        pipeline.schedule(session, "orders", Placed(n=1), delay=delay, timer_id=name)
        after = session.execute(text("SELECT clock_timestamp()")).scalar_one()
        session.commit()
        wanted = max(delay, timedelta(0))
        due = due_of(watcher, name)
        assert before.astimezone(UTC) + wanted <= due <= after.astimezone(UTC) + wanted


def test_a_recurring_timer_is_first_due_by_the_databases_clock(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    clock = "SELECT clock_timestamp()"
    berlin = ZoneInfo("Europe/Berlin")
    before = session.execute(text(clock)).scalar_one().astimezone(UTC)
    pipeline.schedule(session, "orders", Placed(n=1), every=AN_HOUR, timer_id="every")
    cron: dict[str, Any] = {"cron": "30 9 * * *", "zone": "Europe/Berlin", "catch_up": "all"}
    pipeline.schedule(session, "orders", Placed(n=1), **cron, timer_id="cron")
    pipeline.schedule(session, "orders", Placed(n=1), every=AN_HOUR, at=NOON, timer_id="at")
    session.commit()
    after = watcher.execute(clock).fetchall()[0][0]
    assert before + AN_HOUR <= due_of(watcher, "every") <= after + AN_HOUR
    local = due_of(watcher, "cron").astimezone(berlin)
    assert (local.hour, local.minute, local.second) == (9, 30, 0)
    assert timedelta(0) < local - before <= timedelta(hours=25)
    assert due_of(watcher, "at") == NOON
    by_id = {timer.timer_id: timer.recurrence for timer in pipeline.pending()}
    assert by_id["every"] == Recurrence(every_seconds=3600)
    assert by_id["cron"] == Recurrence(cron="30 9 * * *", zone="Europe/Berlin", catch_up="all")


# ── the same id ────────────────────────────────────────────────────────────────────────────────


def test_the_same_id_is_replaced_kept_or_an_error(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    def schedule(n: int, **options: Any) -> str:
        event = RawEvent("T", {"n": n}, key=str(n))
        return pipeline.schedule(session, "orders", event, at=NOON, timer_id="t1", **options)

    assert schedule(1, on_conflict="error") == "t1"
    schedule(2)
    schedule(3, on_conflict="keep")
    with pytest.raises(TimerExists, match="There is already a timer 't1'"):
        schedule(4, on_conflict="error")
    # Nothing failed on the server: the transaction goes on.
    pipeline.schedule(session, "orders", Placed(n=1), at=NOON, timer_id="t2")
    session.commit()
    rows = watcher.execute("SELECT timer_id, key, payload ->> 'n' FROM events.timer ORDER BY 1")
    assert rows.fetchall() == [("t1", "2", "2"), ("t2", None, "1")]


def test_an_id_is_made_up_where_none_is_given(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    made = {pipeline.schedule(session, "orders", Placed(n=1), at=NOON) for _ in range(2)}
    given = UUID(int=7)
    made.add(pipeline.schedule(session, "orders", Placed(n=1), at=NOON, timer_id=given))
    session.commit()
    assert str(given) in made
    assert sorted(waiting(watcher)) == sorted(made)
    assert pipeline.cancel(session, given) is True
