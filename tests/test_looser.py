"""At least once and at most once: the same steps in another order, and what a handler may do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import Session

from penstock import Pipeline
from penstock.core.events import StreamEvent
from penstock.core.lanes import lane_of
from penstock.core.options import Guarantee
from penstock.core.retry import Retry
from penstock.errors import (
    AlreadyHandled,
    CommitInTransactionError,
    FatalError,
    LeaseLost,
    UsageError,
)
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.context import Context
from penstock.stores.operations import Kind, Operation
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.failing import AT_ONCE, LATER, drive, effects, heard, look_now, outcomes, parked
from tests.proxy import Proxy
from tests.test_seams import working
from tests.waiting import wait_until

AT_LEAST: dict[str, Any] = {"guarantee": Guarantee.AT_LEAST_ONCE}
AT_MOST: dict[str, Any] = {"guarantee": Guarantee.AT_MOST_ONCE, "retry": Retry.none()}
LETTERS = "SELECT position FROM events.dead_letter ORDER BY position"
CUT_ALL = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    yield bench
    bench.close()


class World:
    """What a handler has done outside; it fails on some events."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)
        self.calls: list[int] = []

    def call(self, event: Placed) -> None:
        self.calls.append(event.n)
        if event.n in self.bad:
            raise ValueError("not today")

    def call_list(self, events: list[Placed]) -> None:
        for event in events:
            self.call(event)

    async def call_async(self, event: Placed) -> None:
        self.call(event)


def send_unknown(bench: Workbench, event_type: str, version: int) -> None:
    bench.connection.execute(
        "SELECT events.send('orders', %s, '{\"n\": 2}', key => 'k', version => %s)",
        (event_type, version),
    )


def write(session: Any, n: int) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": n})


@pytest.mark.parametrize("shape", ["call", "call_async"])
def test_a_failing_event_is_parked_and_costs_nobody_else_a_call(
    bench: Workbench, shape: str
) -> None:
    bench.send(9)
    bench.publish()
    world = World(5)
    lane = bench.consumer(getattr(world, shape), retry=LATER, **AT_LEAST)
    run_until_idle(lane)
    assert world.calls == [1, 2, 3, 4, 5, 6, 7, 9]
    assert outcomes(bench) == {"handled": [1, 2, 3, 4, 6, 7, 9], "parked": [5, 8]}
    assert bench.checkpoint() == 9


