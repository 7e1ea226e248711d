"""Events that end their process: found after the crash, started alone, buried at three strikes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import psycopg
import pytest

from penstock.core.wire import body_of, decode_body
from penstock.errors import RetryableError
from penstock.pipeline.gate import Gate
from penstock.runtime.heartbeat import LoopPulse
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.failing import drive
from tests.publishing import told
from tests.waiting import SOON_SECONDS, wait_until

ROLE = "consumer:test.consumer"


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    with closing(Workbench(database_url, redis_url)) as bench:
        bench.connection.execute("CREATE TABLE effect (position bigint)")
        yield bench


def handle(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect VALUES (%s)", (event.n,))


def suspects(bench: Workbench) -> list[tuple[int, int]]:
    return bench.connection.execute(
        "SELECT position, jsonb_array_length(starts) FROM events.suspect ORDER BY position"
    ).fetchall()


def pretend_crashes(bench: Workbench, position: int, *workers: str) -> None:
    """As if these workers had died while they handled the event alone."""
    starts = [{"worker_id": worker, "host": "elsewhere"} for worker in workers]
    bench.connection.execute(
        "INSERT INTO events.suspect (consumer, position, event_uuid, worker_id, starts) "
        "SELECT 'test.consumer', position, event_uuid, %s, %s::jsonb "
        "  FROM events.outbox_event WHERE position = %s",
        (workers[-1], json.dumps(starts), position),
    )


def crash(bench: Workbench) -> None:
    """As if the last holder had not given its lease back."""
    bench.connection.execute(
        "UPDATE events.stream_lease SET clean = false WHERE role = %s", (ROLE,)
    )


def test_after_a_clean_end_events_are_handled_together(bench: Workbench) -> None:
    bench.send(5)
    bench.publish()
    with told(signals.BatchCommitted) as committed:
        run_until_idle(bench.consumer(handle))
    assert [signal.handled for signal in committed] == [5]


def test_after_a_crash_a_batch_is_handled_one_by_one_and_then_together_again(
    bench: Workbench,
) -> None:
    bench.send(9)
    bench.publish()
    consumer = bench.consumer(handle, batch_size=3)
    crash(bench)
    with told(signals.BatchCommitted) as committed:
        run_until_idle(consumer)
    assert [signal.handled for signal in committed] == [1, 1, 1, 3, 3]
    assert suspects(bench) == []


def test_after_a_crash_parked_events_are_started_on_record_and_then_together_again(
    bench: Workbench,
) -> None:
    on_record: dict[int, bool] = {}

    def fail(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        if event.n == 1:
            raise RetryableError("not today", after_seconds=0.001)
        handle(event, cursor)

    def look(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        on_record[event.n] = (event.n, 1) in suspects(bench)
        handle(event, cursor)

    bench.send(19)  # 1, 4, 7 … are of one key
    bench.publish()
    consumer = bench.consumer(fail)
    consumer.step()
    while bench.checkpoint() < 19:
        consumer.step()
    consumer.close()
    crash(bench)
    consumer = bench.consumer(look, batch_size=3)
    with told(signals.ParkedHandled) as handled:
        drive(consumer, lambda: len(on_record) == 7)
        run_until_idle(consumer)
    found = [(signal.first, signal.last) for signal in handled]
    assert found == [(1, 1), (4, 4), (7, 7), (10, 10), (13, 19)]
    assert on_record == {n: n <= 10 for n in range(1, 20, 3)}
    assert suspects(bench) == []


def test_what_came_after_a_crash_is_no_suspect(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    consumer = bench.consumer(handle)
    crash(bench)
    run_until_idle(consumer)
    bench.send(5)
    bench.publish()
    with told(signals.BatchCommitted) as committed:
        run_until_idle(consumer)
    assert [signal.handled for signal in committed] == [5]


def test_a_start_is_on_record_before_the_handler_runs(bench: Workbench) -> None:
    seen: list[list[tuple[int, int]]] = []

    def look(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        seen.append(suspects(bench))
        handle(event, cursor)

    bench.send(2)
    bench.publish()
    consumer = bench.consumer(look)
    crash(bench)
    run_until_idle(consumer)
    assert seen == [[(1, 1)], [(2, 1)]]


def test_an_event_with_three_strikes_is_buried_and_the_others_go_on(bench: Workbench) -> None:
    bench.send(4)
    bench.publish()
    consumer = bench.consumer(handle)
    crash(bench)
    pretend_crashes(bench, 2, "dead 1", "dead 2", "dead 3")
    with told(signals.EventBuried) as buried:
        run_until_idle(consumer)
    assert [signal.position for signal in buried] == [2]
    assert bench.rows("SELECT position FROM effect ORDER BY position") == [1, 3, 4]
    assert bench.settled() == [(1, "handled"), (2, "dead"), (3, "handled"), (4, "handled")]
    assert (bench.checkpoint(), suspects(bench)) == (4, [])
    ((letter,),) = bench.connection.execute(
        "SELECT to_jsonb(d) FROM events.dead_letter d"
    ).fetchall()
    assert letter["handler"].endswith("test_suspects.handle")
    assert [attempt["worker_id"] for attempt in letter["attempts"]] == [
        "dead 1",
        "dead 2",
        "dead 3",
    ]
    assert (letter["reason"], letter["error_type"]) == ("crash", "ProcessDied")


def test_two_strikes_are_not_enough(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    consumer = bench.consumer(handle)
    crash(bench)
    pretend_crashes(bench, 1, "dead 1", "dead 2")
    run_until_idle(consumer)
    assert bench.settled() == [(1, "handled"), (2, "handled")]


def test_a_worker_that_is_still_alive_is_no_strike(bench: Workbench) -> None:
    """It lost its connection in the middle of an attempt, three times, and came back."""
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(handle)
    crash(bench)
    alive = bench.keepers[-1].worker_id
    pretend_crashes(bench, 1, "dead 1", alive, alive, alive, "dead 2")
    run_until_idle(consumer)
    assert bench.settled() == [(1, "handled")]


def test_a_suspect_that_merely_fails_is_no_suspect_any_more(bench: Workbench) -> None:
    def fail(event: Placed) -> None:
        raise RetryableError("not today", after_seconds=0.001)

    bench.send(1)
    bench.publish()
    consumer = bench.consumer(fail)
    crash(bench)
    consumer.step()
    assert suspects(bench) == []


def test_an_unfinished_start_makes_a_suspect_also_after_a_clean_end(bench: Workbench) -> None:
    """Its holder died, and lanes were changed before anybody noticed."""
    bench.send(5)
    bench.publish()
    pretend_crashes(bench, 3, "one", "two", "three")
    run_until_idle(bench.consumer(handle))
    assert sorted(bench.rows("SELECT position FROM effect")) == [1, 2, 4, 5]
    assert bench.rows("SELECT position FROM events.dead_letter") == [3]
    assert suspects(bench) == []


def test_the_start_of_an_event_that_somebody_settled_is_forgotten(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    consumer = bench.consumer(handle)
    run_until_idle(consumer)
    consumer.close()
    pretend_crashes(bench, 2, "one")
    bench.send(1)
    bench.publish()
    run_until_idle(bench.consumer(handle))
    assert suspects(bench) == []
    assert len(bench.rows("SELECT position FROM effect")) == 4


def test_a_body_can_be_printed_again_byte_for_byte() -> None:
    body = (
        b"event\n018f\n3\n17\n018f0000-0000-7000-8000-000000000001\nplaced\n2\n\n1700000000000000\n"
        b'"k\\u00e4\\n"\n{"a": 1}\n{"text": "two\nlines"}'
    )
    assert body_of(decode_body("orders", 1, body)) == body


def test_whoever_wants_to_be_alone_waits_for_the_others_and_keeps_later_ones_out() -> None:
    gate, order = Gate(), list[str]()
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with gate.together(nullcontext()):
            is_inside.set()
            may_leave.wait(SOON_SECONDS)
            order.append("first")

    def enter_alone() -> None:
        with gate.alone(nullcontext()):
            order.append("alone")

    def come_later() -> None:
        with gate.together(nullcontext()):
            order.append("later")

    threads = [threading.Thread(target=run) for run in (stay, enter_alone, come_later)]
    threads[0].start()
    assert is_inside.wait(SOON_SECONDS)
    threads[1].start()
    wait_until(lambda: gate._alone == 1, what="somebody wants to be alone")
    threads[2].start()
    threads[2].join(timeout=0.1)
    assert order == []
    may_leave.set()
    for thread in threads:
        thread.join(SOON_SECONDS)
    assert order == ["first", "alone", "later"]


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_lane_that_waits_for_the_handler_of_another_does_not_look_hung(
    bench: Workbench, is_suspect: bool
) -> None:
    bench.send(1)
    bench.publish()
    lane, pulse = bench.consumer(handle), LoopPulse("lane")
    lane._in_handler = pulse.excused
    gate = lane._consuming.gate
    if is_suspect:
        crash(bench)
    with gate.together(nullcontext()) if is_suspect else gate.alone(nullcontext()):
        thread = threading.Thread(target=lane.step)
        thread.start()
        wait_until(lambda: pulse.is_well(hung_after_seconds=0.0), what="the lane is excused")
        assert bench.settled() == []
    thread.join(SOON_SECONDS)
    assert bench.settled() == [(1, "handled")]
    assert not pulse.is_well(hung_after_seconds=0.0)
