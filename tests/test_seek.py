"""Moving a consumer by hand: nothing is repeated or passed over that nobody asked for."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import Pipeline
from penstock.core.events import StreamEvent
from penstock.errors import LeaseLost, OperationRefused
from penstock.ops.seeking import Seeker
from penstock.stores.queries import Queries
from tests.bench_of_one import Workbench, run_until_idle
from tests.bookkeeper import BILL, Bookkeeper
from tests.test_cli import Penstock
from tests.waiting import wait_until

WAIT_SECONDS = 45.0


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    """The command line without an application: these commands need none."""
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def books(database_url: str) -> Iterator[Bookkeeper]:
    books = Bookkeeper(database_url)
    yield books
    books.connection.close()


@pytest.fixture
def bench(database_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, None)
    yield bench
    bench.close()


def test_a_seek_forward_counts_what_is_passed_over_and_wants_a_yes(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(20)
    books.consumer(checkpoints=(4, 9))
    before = books.lanes()
    # 5 … 14 are passed over; the lane that was ahead has settled 5, 7 and 9 of them.
    asked = penstock("consumers", "seek", BILL, "--to", "15", code=2).stderr
    assert "passes over 7 positions" in asked
    assert "--yes" in asked
    assert books.lanes() == before
    done = penstock("consumers", "seek", BILL, "--to", "15", "--yes", "--reason", "poison").stdout
    assert "handles 15 next" in done
    assert "7 positions were passed over" in done
    assert books.lanes() == [
        (f"consumer:{BILL}/4/0", 4, 0, 14),
        (f"consumer:{BILL}/4/1", 4, 1, 14),
    ]
    assert books.row("epoch lanes settled_to start_position") == (4, 2, 9, 1)
    assert books.seeks() == [(BILL, 4, 14, "poison")]
    assert set(books.settled()) == {1, 2, 3, 4, 5, 7, 9}


def test_a_seek_between_the_lanes_keeps_what_the_faster_one_settled(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(20)
    books.consumer(checkpoints=(4, 19))
    penstock("consumers", "seek", BILL, "--to", "11", "--yes")
    assert [checkpoint for *_, checkpoint in books.lanes()] == [10, 10]
    assert books.row("settled_to") == 19
    assert {11, 13, 15, 17, 19} <= set(books.settled())


def test_a_seek_backward_is_refused_unless_events_shall_be_handled_again(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8,))
    books.settle(5, "parked")
    books.settle(6, "dead")
    books.settle(7, "skipped")
    before = books.lanes()
    refused = penstock("consumers", "seek", BILL, "--to", "4", "--yes", code=1).stderr
    assert "--again" in refused
    assert "penstock replay" in refused
    assert (books.lanes(), books.seeks()) == (before, [])
    done = penstock("consumers", "seek", BILL, "--to", "4", "--again").stdout
    assert "3 settled events will be handled again" in done
    assert books.settled() == {
        1: "handled",
        2: "handled",
        3: "handled",
        5: "parked",
        6: "dead",
    }
    assert books.lanes() == [(f"consumer:{BILL}/4/0", 4, 0, 3)]
    # The dead one is settled, and the consumer will come by it.
    assert books.row("settled_to") == 6
    assert books.seeks() == [(BILL, 8, 3, "")]


def test_after_a_clean_look_back_nothing_is_settled_beyond_the_checkpoint(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8, 10))
    penstock("consumers", "seek", BILL, "--to", "4", "--again")
    assert books.row("settled_to") == 3


def test_other_consumers_stay_where_they_are(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8,))
    books.consumer("shop.bill_order.eu", checkpoints=(8,))
    before = (books.lanes("shop.bill_order.eu"), books.settled("shop.bill_order.eu"))
    penstock("consumers", "seek", BILL, "--to", "earliest", "--again")
    assert (books.lanes("shop.bill_order.eu"), books.settled("shop.bill_order.eu")) == before


def test_a_seek_before_the_start_makes_that_the_start(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8,))
    books.connection.execute("UPDATE events.consumer SET start_position = 7")
    penstock("consumers", "seek", BILL, "--to", "3", "--again")
    assert books.row("start_position") == 3


def test_earliest_latest_and_a_moment_are_places(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10, first=3)
    books.consumer(checkpoints=(8,))
    penstock("consumers", "seek", BILL, "--to", "earliest", "--again")
    assert books.lanes()[0][-1] == 2
    penstock("consumers", "seek", BILL, "--to", "latest", "--yes")
    assert books.lanes()[0][-1] == 10
    moment = books.connection.execute(
        "SELECT created_at FROM events.outbox_event WHERE position = 6"
    ).fetchone()
    assert moment is not None
    penstock("consumers", "seek", BILL, "--to", moment[0].isoformat(), "--again")
    assert books.lanes()[0][-1] == 5
    penstock("consumers", "seek", BILL, "--to", "2999-01-01T00:00:00Z", "--yes")
    assert books.lanes()[0][-1] == 10


@pytest.mark.parametrize(
    ("to", "code", "expected"),
    [
        ("12", 1, "--to latest means 11"),
        ("2", 1, "the first that can be handled again is 3"),
        ("0", 2, "begin at 1"),
        ("-4", 2, "neither a position"),
        ("tomorrow", 2, "neither a position"),
        ("2030-01-31T06:00:00", 2, "no time zone"),
        ("9" * 40, 1, "beyond"),
    ],
)
def test_a_place_that_is_not_there_is_refused(
    penstock: Penstock, books: Bookkeeper, to: str, code: int, expected: str
) -> None:
    books.stream(10, first=3)
    books.consumer(checkpoints=(8,))
    before = books.lanes()
    refused = penstock("consumers", "seek", BILL, "--to", to, "--again", "--yes", code=code)
    assert expected in refused.stderr
    assert (books.lanes(), books.seeks()) == (before, [])


def test_a_consumer_that_misses_pruned_events_can_be_moved_to_the_first_kept(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10, first=6)
    books.consumer(checkpoints=(2,))
    penstock("consumers", "seek", BILL, "--to", "earliest", "--yes")
    assert books.lanes()[0][-1] == 5


def test_a_seek_to_where_it_stands_changes_nothing(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8,))
    before = books.lanes()
    assert "stands there already" in penstock("consumers", "seek", BILL, "--to", "9").stdout
    assert (books.lanes(), books.seeks()) == (before, [])


def test_of_two_seeks_at_once_the_second_is_told(books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4,))
    seeker = Seeker(books.connection)
    plan, rival = seeker.plan(BILL, 7), seeker.plan(BILL, 9)
    seeker.seek(rival, again=False, by="me")
    with pytest.raises(OperationRefused, match="moved, or got other lanes, just now"):
        seeker.seek(plan, again=False, by="me")
    assert [new for _, _, new, _ in books.seeks()] == [8]


def test_a_consumer_that_overtook_the_target_is_not_taken_back(books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4,))
    plan = Seeker(books.connection).plan(BILL, 6)
    books.connection.execute("UPDATE events.stream_lease SET checkpoint = 9")
    with pytest.raises(OperationRefused, match="--again"):
        Seeker(books.connection).seek(plan, again=False, by="me")
    assert books.lanes()[0][-1] == 9


def test_a_seek_that_meets_a_renewal_crosswise_begins_anew(
    books: Bookkeeper, database_url: str
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4, 4))
    seeker = Seeker(books.connection)
    plan = seeker.plan(BILL, 9)
    pid = books.connection.info.backend_pid
    lock_lane = "SELECT 1 FROM events.stream_lease WHERE lane = %s FOR UPDATE"
    with psycopg.connect(database_url) as renewal, ThreadPoolExecutor() as pool:
        # So that it is the seek that gives way.
        renewal.execute("SET deadlock_timeout = '1min'")
        renewal.execute(lock_lane, (1,))
        seeking = pool.submit(seeker.seek, plan, again=False, by="me")
        wait_until(
            lambda: is_waiting(renewal, pid), seconds=WAIT_SECONDS, what="the seek waits for a lane"
        )
        renewal.execute(lock_lane, (0,))
        renewal.commit()
        seeking.result(timeout=WAIT_SECONDS)
    assert [checkpoint for *_, checkpoint in books.lanes()] == [8, 8]
    assert len(books.seeks()) == 1


def test_what_is_being_pruned_is_no_place_to_go_back_to(
    books: Bookkeeper, database_url: str
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(8,))
    seeker = Seeker(books.connection)
    plan = seeker.plan(BILL, 3)
    pid = books.connection.info.backend_pid
    with psycopg.connect(database_url) as janitor, ThreadPoolExecutor() as pool:
        janitor.execute(
            Queries("cleanup.sql")["try_hold_readers"].encode(), {"stream_name": "orders"}
        )
        janitor.execute("DELETE FROM events.outbox_event WHERE position <= 5")
        seeking = pool.submit(seeker.seek, plan, again=True, by="me")
        wait_until(lambda: is_waiting(janitor, pid), seconds=WAIT_SECONDS, what="the seek waits")
        janitor.commit()
        with pytest.raises(OperationRefused, match="the first that can be handled again is 6"):
            seeking.result(timeout=WAIT_SECONDS)
    assert (books.lanes()[0][-1], len(books.settled())) == (8, 8)


def test_a_batch_in_hand_cannot_commit_after_a_seek(bench: Workbench, database_url: str) -> None:
    bench.connection.execute("CREATE TABLE effect (position bigint)")
    bench.send(5)
    bench.publish()

    def handler(event: StreamEvent[Any], connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO effect VALUES (%s)", [event.position])
        if event.position == 2:
            with psycopg.connect(database_url, autocommit=True) as operator:
                seeker = Seeker(operator)
                seeker.seek(seeker.plan("test.consumer", 4), again=False, by="me")

    consumer = bench.consumer(handler)
    with pytest.raises(LeaseLost):
        run_until_idle(consumer)
    assert bench.rows("SELECT position FROM effect") == []
    assert bench.settled() == []


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_running_consumer_goes_where_it_is_sent_and_handles_each_event_once(
    penstock: Penstock, books: Bookkeeper, database_url: str, lanes: int
) -> None:
    books.connection.execute("CREATE TABLE effect (position bigint)")
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None, lease_seconds=300)

    @pipeline.consumer("orders", name="bill_order", lanes=lanes, batch_size=5)
    def bill_order(event: StreamEvent[Any], connection: psycopg.Connection[Any]) -> None:
        connection.execute("INSERT INTO effect VALUES (%s)", [event.position])

    with working(pipeline, "publisher", "consumer:bill_order"):
        send(books, 60)
        wait_for_effects(books, Counter(range(1, 61)))
        penstock("consumers", "seek", BILL, "--to", "21", "--again")
        handled = Counter(range(1, 61)) + Counter(range(21, 61))
        wait_for_effects(books, handled)
        penstock("consumers", "pause", BILL, "--wait", "20")
        send(books, 30)
        wait_until(
            lambda: Seeker(books.connection).plan(BILL, "latest").position == 91,
            seconds=WAIT_SECONDS,
            what="all events have their positions",
        )
        penstock("consumers", "seek", BILL, "--to", "81", "--yes")
        penstock("consumers", "resume", BILL)
        wait_for_effects(books, handled + Counter(range(81, 91)))
    assert books.row("lanes epoch") == (lanes, 3)
    assert [(old, new) for _, old, new, _ in books.seeks()] == [(60, 20), (60, 80)]


# ── the words used above ───────────────────────────────────────────────────────────────────────


def is_waiting(connection: psycopg.Connection[Any], pid: int) -> bool:
    row = connection.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", (pid,)).fetchone()
    return row is not None and bool(row[0])


@contextmanager
def working(pipeline: Pipeline, *roles: str) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=pipeline.run_worker, args=(roles, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)
        pipeline.engine.dispose()
    assert not thread.is_alive()


def send(books: Bookkeeper, count: int) -> None:
    books.connection.execute(
        "SELECT events.send('orders', 'placed', '{}', key => 'k' || n %% 7)"
        "  FROM generate_series(1, %s::int) AS n",
        (count,),
    )


def wait_for_effects(books: Bookkeeper, expected: Counter[int]) -> None:
    def effects() -> Counter[int]:
        rows = books.connection.execute("SELECT position FROM effect").fetchall()
        return Counter(position for (position,) in rows)

    wait_until(
        lambda: effects().total() >= expected.total(),
        seconds=WAIT_SECONDS,
        what=f"{expected.total()} events are handled",
    )
    assert effects() == expected
