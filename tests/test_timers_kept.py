"""What is kept of a timer until it is due: contracts, secrets, and the handler's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import ContractError, Event, PendingTimer, Pipeline, RawEvent
from penstock.core.events import StreamEvent
from penstock.core.sealing import opened_event
from penstock.core.timers import seal_uuid
from penstock.errors import (
    InvalidTimer,
    SchemaMismatch,
    StreamConfidential,
    StreamRestricted,
)
from penstock.ops.policy_access import grants_for
from penstock.ops.timers import Timers
from penstock.stores import contracts
from penstock.stores.policies import Policies, forget_policies
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.roles import Roles, new_roles
from tests.test_contract_records import changed, record
from tests.test_policy_library import restrict
from tests.vault import STREAM, Admitted, Vault, new_key_file

AN_HOUR = timedelta(hours=1)
NOON = datetime(2100, 6, 1, 12, tzinfo=UTC)
CANARY = "canary-4711"


@pytest.fixture
def pipeline(database_url: str) -> Iterator[Pipeline]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    yield pipeline
    pipeline.engine.dispose()


@pytest.fixture
def session(pipeline: Pipeline) -> Iterator[Session]:
    with Session(pipeline.engine) as session:
        yield session


@pytest.fixture
def watcher(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def vault(database_url: str, tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(database_url, None, new_key_file(tmp_path))
    yield vault
    vault.close()


# ── what waits ─────────────────────────────────────────────────────────────────────────────────


def test_pending_tells_what_waits_in_order(
    pipeline: Pipeline, session: Session, watcher: psycopg.Connection[Any]
) -> None:
    for n in range(5):
        stream, at = ("orders", "mails")[n % 2], NOON + n * AN_HOUR
        event = RawEvent("T", {"n": n}, version=2, key="k")
        pipeline.schedule(session, stream, event, at=at, timer_id=f"t{n}")
    session.commit()
    watcher.execute(
        "UPDATE events.timer SET held_at = now(), held_reason = 'why' WHERE timer_id = 't1'"
    )
    whole = pipeline.pending()
    assert [timer.timer_id for timer in whole] == ["t0", "t1", "t2", "t3", "t4"]
    assert [timer.held_reason for timer in whole] == [None, "why", None, None, None]
    assert whole[0] == PendingTimer(
        *("t0", "orders", "T", 2, "k", NOON, None, False, None), created_at=whole[0].created_at
    )
    before = pipeline.pending(session, before=NOON + 3 * AN_HOUR, stream="orders")
    assert [timer.timer_id for timer in before] == ["t0", "t2"]
    assert [timer.timer_id for timer in pipeline.pending(limit=2)] == ["t0", "t1"]
    assert asyncio.run(pending_of_its_own(pipeline)) == whole
    # Moving it lets go of it.
    assert pipeline.reschedule(session, "t1", at=NOON) is True
    session.commit()
    assert pipeline.pending(limit=2)[1].held_reason is None


async def pending_of_its_own(pipeline: Pipeline) -> list[PendingTimer]:
    found = await pipeline.pending_async()
    await pipeline.async_engine.dispose()
    return found


def test_what_only_sql_can_say_does_not_hide_the_others(
    pipeline: Pipeline, watcher: psycopg.Connection[Any]
) -> None:
    schedule = "SELECT events.schedule(%s, 'orders', 'T', '1', due_at => %s, recurrence => %s)"
    watcher.execute(schedule, ["odd", "2100-01-01 00:00+00", '{"every_moon": 1}'])
    watcher.execute(schedule, ["far", "20000-01-01 00:00+00", None])
    watcher.execute(schedule, ["old", "0044-03-15 00:00+00 BC", None])
    old, odd, far = pipeline.pending()
    assert (old.timer_id, old.due_at.year) == ("old", 2)
    assert (far.timer_id, far.due_at.year) == ("far", 9000)
    assert odd.recurrence is None
    assert odd.held_reason == "It cannot be fired: A recurrence has no field 'every_moon'."


# ── what the database refuses ──────────────────────────────────────────────────────────────────


def test_an_error_quotes_nothing_of_the_event(
    pipeline: Pipeline, watcher: psycopg.Connection[Any]
) -> None:
    def schedule(target: Any) -> None:
        pipeline.schedule(target, "orders", RawEvent("T", {"secret": CANARY}), delay=AN_HOUR)

    watcher.execute("ALTER TABLE events.timer ADD CONSTRAINT none CHECK (due_at < '2000-01-01')")
    with Session(pipeline.engine) as session:
        with pytest.raises(InvalidTimer, match='violates check constraint "none"') as refused:
            schedule(session)
        told = [repr(refused.value), repr(refused.value.__cause__)]
        session.rollback()
        session.execute(text("SET LOCAL lock_timeout = '10 ms'"))
        with watcher.transaction():
            watcher.execute("LOCK TABLE events.timer")
            with pytest.raises(OperationalError) as timed_out:
                schedule(session)
        told += [str(timed_out.value), str(timed_out.value.orig)]
    assert not any(CANARY in words for words in told)


def test_a_database_without_timers_says_what_to_run(
    pipeline: Pipeline, watcher: psycopg.Connection[Any], session: Session
) -> None:
    watcher.execute("DROP FUNCTION events.cancel_timer")
    with pytest.raises(SchemaMismatch, match="penstock migrate"):
        pipeline.cancel(session, "t1")


class Repriced(Event, type="timers.repriced", version=1):
    cents: int


def test_a_contract_is_kept_when_the_timer_is_made(
    pipeline: Pipeline, watcher: psycopg.Connection[Any], session: Session
) -> None:
    contracts._seen.clear()
    record(watcher, Repriced, changed(Repriced, cents={"type": "string"}))
    with pytest.raises(ContractError, match=r"timers\.repriced"):
        pipeline.schedule(session, "orders", Repriced(cents=1), delay=AN_HOUR)
    contracts._seen.clear()


# ── policies ───────────────────────────────────────────────────────────────────────────────────


def test_a_timer_of_a_confidential_stream_is_sealed_while_it_waits(vault: Vault) -> None:
    vault.make_confidential()
    # With spaces, which no ciphertext has by chance.
    event = Admitted(patient="Ada L.", diagnosis="the measles")

    async def asynchronously() -> None:
        async with AsyncSession(vault.pipeline.async_engine) as session, session.begin():
            await vault.pipeline.schedule_async(session, STREAM, event, at=NOON, timer_id="b")
        await vault.pipeline.async_engine.dispose()

    with psycopg.connect(vault.database_url) as connection:
        vault.pipeline.schedule(connection, STREAM, event, at=NOON, timer_id="a")
    asyncio.run(asynchronously())
    stored = str(vault.connection.execute("SELECT t::text FROM events.timer t").fetchall())
    assert not any(words in stored for words in ("Ada L.", "the measles"))
    assert [(t.timer_id, t.key, t.is_sealed) for t in vault.pipeline.pending()] == [
        ("a", None, True),
        ("b", None, True),
    ]
    stored_event = Timers(vault.connection).find("a").event
    assert stored_event.event_uuid == seal_uuid("a")
    keys = vault.pipeline.stream_keys(STREAM, lambda: vault.connection)
    key_id = str(stored_event.key_id)
    opened = opened_event(stored_event, keys.unwrapped(keys.find({key_id})[key_id]).key)
    assert (opened.key, orjson.loads(opened.payload)) == ("Ada L.", event.model_dump())


def test_whoever_has_not_heard_of_the_policy_leaves_no_plain_text(vault: Vault) -> None:
    def schedule() -> None:
        event = Admitted(patient="Ada", diagnosis="measles")
        with Session(vault.pipeline.engine) as session, session.begin():
            vault.pipeline.schedule(session, STREAM, event, at=NOON, timer_id="t1")

    schedule()
    assert vault.connection.execute("DELETE FROM events.timer").rowcount == 1
    vault.make_confidential()
    with pytest.raises(StreamConfidential, match="schedule again"):
        schedule()
    schedule()
    assert vault.row("SELECT count(*), count(key_id) FROM events.timer") == (1, 1)


@pytest.fixture
def roles(database_url: str) -> Iterator[Roles]:
    """`orders` is for the producer shop, as the role web; `stranger` may use open streams."""
    forget_policies()
    with new_roles(database_url, "worker", "web", "stranger") as made:
        restrict(made, "orders")
        for each in grants_for(
            made.owner, Policies().read_all(made.owner), worker=made.name("worker")
        ):
            made.run(each.statements)
            if each.role_name == made.name("web"):
                web, stranger = made.name("web"), made.name("stranger")
                made.run([one.replace(web, stranger) for one in each.statements])
        yield made
    forget_policies()


def test_the_grants_of_a_producer_are_enough_for_its_timers(roles: Roles) -> None:
    shop = Pipeline("shop", database_url=roles.url("web"), redis_url=None)
    thief = Pipeline("thief", database_url=roles.url("web"), redis_url=None)
    with psycopg.connect(roles.url("web")) as connection:
        shop.schedule(connection, "orders", Placed(n=1), at=NOON, timer_id="t1")
        shop.schedule(connection, "orders", Placed(n=2), cron="0 9 * * *", timer_id="t2")
        assert shop.reschedule(connection, "t1", delay=AN_HOUR) is True
        assert shop.cancel(connection, "t2") is True
        assert [timer.timer_id for timer in shop.pending(connection)] == ["t1"]
        with pytest.raises(StreamRestricted, match="thief"):
            thief.schedule(connection, "orders", Placed(n=1), at=NOON)


def test_a_stranger_neither_sees_nor_moves_nor_replaces_a_timer(roles: Roles) -> None:
    shop = Pipeline("shop", database_url=roles.url("stranger"), redis_url=None)
    roles.owner.execute("SELECT events.schedule('t1', 'orders', 'T', '1', delay => '1 h')")
    with psycopg.connect(roles.url("stranger")) as stranger:
        assert shop.pending(stranger) == []
        assert shop.cancel(stranger, "t1") is False
        assert shop.reschedule(stranger, "t1", delay=AN_HOUR) is False
        for conflict in ("replace", "keep", "error"):
            given: dict[str, Any] = {"timer_id": "t1", "on_conflict": conflict}
            with pytest.raises(StreamRestricted, match="roll it back"):
                shop.schedule(stranger, "news", RawEvent("T", {}), at=NOON, **given)
            stranger.rollback()
        shop.schedule(stranger, "news", RawEvent("T", {}), at=NOON, timer_id="t2")


# ── in handlers ────────────────────────────────────────────────────────────────────────────────


REMIND: dict[str, Any] = {"at": NOON, "timer_id": "t1"}


def session_handler(pipeline: Pipeline) -> Callable[..., Any]:
    def handler(event: StreamEvent[Any], session: Session) -> None:
        pipeline.schedule(session, "mails", RawEvent("Remind", {}), **REMIND)
        fail_on_second(event)

    return handler


def cursor_handler(pipeline: Pipeline) -> Callable[..., Any]:
    def handler(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        pipeline.schedule(cursor.connection, "mails", RawEvent("Remind", {}), **REMIND)
        fail_on_second(event)

    return handler


def connection_handler(pipeline: Pipeline) -> Callable[..., Any]:
    def handler(event: StreamEvent[Any], connection: psycopg.Connection[Any]) -> None:
        pipeline.schedule(connection, "mails", RawEvent("Remind", {}), **REMIND)
        fail_on_second(event)

    return handler


def async_handler(pipeline: Pipeline) -> Callable[..., Any]:
    async def handler(event: StreamEvent[Any], session: AsyncSession) -> None:
        await pipeline.schedule_async(session, "mails", RawEvent("Remind", {}), **REMIND)
        fail_on_second(event)

    return handler


def fail_on_second(event: StreamEvent[Any]) -> None:
    if event.payload["n"] == 2:
        raise ValueError("no")


@pytest.mark.parametrize(
    "make", [session_handler, cursor_handler, connection_handler, async_handler]
)
def test_a_timer_of_a_handler_stands_and_falls_with_it(
    make: Callable[[Pipeline], Callable[..., Any]], database_url: str, pipeline: Pipeline
) -> None:
    bench = Workbench(database_url, None)
    try:
        bench.connection.execute(
            "SELECT events.send('orders', 'placed', '{\"n\": 2}', metadata =>"
            ' \'{"correlation_id": "c1"}\')'
        )
        bench.publish()
        consumer = bench.consumer(make(pipeline))
        run_until_idle(consumer)
        assert bench.rows("SELECT timer_id FROM events.timer") == []
        (sent,) = bench.rows(
            "SELECT event_uuid FROM (SELECT events.send('orders', 'placed', '{\"n\": 1}', metadata"
            ' => \'{"correlation_id": "c2"}\') AS event_uuid) AS sent'
        )
        bench.publish()
        run_until_idle(consumer)
        assert bench.rows("SELECT timer_id FROM events.timer") == ["t1"]
        # What it sends later is caused by what was handled.
        assert bench.rows("SELECT metadata FROM events.timer") == [
            {"correlation_id": "c2", "causation_id": str(sent)}
        ]
    finally:
        bench.close()


# ── from SQL ───────────────────────────────────────────────────────────────────────────────────


def test_plain_sql_makes_moves_and_takes_back_timers(watcher: psycopg.Connection[Any]) -> None:
    def answer(call: str) -> Any:
        row = watcher.execute(f"SELECT events.{call}".encode()).fetchone()
        assert row is not None
        return row[0]

    schedule = "schedule('t1', 'orders', 'T', '{}', key => 'k'"
    assert answer(f"{schedule}, delay => '1 hour')") == "scheduled"
    assert answer(f"{schedule}, due_at => now() + interval '1 day')") == "replaced"
    assert answer(f"{schedule}, delay => '1 s', on_conflict => 'keep')") == "kept"
    with pytest.raises(psycopg.Error, match="there is already a timer t1") as exists:
        answer(f"{schedule}, delay => '1 s', on_conflict => 'error')")
    assert exists.value.sqlstate == "PS030"
    for wrong in ("", ", delay => '1 s', due_at => now()", ", delay => '1 s', on_conflict => 'x'"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="nothing was scheduled"):
            answer(f"{schedule}{wrong})")
    assert answer("reschedule('t1', delay => '1 minute')") is True
    assert answer("reschedule('t2', due_at => now())") is False
    assert answer("cancel_timer('t1')") is True
    assert answer("cancel_timer('t1')") is False