def test_every_attempt_is_one_call(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    world = World(1)
    lane = bench.consumer(world.call, retry=Retry.fixed(seconds=0.001, attempts_max=3), **AT_LEAST)
    with heard(signals.EventBuried) as buried:
        drive(lane, lambda: bool(buried))
    assert world.calls.count(1) == 3
    assert outcomes(bench) == {"handled": [2], "dead": [1]}


def test_an_event_that_succeeds_later_lets_its_key_go_on(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    world = World(2)
    lane = bench.consumer(world.call, retry=AT_ONCE, **AT_LEAST)
    with heard(signals.EventFailed) as failures:
        drive(lane, lambda: len(failures) == 2)
    world.bad.clear()
    drive(lane, lambda: not parked(bench))
    assert [n for n in world.calls if n in {2, 5}] == [2, 2, 2, 5]
    assert outcomes(bench) == {"handled": [1, 2, 3, 4, 5, 6]}


def test_a_failed_list_is_called_again_as_lists_of_one(bench: Workbench) -> None:
    bench.send(4)
    bench.publish()
    world = World(3)
    run_until_idle(bench.consumer(world.call_list, retry=LATER, **AT_LEAST))
    assert world.calls == [1, 2, 3, 1, 2, 3, 4]
    assert outcomes(bench) == {"handled": [1, 2, 4], "parked": [3]}


def test_complete_commits_last_writes_with_the_checkpoint(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    checkpoints: list[int] = []

    def handler(event: Placed, context: Context) -> None:
        with context.complete() as session:
            write(session, event.n)
        checkpoints.append(bench.checkpoint())

    run_until_idle(bench.consumer(handler, **AT_LEAST))
    assert effects(bench) == [1, 2, 3]
    assert checkpoints == [1, 2, 3]
    assert outcomes(bench) == {"handled": [1, 2, 3]}


@pytest.mark.parametrize("failures", [1, 2])
def test_what_a_failing_event_has_kept_from_going_on_is_called_once(
    bench: Workbench, failures: int
) -> None:
    bench.send(4)
    bench.publish()
    calls: list[int] = []

    def handler(event: Placed, context: Context) -> None:
        calls.append(event.n)
        if event.n == 1 and len(calls) <= failures:
            raise ValueError("not yet")
        with context.complete() as session:
            write(session, event.n)

    lane = bench.consumer(handler, retry=AT_ONCE, order="stream", **AT_LEAST)
    drive(lane, lambda: lane._intake.cursor == 4 and not lane._live and not lane._intake.has_more)
    run_until_idle(lane)
    assert calls == [1] * failures + [1, 2, 3, 4]
    assert effects(bench) == [1, 2, 3, 4]


class Cancelled:
    """Its fourth event is cancelled in a statement of `complete()`, the first time."""

    def __init__(self, *, is_swallowed: bool = False) -> None:
        self.calls: list[tuple[int, int]] = []
        self._is_swallowed = is_swallowed

    async def call(self, event: Placed, context: Context) -> None:
        self.calls.append((event.n, context.attempt))
        if event.n != 4 or context.attempt > 1:
            return
        with suppress(*([TimeoutError] if self._is_swallowed else [])):
            async with asyncio.timeout(0.05), context.complete() as session:
                await session.execute(text("SELECT pg_sleep(60)"))
        async with context.complete() as session:
            await session.execute(text("INSERT INTO effect (n) VALUES (4)"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_swallowed", [False, True])
def test_an_event_that_is_cancelled_in_complete_costs_nobody_else_a_call(
    bench: Workbench, is_swallowed: bool
) -> None:
    bench.send(5)
    bench.publish()
    cancelled = Cancelled(is_swallowed=is_swallowed)
    lane = bench.consumer(cancelled.call, retry=AT_ONCE, **AT_LEAST)
    with heard(signals.EventFailed) as failed:
        drive(lane, lambda: outcomes(bench) == {"handled": [1, 2, 3, 4, 5]})
    assert sorted(cancelled.calls) == [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (5, 1)]
    (failure,) = failed
    kind = "RollbackInTransactionError" if is_swallowed else "TimeoutError"
    assert failure.error.startswith(kind)
    assert effects(bench) == []


def test_what_waited_is_not_taken_for_called_on_another_connection(bench: Workbench) -> None:
    """The event that it waited for goes away while others of the batch are handled."""
    bench.send(3)
    bench.publish()
    world = World(2)
    lane = bench.consumer(world.call, retry=LATER, **AT_LEAST)
    run_until_idle(lane)
    world.calls.clear()
    retry = {"called": False}

    def discard(event: Placed, context: Context) -> None:
        world.calls.append(event.n)
        bench.connection.execute("DELETE FROM events.parked_event WHERE position = 2")
        if event.n == 3 and not retry["called"]:
            retry["called"] = True
            with context.complete() as session:
                session.connection().invalidate()
                raise LookupError

    again = bench.consumer(discard, retry=AT_ONCE, **AT_LEAST)
    lane.close()
    bench.send(3)  # position 5 is of the key that waits behind 2
    bench.publish()
    drive(again, lambda: outcomes(bench).get("handled") == [1, 3, 4, 5, 6])
    assert sorted(world.calls) == [1, 2, 3, 3]


@pytest.mark.parametrize("is_parked", [False, True])
def test_what_lies_between_a_completed_event_and_one_that_spoils_the_connection_is_called_once(
    bench: Workbench, is_parked: bool
) -> None:
    """It is settled behind the completed one, on another connection."""
    bench.send(12)  # 1, 4, 7 and 10 are of one key
    bench.publish()
    calls: list[int] = []

    def handler(event: Placed, context: Context) -> None:
        calls.append(event.n)
        if event.n == 1 and is_parked and calls.count(1) == 1:
            raise ValueError("not yet")
        if event.n == 4:
            with context.complete() as session:
                write(session, event.n)
        if event.n == 10 and calls.count(10) == 1:
            with context.complete() as session:
                session.connection().invalidate()
                raise LookupError

    lane = bench.consumer(handler, retry=AT_ONCE, **AT_LEAST)
    drive(lane, lambda: outcomes(bench) == {"handled": list(range(1, 13))})
    twice = [1, 10] if is_parked else [10]
    assert sorted(calls) == sorted([*range(1, 13), *twice])
    assert effects(bench) == [4]


def test_nothing_is_called_once_a_lease_could_not_be_renewed(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    world = World()
    lane = bench.consumer(world.call, **AT_LEAST)
    run_until_idle(lane)
    bench.send(1)
    bench.publish()
    assert lane._lease is not None
    lane._consuming.leases.forget(lane._lease, "it could not be renewed in time")
    with pytest.raises(LeaseLost):
        lane.step()
    assert world.calls == [1]


def test_complete_settles_what_came_before_it_too(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    checkpoints: list[int] = []

    def handler(event: Placed, context: Context) -> None:
        if event.n == 2:
            with context.complete() as session:
                write(session, event.n)
        checkpoints.append(bench.checkpoint())

    run_until_idle(bench.consumer(handler, **AT_LEAST))
    assert checkpoints == [0, 2, 2]
    assert bench.checkpoint() == 3


def test_complete_works_in_async_handlers(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()

    async def handler(event: Placed, context: Context) -> None:
        async with context.complete() as session:
            await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
            if event.n == 2:
                raise ValueError("not today")

    run_until_idle(bench.consumer(handler, retry=LATER, **AT_LEAST))
    assert effects(bench) == [1, 3]
    assert outcomes(bench) == {"handled": [1, 3], "parked": [2]}


def test_a_failure_inside_complete_undoes_its_writes(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()

    def handler(event: Placed, context: Context) -> None:
        with context.complete() as session:
            write(session, event.n)
            if event.n == 1:
                raise ValueError("not today")

    run_until_idle(bench.consumer(handler, retry=LATER, **AT_LEAST))
    assert effects(bench) == [2]
    assert outcomes(bench) == {"parked": [1], "handled": [2]}


def test_a_failure_after_complete_is_told_and_changes_nothing(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    calls: list[int] = []

    def handler(event: Placed, context: Context) -> None:
        calls.append(event.n)
        with context.complete() as session:
            write(session, event.n)
        if event.n == 2:
            raise ValueError("too late")

    with heard(signals.CompletedThenFailed) as late:
        run_until_idle(bench.consumer(handler, **AT_LEAST))
    assert [(told.position, told.error) for told in late] == [(2, "ValueError: too late")]
    assert calls == effects(bench) == [1, 2, 3]


def test_a_commit_inside_complete_is_refused_also_where_it_is_swallowed(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()

    def handler(event: Placed, context: Context) -> None:
        with context.complete() as session:
            write(session, event.n)
            with suppress(CommitInTransactionError):
                session.commit()

    with heard(signals.EventFailed) as failures:
        run_until_idle(bench.consumer(handler, retry=LATER, **AT_LEAST))
    assert failures[0].error.startswith("CommitInTransactionError")
    assert "exactly-once" not in failures[0].error
    assert effects(bench) == []


def test_complete_is_for_once_and_for_at_least_once_only(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    errors: list[str] = []

    def twice(event: Placed, context: Context) -> None:
        with context.complete() as session:
            write(session, event.n)
        with pytest.raises(UsageError) as refusal:
            context.complete().__enter__()
        errors.append(str(refusal.value))

    def wrong(event: StreamEvent[Any], context: Context) -> None:
        with pytest.raises(UsageError) as refusal:
            context.complete()
        errors.append(str(refusal.value))

    run_until_idle(bench.consumer(twice, name="twice", **AT_LEAST))
    run_until_idle(bench.consumer(wrong, name="wrong"))
    assert "for once" in errors[0]
    assert "AT_LEAST_ONCE" in errors[1]
    assert effects(bench) == [1]


def test_a_lost_lease_inside_complete_counts_also_where_it_is_swallowed(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()

    def handler(event: Placed, context: Context) -> None:
        with suppress(LeaseLost), context.complete() as session:
            write(session, event.n)
            bench.connection.execute("UPDATE events.stream_lease SET term = term + 1")

    lane = bench.consumer(handler, **AT_LEAST)
    with pytest.raises(LeaseLost):
        run_until_idle(lane)
    assert effects(bench) == []
    assert outcomes(bench) == {}


@pytest.mark.parametrize("shape", ["call", "call_async"])
def test_at_most_once_a_failure_is_a_dead_letter_and_never_a_second_call(
    bench: Workbench, shape: str
) -> None:
    bench.send(6)
    bench.publish()
    world = World(2, 5)
    with heard(signals.EventBuried) as buried:
        run_until_idle(bench.consumer(getattr(world, shape), **AT_MOST))
    assert world.calls == [1, 2, 3, 4, 5, 6]
    assert [event.position for event in buried] == [2, 5]
    assert outcomes(bench) == {"handled": [1, 3, 4, 6], "dead": [2, 5]}
    assert bench.rows(LETTERS) == [2, 5]


def test_at_most_once_a_failure_is_a_dead_letter_though_all_connections_break_before_it_is_written(
    database_url: str,
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    world, connection = World(2, 5, 8), psycopg.connect(database_url, autocommit=True)

    @pipeline.consumer("orders", name="count", start="earliest", **AT_MOST)
    def count(event: Placed) -> None:
        world.call(event)
        if event.n == 10:
            connection.execute(CUT_ALL)

    def are_written() -> bool:
        return connection.execute(LETTERS).fetchall() == [(2,), (5,), (8,)]

    with Session(pipeline.engine) as session, session.begin():
        pipeline.send_many(session, "orders", [Placed(n=n) for n in range(1, 11)])
    told = heard(signals.EventFailed, signals.EventBuried)
    with connection, told as signs, working(pipeline, "publisher", "consumer:count"):
        wait_until(are_written, what="the dead letters are written")
        wait_until(lambda: len(signs) == 6, what="and told")
        assert world.calls == list(range(1, 11))
        assert [type(sign) for sign in signs[:3]] == [signals.EventFailed] * 3
    pipeline.engine.dispose()


@pytest.mark.parametrize("shape", ["call", "call_async"])
def test_at_most_once_a_failure_is_a_dead_letter_though_the_server_is_away_meanwhile(
    database_url: str, shape: str
) -> None:
    world = World(2)
    call = getattr(world, shape)
    with Proxy.to(database_url) as proxy, psycopg.connect(database_url, autocommit=True) as look:
        pipeline = Pipeline("shop", database_url=proxy.url(database_url), redis_url=None)
        goes_away = ExitStack()

        def count(event: Placed) -> Any:
            goes_away.enter_context(proxy.refusing())
            return call(event)

        async def count_async(event: Placed) -> None:
            await count(event)

        handler = count_async if shape == "call_async" else count
        pipeline.consumer("orders", name="count", start="earliest", **AT_MOST)(handler)
        pipeline.send_now("orders", Placed(n=2))
        with heard(signals.ServerLost) as lost, working(pipeline, "publisher", "consumer:count"):
            is_lane = "consumer:shop.count"
            wait_until(lambda: any(is_lane in sign.worker for sign in lost), what="the lane waits")
            goes_away.close()
            wait_until(lambda: bool(look.execute(LETTERS).fetchall()), what="the letter is written")
        assert world.calls == [2]
        pipeline.engine.dispose()


def test_at_most_once_a_failure_is_a_dead_letter_also_where_the_lease_is_lost(
    bench: Workbench,
) -> None:
    """The event is settled, by this worker alone: nobody else would write the letter."""
    bench.send(3)
    bench.publish()
    world = World(1, 2)

    def handler(event: Placed) -> None:
        if event.n == 3:
            bench.connection.execute("UPDATE events.stream_lease SET term = term + 1")
        world.call(event)

    run_until_idle(bench.consumer(handler, **AT_MOST))
    assert bench.rows(LETTERS) == [1, 2]
    assert outcomes(bench) == {"handled": [3], "dead": [1, 2]}


def test_at_most_once_nothing_is_called_while_a_dead_letter_cannot_be_written(
    bench: Workbench,
) -> None:
    bench.send(2)
    bench.publish()
    world = World(1, 2)
    lane = bench.consumer(world.call, **AT_MOST)
    bench.connection.execute("ALTER TABLE events.dead_letter ADD CONSTRAINT no CHECK (false)")
    with heard(signals.ConsumerBlocked) as blocked:
        lane.step()
        bench.send(1)
        bench.publish()
        assert all(lane.step().pause_seconds for _ in range(3))
    assert [sign.position for sign in blocked] == [1]
    assert world.calls == [1, 2]
    bench.connection.execute("ALTER TABLE events.dead_letter DROP CONSTRAINT no")
    run_until_idle(lane)
    assert bench.rows(LETTERS) == [1, 2, 3]
    assert world.calls == [1, 2, 1]


@pytest.mark.parametrize(
    ("event_type", "version", "options"),
    [("placed", 9, {}), ("unheard_of", 1, {"on_unknown": "block"})],
    ids=["version", "type"],
)
def test_at_most_once_an_event_that_waits_for_its_contract_is_called_once_it_is_deployed(
    bench: Workbench, event_type: str, version: int, options: dict[str, Any]
) -> None:
    bench.send(1)
    send_unknown(bench, event_type, version)
    bench.send(1)
    bench.publish()
    world = World()
    lane = bench.consumer(world.call, **AT_MOST, **options)
    with heard(signals.ConsumerBlocked) as blocked:
        drive(lane, lambda: bool(blocked))
    assert [sign.position for sign in blocked] == [2]
    assert world.calls == [1]
    assert outcomes(bench) == {"handled": [1]}
    lane.close()

    def handle_any(event: StreamEvent) -> None:
        world.calls.append(event.position)

    run_until_idle(bench.consumer(handle_any, **AT_MOST, **options))
    assert world.calls == [1, 2, 3]
    assert outcomes(bench) == {"handled": [1, 2, 3]}


def test_at_most_once_a_version_without_a_contract_is_buried_if_asked_to(bench: Workbench) -> None:
    bench.send(1)
    send_unknown(bench, "placed", 9)
    bench.send(1)
    bench.publish()
    world = World()
    run_until_idle(bench.consumer(world.call, **AT_MOST, on_unknown_version="bury"))
    assert world.calls == [1, 1]
    assert outcomes(bench) == {"handled": [1, 3], "dead": [2]}
    assert bench.rows("SELECT reason FROM events.dead_letter") == ["contract"]


def test_at_most_once_what_is_settled_waits_for_no_contract(bench: Workbench) -> None:
    send_unknown(bench, "placed", 9)
    bench.send(1)
    bench.publish()
    world = World()
    lane = bench.consumer(world.call, **AT_MOST)
    bench.connection.execute(
        "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
        " SELECT 'test.consumer', event_uuid, position, 'handled' FROM events.outbox_event"
        "  WHERE position = 1"
    )
    run_until_idle(lane)
    assert world.calls == [1]


def test_at_most_once_a_worker_that_ends_after_a_batch_writes_its_dead_letters(
    bench: Workbench,
) -> None:
    bench.send(2)
    bench.publish()
    lane = bench.consumer(World(1).call, **AT_MOST)
    lane.step()
    lane.close()
    assert bench.rows(LETTERS) == [1]


@pytest.mark.parametrize("is_paused", [True, False])
def test_at_most_once_a_worker_without_lanes_writes_the_dead_letters_that_a_lane_has_left(
    bench: Workbench, is_paused: bool
) -> None:
    bench.send(2)
    bench.publish()
    lane = bench.consumer(World(1).call, **AT_MOST)
    lane.step()
    consumer = bench._stages[-1]
    assert isinstance(consumer, Consumer)
    if is_paused:
        bench.connection.execute("UPDATE events.consumer SET paused_at = now()")
        consumer.step()
    else:
        consumer.close()
    assert bench.rows(LETTERS) == [1]


def test_a_dead_letter_of_an_event_that_is_not_settled_any_more_is_not_written(
    bench: Workbench,
) -> None:
    """Somebody has moved the consumer back: the event is called again."""
    bench.send(1)
    bench.publish()
    lane = bench.consumer(World(1).call, **AT_MOST)
    lane.step()
    bench.connection.execute("DELETE FROM events.processed_event")
    with heard(signals.EventBuried) as buried:
        lane.step()
    assert (bench.rows(LETTERS), buried) == ([], [])


def test_a_dead_letter_whose_commit_was_not_answered_is_told_and_written_once(
    bench: Workbench,
) -> None:
    bench.send(1)
    bench.publish()
    lane = bench.consumer(World(1).call, **AT_MOST)
    lane.step()
    (unanswered,) = letters = lane._losses.letters
    lane.step()
    letters.append(unanswered)
    with heard(signals.EventBuried) as buried:
        lane.step()
    assert [event.position for event in buried] == [1]
    assert bench.rows(LETTERS) == [1]


def test_at_most_once_a_worker_that_is_asked_to_stop_finishes_its_batch(bench: Workbench) -> None:
    bench.send(5)
    bench.publish()
    stop = threading.Event()
    calls: list[int] = []

    def handler(event: Placed) -> None:
        calls.append(event.n)
        stop.set()

    bench.consumer(handler, stop=stop, **AT_MOST).step()
    assert calls == [1, 2, 3, 4, 5]


def test_at_least_once_settled_events_are_not_called_again_after_a_change_of_lanes(
    bench: Workbench,
) -> None:
    bench.send(4)
    bench.publish()
    world = World()
    lane = bench.consumer(world.call, **AT_LEAST)
    run_until_idle(lane)
    lane.close()
    # As a change of lanes leaves it: checkpoints at the floor, settled rows above.
    bench.connection.execute("UPDATE events.consumer SET settled_to = 4")
    bench.connection.execute("UPDATE events.stream_lease SET checkpoint = 1")
    again = World()
    run_until_idle(bench.consumer(again.call, **AT_LEAST))
    assert again.calls == []


def test_what_waited_when_the_handler_was_called_is_not_taken_for_handled(
    bench: Workbench,
) -> None:
    """The event before it goes away while others of the batch are handled."""
    bench.send(3)
    bench.publish()
    world = World(2)
    lane = bench.consumer(world.call, retry=LATER, **AT_LEAST)
    run_until_idle(lane)
    world.bad.clear()
    world.calls.clear()

    def discard(event: Placed) -> None:
        world.calls.append(event.n)
        bench.connection.execute("DELETE FROM events.parked_event WHERE position = 2")

    object.__setattr__(lane._consuming.plan, "function", discard)
    bench.send(3)  # position 5 is of the key that waits behind 2
    bench.publish()
    run_until_idle(lane)
    look_now(lane)
    drive(lane, lambda: not parked(bench))
    assert sorted(world.calls) == [1, 2, 3]
    assert outcomes(bench)["handled"] == [1, 3, 4, 5, 6]


def test_without_order_nothing_is_left_out_behind_a_parked_event(bench: Workbench) -> None:
    bench.send(6)
    bench.publish()
    world = World(2)
    options = {**AT_LEAST, "order": "none", "allow_reordering": True, "retry": LATER}
    bench.consumer(world.call, **options).close()
    # Settled events are to be expected up to here, so that each batch is looked up.
    bench.connection.execute("UPDATE events.consumer SET settled_to = 6")
    run_until_idle(bench.consumer(world.call, **options))
    assert world.calls == [1, 2, 3, 4, 5, 6]
    assert outcomes(bench) == {"handled": [1, 3, 4, 5, 6], "parked": [2]}


@pytest.mark.parametrize("is_swallowed", [False, True])
@pytest.mark.parametrize("kind", ["discard", "redrive"])
def test_an_event_that_is_taken_away_while_its_handler_runs_completes_nothing(
    bench: Workbench, kind: Kind, is_swallowed: bool
) -> None:
    bench.send(4)
    bench.publish()
    bad = {1, 4}
    calls: list[int] = []
    operation = Operation(bench.connection, kind, {}, consumer=None, by="me", reason="")

    def handler(event: Placed, context: Context) -> None:
        calls.append(event.n)
        if event.n in bad:
            raise FatalError("not today")
        if event.n == 1 and kind == "discard":
            assert operation.discard(bench.rows("SELECT id FROM events.dead_letter")) == 2
        if event.n == 1 and kind == "redrive":
            assert operation.take_back(10) == 2
        swallowed = [AlreadyHandled] if is_swallowed else []
        with suppress(*swallowed), context.complete() as session:
            write(session, event.n)

    lane = bench.consumer(handler, **AT_LEAST)
    run_until_idle(lane)
    bad.clear()
    letters = bench.rows("SELECT id FROM events.dead_letter ORDER BY id")
    redrive = Operation(bench.connection, "redrive", {}, consumer=None, by="me", reason="")
    operation = redrive if kind == "redrive" else operation
    assert redrive.move(letters) == 2
    look_now(lane)
    with heard(signals.EventFailed) as failures:
        drive(lane, lambda: calls[4:5] == [1])
        run_until_idle(lane)
    assert not failures
    assert effects(bench) == [2, 3]
    outcome = "discarded" if kind == "discard" else "dead"
    assert outcomes(bench) == {"handled": [2, 3], outcome: [1, 4]}


def test_an_event_that_is_discarded_while_its_last_attempt_fails_stays_discarded(
    bench: Workbench,
) -> None:
    bench.send(1)
    bench.publish()
    calls: list[int] = []
    redrive, discard = (
        Operation(bench.connection, kind, {}, consumer=None, by="me", reason="")
        for kind in ("redrive", "discard")
    )

    def handler(event: Placed) -> None:
        calls.append(event.n)
        if len(calls) == 2:
            assert discard.discard(bench.rows("SELECT id FROM events.dead_letter")) == 1
        raise FatalError("not today")

    lane = bench.consumer(handler, **AT_LEAST)
    run_until_idle(lane)
    assert redrive.move(bench.rows("SELECT id FROM events.dead_letter")) == 1
    look_now(lane)
    drive(lane, lambda: len(calls) == 2)
    assert (bench.rows(LETTERS), outcomes(bench)) == ([], {"discarded": [1]})


def test_a_parked_event_that_was_taken_away_is_not_called(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    world = World(1)
    lane = bench.consumer(world.call, retry=AT_ONCE, **AT_LEAST)
    with heard(signals.EventParked) as events:
        while not events:
            lane.step()
    world.calls.clear()
    parking, batches = lane._parking, lane._parked

    def is_due() -> bool:
        batches.extend(parking.due())
        return bool(batches)

    wait_until(is_due, what="it is due")
    bench.connection.execute("DELETE FROM events.parked_event")
    run_until_idle(lane)
    assert world.calls == []


def test_a_parked_event_that_comes_back_meanwhile_is_called(bench: Workbench) -> None:
    """An operator takes it out of the keys, and another brings it back during the batch."""
    bench.send(7)
    bench.publish()
    calls: list[int] = []

    def handler(event: Placed) -> None:
        calls.append(event.n)
        if calls == [1, 2, 3, 5, 6, 1, 4]:
            bench.connection.execute("INSERT INTO events.parked_event SELECT * FROM taken")
        if calls == [1]:
            raise ValueError("not today")

    lane = bench.consumer(handler, retry=AT_ONCE, **AT_LEAST)
    drive(lane, lambda: calls[-1:] == [1] and len(calls) > 1)
    batches = lane._parked

    def is_due() -> bool:
        batches.extend(lane._parking.due())
        return bool(batches)

    wait_until(is_due, what="those that waited are due")
    bench.connection.execute(
        "CREATE TABLE taken AS SELECT * FROM events.parked_event WHERE position = 7"
    )
    bench.connection.execute("DELETE FROM events.parked_event WHERE position = 7")
    drive(lane, lambda: "parked" not in outcomes(bench))
    assert calls == [1, 2, 3, 5, 6, 1, 4, 7]


def test_a_lane_that_completes_and_stops_early_keeps_its_lease(bench: Workbench) -> None:
    """Between two of its events lie others; the books are at the first of the two."""
    keys = [key for key in "abcdefgh" if lane_of(key, "", 2) == 0]
    other = next(key for key in "abcdefgh" if lane_of(key, "", 2) == 1)
    for n, key in enumerate((keys[0], other, other, keys[1]), start=1):
        bench.connection.execute(
            "SELECT events.send('orders', 'placed', jsonb_build_object('n', %s::int), key => %s)",
            (n, key),
        )
    bench.publish()

    def handler(event: Placed, context: Context) -> None:
        if event.n == 4 and context.attempt == 1:
            raise ValueError("not today")
        with context.complete() as session:
            write(session, event.n)

    lane = bench.consumer(handler, lanes=2, retry=AT_ONCE, **AT_LEAST)
    drive(lane, lambda: effects(bench) == [1, 4])


def test_a_handler_that_quits_inside_complete_leaves_nothing(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()

    def handler(event: Placed, context: Context) -> None:
        with context.complete() as session:
            write(session, event.n)
            if event.n == 1:
                raise SystemExit(1)

    run_until_idle(bench.consumer(handler, retry=Retry.none(), **AT_LEAST))
    assert effects(bench) == [2]
    assert outcomes(bench) == {"dead": [1], "handled": [2]}
