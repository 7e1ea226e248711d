"""Workers of Redis timers, on real servers: due, once, in time, and nothing lost on the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import Pipeline, RawEvent, Retry
from penstock.core.timer_messages import TimerMessage, read_message
from penstock.core.timer_verdict import inbox_id
from penstock.errors import FatalError
from penstock.inbox import claim
from penstock.stores.servers import Servers
from penstock.stores.timer_queue import RedisTimers
from penstock.telemetry import signals
from tests.databases import new_database
from tests.proxy import Proxy
from tests.timers_at_work import arm, heard, wait_for, wait_until_empty, working
from tests.waiting import SOON_SECONDS, wait_until

TOPIC = "reminders"
INSERT = "INSERT INTO effect (timer_id) VALUES (%s)"


@pytest.fixture
def store(redis_url: str) -> Iterator[RedisTimers]:
    with closing(RedisTimers(redis_url)) as store:
        yield store


@pytest.fixture(scope="module")
def shared_url(servers: Servers, template_database: str) -> Iterator[str]:
    """One database for all tests here: most of them have nothing in it."""
    with new_database(servers.database_url, template_database) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE effect (timer_id text)")
        yield url


@pytest.fixture
def database_url(shared_url: str) -> str:
    with psycopg.connect(shared_url, autocommit=True) as connection:
        connection.execute("TRUNCATE effect, events.inbox_event, events.outbox_event")
    return shared_url


@pytest.fixture
def pipeline(database_url: str, redis_url: str) -> Pipeline:
    return Pipeline("shop", database_url=database_url, redis_url=redis_url, strict=False)


def effects(pipeline: Pipeline) -> list[str]:
    with psycopg.connect(pipeline.settings.database_url) as connection:
        return [row[0] for row in connection.execute("SELECT timer_id FROM effect ORDER BY 1")]


def count(pipeline: Pipeline, table: str) -> int:
    with psycopg.connect(pipeline.settings.database_url) as connection:
        query = psycopg.sql.SQL("SELECT count(*) FROM {}").format(
            psycopg.sql.Identifier("events", table)
        )
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


# ── in time, side by side ──────────────────────────────────────────────────────────────────────


def test_timers_are_handled_when_they_are_due_and_removed(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    late: list[float] = []

    @pipeline.timer(TOPIC)
    def remind(body: dict[str, Any], message: TimerMessage) -> None:
        late.append(time.time() - message.due_at.timestamp())

    with working(pipeline, TOPIC):
        for number in range(20):
            arm(store, TOPIC, f"t{number}", {"n": number}, delay_seconds=0.02 * number)
        wait_until_empty(store, TOPIC)
    assert len(late) == 20
    assert min(late) > -0.001
    assert sorted(late)[10] < 1.0


def test_a_sleeping_worker_is_woken_by_an_earlier_timer(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    handled = threading.Event()

    @pipeline.timer(TOPIC, polling_interval=60, max_polling_interval=60)
    def remind(message: TimerMessage) -> None:
        handled.set()

    arm(store, TOPIC, "later", delay_seconds=3600)
    with heard() as signalled, working(pipeline, TOPIC):
        # The bell says when it hears the server; only then the worker may rely on it.
        arm(store, TOPIC, "first")
        assert handled.wait(SOON_SECONDS)
        wait_for(signalled, signals.TimerHandled)
        for number in range(3):
            handled.clear()
            arm(store, TOPIC, f"next{number}", delay_seconds=0.01)
            assert handled.wait(10)
    assert store.pending_ids(TOPIC) == ["later"]


def test_a_timer_of_somebody_who_wakes_nobody_is_found_by_looking(
    pipeline: Pipeline, store: RedisTimers, redis_url: str
) -> None:
    @pipeline.timer(TOPIC, polling_interval=0.01, max_polling_interval=0.05)
    def remind(body: str) -> None: ...

    keys = store.names.of(TOPIC)
    with (
        closing(redis.Redis.from_url(redis_url)) as other,
        heard() as signalled,
        working(pipeline, TOPIC),
    ):
        other.hset(keys.payloads, "theirs", b"text")
        other.zadd(keys.timeline, {"theirs": time.time()})
        wait_for(signalled, signals.TimerHandled)
        other.zadd(keys.timeline, {"orphan": time.time()})
        assert wait_for(signalled, signals.TimerOrphaned)[0].timer_id == "orphan"
    assert store.counts(TOPIC) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_so_many_run_at_a_time_and_no_more(
    pipeline: Pipeline, store: RedisTimers, is_async: bool
) -> None:
    together = threading.Barrier(3)
    running, most = 0, 0
    lock = threading.Lock()

    def enter(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    def remind(body: int) -> None:
        enter(1)
        together.wait(SOON_SECONDS)
        enter(-1)

    async def remind_async(body: int) -> None:
        import asyncio

        enter(1)
        await asyncio.to_thread(together.wait, SOON_SECONDS)
        enter(-1)

    pipeline.timer(TOPIC, max_concurrent=3)(remind_async if is_async else remind)
    for number in range(9):
        arm(store, TOPIC, f"t{number}", number)
    with working(pipeline, TOPIC):
        wait_until_empty(store, TOPIC)
    assert most == 3


def test_an_answer_goes_to_the_topic_that_asked_for_it(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    @pipeline.timer(TOPIC)
    async def remind(body: dict[str, int]) -> dict[str, int]:
        return {"twice": body["n"] * 2}

    arm(store, TOPIC, "a", {"n": 4}, reply_to="answers", correlation_id="c-1")
    with working(pipeline, TOPIC):
        wait_until_empty(store, TOPIC)
    (answered,) = store.claim("answers", count=9, lease_seconds=9).timers
    answer = read_message(
        answered.payload, topic="", timer_id="", due_at=answered.due_at, attempt=1
    )
    assert answer.body == {"twice": 8}
    assert answer.correlation_id == "c-1"


# ── failing ────────────────────────────────────────────────────────────────────────────────────


def test_a_failed_timer_is_tried_again_and_then_buried(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    attempts: list[int] = []

    @pipeline.timer(TOPIC, retry=Retry.fixed(seconds=0.01, attempts_max=3))
    def remind(message: TimerMessage) -> None:
        attempts.append(message.attempt)
        raise ValueError("no such order")

    arm(store, TOPIC, "a")
    with heard() as signalled, working(pipeline, TOPIC):
        (buried,) = wait_for(signalled, signals.TimerBuried)
    assert attempts == [1, 2, 3]
    assert buried.reason == "exhausted"
    assert store.counts(TOPIC) == (0, 1)
    (dead,) = store.list_dead(TOPIC)
    assert (dead.error_type, dead.error_message, dead.attempts) == (
        "ValueError",
        "no such order",
        3,
    )


def test_what_a_handler_says_of_its_timer_is_done(pipeline: Pipeline, store: RedisTimers) -> None:
    attempts: list[tuple[str, int]] = []

    @pipeline.timer(TOPIC, retry=Retry.fixed(seconds=60, attempts_max=2))
    def remind(message: TimerMessage) -> None:
        attempts.append((message.timer_id, message.attempt))
        if message.timer_id == "nacked":
            message.nack(timedelta(0))
        if message.timer_id == "rejected":
            message.reject()
        if message.timer_id == "acked":
            message.ack()
            raise ValueError("after the fact")
        if message.timer_id == "hopeless":
            raise FatalError("never")
        if message.timer_id == "quitting":
            raise SystemExit(3)

    for timer_id in ("nacked", "rejected", "acked", "hopeless", "quitting"):
        arm(store, TOPIC, timer_id)
    with heard() as signalled, working(pipeline, TOPIC):
        wait_for(signalled, signals.TimerBuried, 2)
        wait_for(signalled, signals.TimerRejected)
        wait_for(signalled, signals.TimerHandled)
        wait_for(signalled, signals.TimerRetried, 2)
    assert sorted(attempts) == [
        ("acked", 1), ("hopeless", 1), ("nacked", 1), ("nacked", 2),
        ("quitting", 1), ("rejected", 1),
    ]  # fmt: skip
    assert {dead.timer_id for dead in store.list_dead(TOPIC)} == {"nacked", "hopeless"}
    assert store.pending_ids(TOPIC) == ["quitting"]


def test_what_cannot_be_read_is_buried_and_not_looped(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    called: list[Any] = []

    @pipeline.timer(TOPIC)
    def remind(body: dict[str, int]) -> None:
        called.append(body)

    store.publish(TOPIC, "torn", b"\x89BIN\r\n\x1a\n\x00", delay_seconds=0.0)
    arm(store, TOPIC, "misfit", {"n": "canary"})
    arm(store, TOPIC, "good", {"n": 1})
    with heard() as signalled, working(pipeline, TOPIC):
        wait_for(signalled, signals.TimerBuried, 2)
        wait_for(signalled, signals.TimerHandled)
    assert called == [{"n": 1}]
    assert {dead.error_type for dead in store.list_dead(TOPIC)} == {
        "MalformedTimer",
        "ContractError",
    }
    assert "canary" not in repr(signalled) + repr(store.list_dead(TOPIC))


def test_a_timer_that_ends_its_workers_is_given_up(pipeline: Pipeline, store: RedisTimers) -> None:
    called = threading.Event()

    @pipeline.timer(TOPIC, retry=Retry.none())
    def remind(message: TimerMessage) -> None:
        called.set()

    arm(store, TOPIC, "fatal")
    for _ in range(3):
        # What a worker does that dies right after: it takes the timer and says nothing more.
        wait_until(
            lambda: bool(store.claim(TOPIC, count=1, lease_seconds=0.01).timers),
            what="the lease before is over",
        )
    with heard() as signalled, working(pipeline, TOPIC):
        (buried,) = wait_for(signalled, signals.TimerBuried)
    assert buried.reason == "crash"
    assert not called.is_set()


def test_a_handler_that_takes_too_long_is_ended(pipeline: Pipeline, store: RedisTimers) -> None:
    @pipeline.timer(TOPIC, timeout_seconds=0.05, retry=Retry.none())
    async def remind(body: bytes) -> None:
        import asyncio

        await asyncio.Event().wait()

    @pipeline.timer("querying", timeout_seconds=0.05, retry=Retry.none())
    def query(connection: psycopg.Connection[Any]) -> None:
        connection.execute("SELECT pg_sleep(60)")

    arm(store, TOPIC, "a")
    arm(store, "querying", "b")
    with heard() as signalled, working(pipeline, TOPIC, "querying"):
        wait_for(signalled, signals.TimerBuried, 2)
    for topic in (TOPIC, "querying"):
        assert store.list_dead(topic)[0].error_type == "HandlerTimeout"


# ── leases ─────────────────────────────────────────────────────────────────────────────────────


def test_a_lease_is_renewed_while_its_handler_runs(pipeline: Pipeline, store: RedisTimers) -> None:
    begun, may_end = threading.Event(), threading.Event()
    attempts: list[int] = []

    @pipeline.timer(TOPIC, lease_ttl=0.2)
    def remind(message: TimerMessage) -> None:
        attempts.append(message.attempt)
        begun.set()
        may_end.wait(SOON_SECONDS)

    arm(store, TOPIC, "a")
    with working(pipeline, TOPIC):
        assert begun.wait(SOON_SECONDS)
        (first,) = store.list_timers(TOPIC)
        wait_until(
            lambda: store.list_timers(TOPIC)[0].score > first.score + 0.25,
            what="the lease is longer than one could be",
        )
        assert not store.claim(TOPIC, count=1, lease_seconds=9).timers
        may_end.set()
        wait_until_empty(store, TOPIC)
    assert attempts == [1]


def test_a_timer_armed_anew_while_it_is_handled_runs_again(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    @pipeline.timer(TOPIC, max_concurrent=1)
    def remind(body: int, message: TimerMessage) -> None:
        seen.append((body, message.attempt))
        begun.set()
        may_end.wait(SOON_SECONDS)

    arm(store, TOPIC, "a", 1)
    with heard() as signalled, working(pipeline, TOPIC):
        assert begun.wait(SOON_SECONDS)
        arm(store, TOPIC, "a", 2)
        may_end.set()
        wait_for(signalled, signals.TimerHandled)
    assert seen == [(1, 1), (2, 1)]
    assert len(wait_for(signalled, signals.TimerReplaced)) == 1
    assert store.counts(TOPIC) == (0, 0)


def test_what_somebody_else_took_meanwhile_is_left_to_them(
    pipeline: Pipeline, store: RedisTimers, redis_url: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @pipeline.timer(TOPIC, lease_ttl=0.2)
    def remind(message: TimerMessage) -> None:
        begun.set()
        may_end.wait(SOON_SECONDS)

    arm(store, TOPIC, "a")
    with heard() as signalled, working(pipeline, TOPIC):
        assert begun.wait(SOON_SECONDS)
        # What another worker's claim writes, after a lease that ran out.
        with closing(redis.Redis.from_url(redis_url)) as client:
            keys = store.names.of(TOPIC)
            state: Any = client.hget(keys.state, "a")
            with client.pipeline() as rival:
                rival.zadd(keys.timeline, {"a": 9e9})
                rival.hset(keys.state, "a", f"{9e9:.0f} {state.split()[1].decode()} 2 l")
                rival.execute()
        wait_for(signalled, signals.TimerOvertaken)
        may_end.set()
    (taken,) = store.list_timers(TOPIC)
    assert (taken.score, taken.attempts, taken.state) == (9e9, 2, "leased")


def test_a_worker_that_stops_lets_handlers_end_and_gives_back_the_rest(
    pipeline: Pipeline, store: RedisTimers, database_url: str, redis_url: str
) -> None:
    pipeline = Pipeline(
        "shop", database_url=database_url, redis_url=redis_url, shutdown_seconds=0.25
    )
    begun, never = threading.Barrier(3), threading.Event()

    @pipeline.timer(TOPIC)
    def remind(body: str, message: TimerMessage) -> None:
        begun.wait(SOON_SECONDS)
        if body == "endless":
            never.wait(SOON_SECONDS)

    arm(store, TOPIC, "quick", "quick")
    arm(store, TOPIC, "slow", "endless")
    with heard() as signalled, working(pipeline, TOPIC):
        begun.wait(SOON_SECONDS)
    (given,) = wait_for(signalled, signals.TimersGivenBack)
    assert given.count == 1
    (again,) = store.claim(TOPIC, count=9, lease_seconds=9).timers
    assert (again.timer_id, again.attempt) == ("slow", 1)
    never.set()


def test_redis_may_go_away_and_come_back(
    database_url: str, redis_url: str, store: RedisTimers
) -> None:
    with Proxy.to(redis_url) as proxy:
        url = proxy.url(redis_url)
        pipeline = Pipeline("shop", database_url=database_url, redis_url=url)
        begun, may_end = threading.Event(), threading.Event()
        calls: list[str] = []

        @pipeline.timer(TOPIC)
        def remind(message: TimerMessage) -> None:
            calls.append(message.timer_id)
            begun.set()
            may_end.wait(SOON_SECONDS)

        arm(store, TOPIC, "a")
        with heard() as signalled, working(pipeline, TOPIC):
            assert begun.wait(SOON_SECONDS)
            with proxy.refusing():
                may_end.set()
                wait_for(signalled, signals.ServerLost)
                arm(store, TOPIC, "b")
            wait_for(signalled, signals.TimerHandled, 2)
        assert calls == ["a", "b"]
        assert len(wait_for(signalled, signals.ServerLost)) == 1


def test_a_right_that_was_taken_is_waited_for(
    database_url: str, redis_url: str, store: RedisTimers
) -> None:
    client: Any = redis.Redis.from_url(redis_url)
    with closing(client) as admin:

        def let(*rights: str) -> None:
            admin.execute_command("ACL", "SETUSER", "narrow", *rights)

        let("on", ">x", "~*", "&*", "+@all")
        url = redis_url.replace("redis://", "redis://narrow:x@")
        pipeline = Pipeline("shop", database_url=database_url, redis_url=url)
        begun, may_end = threading.Event(), threading.Event()

        @pipeline.timer(TOPIC)
        def remind(message: TimerMessage) -> None:
            begun.set()
            may_end.wait(SOON_SECONDS)

        arm(store, TOPIC, "a")
        try:
            with heard() as signalled, working(pipeline, TOPIC):
                assert begun.wait(SOON_SECONDS)
                let("-@all")
                may_end.set()
                wait_for(signalled, signals.ServerLost)
                let("+@all")
                arm(store, TOPIC, "b")
                wait_for(signalled, signals.TimerHandled, 2)
            assert len(wait_for(signalled, signals.ServerLost)) == 1
        finally:
            admin.acl_deluser("narrow")


# ── exactly once ───────────────────────────────────────────────────────────────────────────────


def by_session(body: bytes, message: TimerMessage, session: Session) -> None:
    session.execute(text("INSERT INTO effect (timer_id) VALUES (:id)"), {"id": message.timer_id})


def by_connection(message: TimerMessage, connection: psycopg.Connection[Any]) -> None:
    connection.execute(INSERT, [message.timer_id])


async def by_async_session(message: TimerMessage, session: AsyncSession) -> None:
    statement = text("INSERT INTO effect (timer_id) VALUES (:id)")
    await session.execute(statement, {"id": message.timer_id})


async def by_async_connection(
    message: TimerMessage, connection: psycopg.AsyncConnection[Any]
) -> None:
    await connection.execute(INSERT, [message.timer_id])


@pytest.mark.parametrize(
    "function", [by_session, by_connection, by_async_session, by_async_connection]
)
def test_what_is_delivered_again_is_written_once(
    pipeline: Pipeline, store: RedisTimers, function: Callable[..., Any]
) -> None:
    pipeline.timer(TOPIC)(function)
    for number in range(12):
        arm(store, TOPIC, f"t{number:02}", correlation_id=f"c{number}")
    with heard() as signalled, working(pipeline, TOPIC):
        wait_for(signalled, signals.TimerHandled, 12)
        # As after a crash between COMMIT and the word to Redis: everything comes once more.
        for number in range(12):
            arm(store, TOPIC, f"t{number:02}", correlation_id=f"c{number}")
        wait_for(signalled, signals.TimerRepeated, 12)
        arm(store, TOPIC, "t00", correlation_id="another arming")
        wait_for(signalled, signals.TimerHandled, 13)
    assert effects(pipeline) == ["t00", *(f"t{number:02}" for number in range(12))]
    assert count(pipeline, "inbox_event") == 13
    assert count(pipeline, "seal") == 0


def test_a_failure_leaves_nothing_behind(pipeline: Pipeline, store: RedisTimers) -> None:
    nacked: list[int] = []

    @pipeline.timer(TOPIC, retry=Retry.fixed(seconds=0.01, attempts_max=2))
    def remind(message: TimerMessage, session: Session) -> None:
        by_session(b"", message, session)
        pipeline.send(session, "orders", RawEvent("reminded", {"id": message.timer_id}))
        if message.timer_id == "nacked":
            nacked.append(message.attempt)
            if message.attempt == 1:
                message.nack(timedelta(0))
        if message.timer_id == "failing":
            raise ValueError
        if message.timer_id == "committing":
            session.commit()
        if message.timer_id == "swallowing":
            with pytest.raises(Exception, match="exactly-once"):
                session.execute(text("ROLLBACK"))
        if message.timer_id == "rejected":
            message.reject()

    names = ("nacked", "failing", "committing", "swallowing", "rejected")
    for timer_id in names:
        arm(store, TOPIC, timer_id, correlation_id="c")
    with heard() as signalled, working(pipeline, TOPIC):
        wait_for(signalled, signals.TimerBuried, 3)
        wait_for(signalled, signals.TimerRejected)
        wait_for(signalled, signals.TimerHandled)
    assert nacked == [1, 2]
    assert effects(pipeline) == ["nacked", "rejected"]
    assert count(pipeline, "outbox_event") == 2
    assert count(pipeline, "inbox_event") == 2
    assert {dead.error_type for dead in store.list_dead(TOPIC)} == {
        "ValueError", "CommitInTransactionError", "RollbackInTransactionError",
    }  # fmt: skip


def test_a_transaction_ended_behind_the_workers_back_is_not_committed(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    @pipeline.timer(TOPIC, retry=Retry.none())
    def remind(connection: psycopg.Connection[Any]) -> None:
        # Below everything that looks at SQL text.
        connection.pgconn.exec_(b"ROLLBACK")
        connection.execute(INSERT, ["stray"])

    arm(store, TOPIC, "a")
    with heard() as signalled, working(pipeline, TOPIC):
        wait_for(signalled, signals.TimerBuried)
    assert store.list_dead(TOPIC)[0].error_type == "RollbackInTransactionError"
    assert effects(pipeline) == []


def test_what_a_handler_sends_knows_its_timer(pipeline: Pipeline, store: RedisTimers) -> None:
    @pipeline.timer(TOPIC)
    def remind(session: Session) -> None:
        pipeline.send(session, "orders", RawEvent("reminded", {}))

    arm(store, TOPIC, "a", correlation_id="c-7")
    with working(pipeline, TOPIC):
        wait_until_empty(store, TOPIC)
    with psycopg.connect(pipeline.settings.database_url) as connection:
        row = connection.execute("SELECT metadata FROM events.outbox_event").fetchone()
    assert row is not None
    assert row[0].items() >= {"correlation_id": "c-7", "causation_id": "a"}.items()


def test_a_timer_that_another_transaction_has_in_hand_waits_for_it(
    pipeline: Pipeline, store: RedisTimers
) -> None:
    pipeline.timer(TOPIC)(by_session)
    with (
        psycopg.connect(pipeline.settings.database_url) as rival,
        heard() as signalled,
        working(pipeline, TOPIC),
    ):
        claim(rival, "shop.timer:reminders", inbox_id("a", "c", 0.0))
        arm(store, TOPIC, "a", correlation_id="c")
        wait_for(signalled, signals.TimerDeferred)
        rival.rollback()
        (handled,) = wait_for(signalled, signals.TimerHandled)
    assert handled.attempt == 1
    assert effects(pipeline) == ["a"]


def test_postgresql_may_go_away_and_costs_no_attempt(
    database_url: str, redis_url: str, store: RedisTimers
) -> None:
    with Proxy.to(database_url) as proxy:
        url = proxy.url(database_url)
        pipeline = Pipeline("shop", database_url=url, redis_url=redis_url)
        pipeline.timer(TOPIC, retry=Retry.none())(of_nothing)
        arm(store, TOPIC, "a")
        with heard() as signalled, working(pipeline, TOPIC):
            wait_for(signalled, signals.TimerHandled)
            with proxy.refusing():
                arm(store, TOPIC, "b")
                wait_for(signalled, signals.TimerDeferred)
            assert wait_for(signalled, signals.TimerHandled, 2)[1].attempt == 1
    (lost,) = wait_for(signalled, signals.ServerLost)
    assert lost.server == "PostgreSQL"


def of_nothing(session: Session) -> None:
    session.execute(text("SELECT 1"))


async def of_nothing_async(session: AsyncSession) -> None:
    await session.execute(text("SELECT 1"))


@pytest.mark.parametrize("handler", [of_nothing, of_nothing_async])
def test_postgresql_that_is_away_before_the_first_timer_costs_no_attempt(
    database_url: str, redis_url: str, store: RedisTimers, handler: Callable[..., Any]
) -> None:
    with Proxy.to(database_url) as proxy:
        url = proxy.url(database_url)
        pipeline = Pipeline("shop", database_url=url, redis_url=redis_url)
        pipeline.timer(TOPIC, retry=Retry.none())(handler)
        arm(store, TOPIC, "a")
        with heard() as signalled, working(pipeline, TOPIC):
            with proxy.refusing():
                wait_for(signalled, signals.TimerDeferred)
            (handled,) = wait_for(signalled, signals.TimerHandled)
    assert handled.attempt == 1
