"""Redriven letters are handled once, in order; a redrive stops, resumes and leaves true books."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.app import Pipeline
from penstock.cli.redriving import parse_rate
from penstock.core.wire import Entry
from penstock.errors import ServerUnavailable, UsageError
from penstock.ops import redriving as redriving_module
from penstock.ops.consumers import Consumers
from penstock.ops.redriving import (
    CHUNK_MAX,
    IN_FLIGHT_MAX,
    Pace,
    Plan,
    Redrive,
    Redriven,
    Tally,
    failures_in_a_row,
)
from penstock.stores.dead_letters import Criteria
from penstock.stores.identity import operator_id
from penstock.stores.operations import Operation, Standing
from tests.bookkeeper import BILL
from tests.graveyard import Graveyard, Worker, working
from tests.test_cli import SHOP, Penstock
from tests.waiting import SOON_SECONDS, wait_until

SHIP = "shop.ship_order"
REDRIVE = ("dlq", "redrive")


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    graveyard = Graveyard(database_url)
    graveyard.consumer()
    yield graveyard
    graveyard.connection.close()


def redrive(graveyard: Graveyard, stop_after: int = 10, **arguments: Any) -> Redriven:
    plan = Plan(criteria=Criteria(), by="me", stop_after=stop_after, **arguments)
    with psycopg.connect(graveyard.database_url, autocommit=True) as connection:
        return Redrive(connection, plan).run()


def moving(graveyard: Graveyard) -> Operation:
    return Operation(graveyard.connection, "redrive", {}, consumer=None, by="me", reason="")


def assert_books_balance(graveyard: Graveyard, expected: range, consumer: str = BILL) -> None:
    """Every position is handled or dead, never both, never neither."""
    handled, dead = graveyard.handled(consumer), graveyard.dead(consumer)
    parked = [p for p, (_, held, _) in graveyard.parked(consumer).items() if not held]
    assert parked == []
    assert sorted(handled + dead) == list(expected)
    outcomes = graveyard.settled(consumer)
    assert {p for p, outcome in outcomes.items() if outcome == "handled"} == set(handled)


# ── the way of a letter ────────────────────────────────────────────────────────────────────────


def test_all_letters_are_handled_and_who_did_it_is_kept(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.consumer(SHIP)
    graveyard.bury(range(1, 101))
    graveyard.bury(range(50, 61), consumer=SHIP)
    asked = penstock(*REDRIVE, "--all", code=2).stderr
    assert "111 dead letters of shop.bill_order, shop.ship_order" in asked
    assert graveyard.touched() == 0
    with working(database_url):
        done = penstock(*REDRIVE, "--all", "--reason", "mended", "--yes")
    assert "111 handled, 0 failed, 0 in flight" in done.stdout
    assert_books_balance(graveyard, range(1, 101))
    assert_books_balance(graveyard, range(50, 61), SHIP)
    assert graveyard.operations() == [("redrive", 111, 0, "done", operator_id(), "mended")]
    assert graveyard.touched() == 111
    assert "nothing to redrive" in penstock(*REDRIVE, "--all", "--yes").stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("1",), [1]),
        (("orders/2", "3"), [2, 3]),
        (("--position", "2..3"), [2, 3]),
        (("--group", "cafe"), [4]),
        (("--consumer", BILL, "--limit", "2"), [1, 2]),
        (("1", "99"), [1]),
    ],
)
def test_only_what_is_chosen_is_redriven(
    penstock: Penstock,
    graveyard: Graveyard,
    database_url: str,
    given: tuple[str, ...],
    expected: list[int],
) -> None:
    assert graveyard.bury([1, 2, 3]) == [1, 2, 3]
    graveyard.bury([4], fingerprint="cafe")
    with working(database_url):
        done = penstock(*REDRIVE, *given, "--yes", "--json")
    assert json.loads(done.stdout) == {
        "operation_id": 1,
        "ended_as": "done",
        "moved": len(expected),
        "handled": len(expected),
        "failed": 0,
        "discarded": 0,
        "skipped": 0,
        "in_flight": 0,
        "taken_back": 0,
        "left_alone": 0,
    }
    assert graveyard.handled() == expected
    if "99" in given:
        assert "no dead letter 99" in done.stderr


@pytest.mark.parametrize(
    ("given", "code", "expected"),
    [
        (("--yes",), 2, "Say which letters"),
        (("--all", "--yes", "--rate", "fast"), 2, "no rate"),
        (("99", "--yes"), 1, "no dead letter 99"),
        (("--all", "--dry-run"), 2, "--app"),
    ],
)
def test_a_redrive_that_says_too_little_is_refused(
    penstock: Penstock, graveyard: Graveyard, given: tuple[str, ...], code: int, expected: str
) -> None:
    graveyard.bury([1])
    assert expected in penstock(*REDRIVE, *given, code=code).stderr
    assert graveyard.operations() == []


def test_a_consumer_that_wants_at_most_one_attempt_gets_no_second_unless_forced(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.connection.execute("UPDATE events.consumer SET guarantee = 'at_most_once'")
    graveyard.bury([1])
    assert "at most once" in penstock(*REDRIVE, "1", "--yes", code=1).stderr
    assert graveyard.operations() == []
    with working(database_url):
        penstock(*REDRIVE, "1", "--yes", "--force")
    assert graveyard.handled() == [1]


def test_letters_of_a_consumer_that_nobody_serves_are_left_alone(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.bury([1], consumer="shop.gone")
    assert "not in the books" in penstock(*REDRIVE, "1", "--yes", code=1).stderr
    assert graveyard.dead("shop.gone") == [1]


def test_letters_on_their_way_or_in_other_hands_are_left_alone(
    graveyard: Graveyard, database_url: str
) -> None:
    ids = graveyard.bury([1, 2, 3])
    assert moving(graveyard).move([ids[0]]) == 1
    with psycopg.connect(database_url) as other:
        other.execute("SELECT 1 FROM events.dead_letter WHERE id = %s FOR UPDATE", (ids[1],))
        second = moving(graveyard)
        assert second.move(ids) == 1
        other.rollback()
    assert graveyard.parked() == {1: (True, False, 1), 3: (True, False, 2)}
    # Only once, whoever asks again.
    assert moving(graveyard).move(ids) == 1
    worker = Worker(database_url)
    while worker.step():
        pass
    worker.close()
    assert graveyard.handled() == [1, 2, 3]


def test_letters_that_are_buried_meanwhile_are_not_part_of_it(
    graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 31))
    has_more = threading.Event()

    def bury_more(position: int) -> bool:
        if not has_more.is_set():
            has_more.set()
            graveyard.bury([100])
        return position == 7

    with working(database_url, fails=bury_more):
        done = redrive(graveyard)
    assert done.tally == Tally(moved=30, in_flight=0, failed=1)
    assert graveyard.dead() == [7, 100]


# ── what others do meanwhile ───────────────────────────────────────────────────────────────────


def test_letters_that_somebody_discards_meanwhile_were_not_handled(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    ids = graveyard.bury(range(1, 31))

    def discard() -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            wait_until(lambda: len(graveyard.parked()) == 10, what="ten letters are in flight")
            other = Operation(connection, "discard", {}, consumer=BILL, by="other", reason="no")
            assert other.discard(ids) == 30

    thread = threading.Thread(target=discard)
    thread.start()
    done = penstock(*REDRIVE, "--consumer", BILL, "--yes", code=1)
    thread.join()
    assert "0 handled, 0 failed, 10 discarded by others, 0 in flight" in done.stdout
    assert set(graveyard.settled().values()) == {"discarded"}
    (kept,) = graveyard.connection.execute(
        "SELECT outcomes - 'at' FROM events.operation WHERE kind = 'redrive'"
    ).fetchall()
    assert kept == ({"handled": 0, "failed": 0, "discarded": 10, "skipped": 0, "in_flight": 0},)


def test_what_has_failed_stays_failed_whatever_others_do_with_it(
    graveyard: Graveyard, database_url: str
) -> None:
    ids = graveyard.bury([1, 2, 3, 4])
    ours, theirs = moving(graveyard), moving(graveyard)
    ours.move(ids)
    worker = Worker(database_url, fails=lambda _position: True)
    assert worker.step() == 4
    assert ours.look() == Standing(failed=4)
    assert theirs.discard(ids[:1]) == 1
    theirs.move(ids[1:3])
    assert ours.look() == Standing(failed=4)
    assert worker.step() == 2
    worker.close()
    assert ours.look() == Standing(failed=4)
    assert theirs.look() == Standing(failed=2)


def test_a_failure_is_seen_though_the_letter_is_gone_at_the_next_look(
    graveyard: Graveyard, database_url: str
) -> None:
    ids = graveyard.bury([1, 2])
    ours, theirs = moving(graveyard), moving(graveyard)
    ours.move(ids)
    worker = Worker(database_url, fails=lambda position: position == 1)
    assert worker.step() == 2
    worker.close()
    assert theirs.discard(ids[:1]) == 1
    assert ours.look() == Standing(failed=1)


def test_letters_that_go_with_their_consumer_were_not_handled(graveyard: Graveyard) -> None:
    graveyard.bury([1, 2])
    looks: list[Tally] = []

    def forget(tally: Tally) -> None:
        looks.append(tally)
        if tally.in_flight:
            Consumers(graveyard.connection).forget(BILL, with_dead_letters=True)

    done = Redrive(graveyard.connection, Plan(criteria=Criteria(), by="me"), on_look=forget).run()
    assert done.tally == Tally(moved=2, discarded=2)
    assert not done.is_clean


@pytest.mark.parametrize(
    ("ended_as", "standing"), [("done", Standing()), ("cancelled", Standing(discarded=2))]
)
def test_letters_of_a_replay_that_came_to_its_end_were_handled(
    graveyard: Graveyard, ended_as: str, standing: Standing
) -> None:
    """Its rows go with it, perhaps before the next look."""
    operation = moving(graveyard)
    operation.move(graveyard.bury([1, 2]))
    graveyard.connection.execute("DELETE FROM events.processed_event")
    graveyard.connection.execute("DELETE FROM events.parked_event")
    graveyard.connection.execute("DELETE FROM events.dead_letter")
    graveyard.connection.execute(
        "INSERT INTO events.operation (kind, criteria, requested_by, ended_at, ended_as)"
        " VALUES ('replay', jsonb_build_object('replay', %s::text), 'me', now(), %s)",
        [BILL, ended_as],
    )
    assert operation.look() == standing


def test_events_that_are_passed_by_were_not_handled(graveyard: Graveyard) -> None:
    operation = moving(graveyard)
    operation.move(graveyard.bury([1, 2]))
    # As a worker leaves an event whose key was shredded.
    graveyard.connection.execute("UPDATE events.processed_event SET outcome = 'skipped'")
    graveyard.connection.execute("DELETE FROM events.parked_event")
    graveyard.connection.execute("DELETE FROM events.dead_letter")
    assert operation.look() == Standing(skipped=2)
    assert Tally(moved=2, skipped=2).handled == 0


def test_a_failure_that_is_written_down_late_was_no_success(graveyard: Graveyard) -> None:
    """Where events are handled at most once, they count as handled before they are tried."""
    operation = moving(graveyard)
    operation.move(graveyard.bury([1]))
    letter = "UPDATE events.dead_letter SET operation_id = %s"
    graveyard.connection.execute("UPDATE events.processed_event SET outcome = 'handled'")
    graveyard.connection.execute("DELETE FROM events.parked_event")
    assert operation.look() == Standing()
    graveyard.connection.execute("UPDATE events.processed_event SET outcome = 'dead'")
    graveyard.connection.execute(letter, (operation.id,))
    assert operation.look() == Standing(failed=1)


# ── order ──────────────────────────────────────────────────────────────────────────────────────


def test_a_key_keeps_its_order_across_chunks(graveyard: Graveyard, database_url: str) -> None:
    graveyard.bury(range(1, 301), key=lambda position: f"k{position % 3}")
    graveyard.park(400, "k1", due=None)
    with working(database_url):
        redrive(graveyard, stop_after=5)
        wait_until(lambda: 400 in graveyard.handled(), what="the one behind them had its turn")
    handled = graveyard.handled()
    for n in range(3):
        own = [position for position in handled if position % 3 == n and position < 400]
        assert own == sorted(own)
    assert sorted(handled) == [*range(1, 301), 400]


def test_only_the_first_of_a_key_is_due(graveyard: Graveyard) -> None:
    ids = graveyard.bury([1, 4, 5, 6], key=lambda _: "k")
    graveyard.park(9, "k", due="1 hour")
    operation = moving(graveyard)
    operation.move(ids[1:3])
    assert due(graveyard) == {4: True, 5: False, 9: True}
    operation.move([ids[3]])
    assert due(graveyard)[6] is False
    operation.move([ids[0]])
    assert due(graveyard)[1] is True


def due(graveyard: Graveyard) -> dict[int, bool]:
    return {position: is_due for position, (is_due, _, _) in graveyard.parked().items()}


def test_nobody_relies_on_an_earlier_event_that_a_worker_has_in_hand(
    graveyard: Graveyard,
) -> None:
    (letter,) = graveyard.bury([5], key=lambda _: "k")
    graveyard.park(3, "k", due="0 s")
    with graveyard.in_hand(3):
        moving(graveyard).move([letter])
    assert due(graveyard) == {3: True, 5: True}


def test_where_no_order_is_kept_all_are_due(graveyard: Graveyard) -> None:
    graveyard.connection.execute("UPDATE events.consumer SET ordering = 'none'")
    moving(graveyard).move(graveyard.bury([1, 2, 3], key=lambda _: "k"))
    assert set(due(graveyard).values()) == {True}


def test_how_many_wait_stays_a_subtraction(graveyard: Graveyard) -> None:
    ids = graveyard.bury([1, 2, 3], key=lambda _: "k")
    graveyard.park(8, "k", due=None)
    graveyard.park(9, "k", due=None)
    moving(graveyard).move(ids)
    depths = graveyard.connection.execute(
        "SELECT position, depth FROM events.parked_event ORDER BY position"
    ).fetchall()
    assert [(p, d - depths[0][1]) for p, d in depths] == [(1, 0), (2, 1), (3, 2), (8, 3), (9, 4)]


# ── held ───────────────────────────────────────────────────────────────────────────────────────


def test_a_held_letter_gets_an_attempt_and_its_successors_follow(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury([5], held=True, key=lambda _: "k")
    graveyard.park(8, "k", due=None)
    graveyard.park(9, "k", due=None)
    with working(database_url):
        penstock(*REDRIVE, "orders/5", "--yes")
        wait_until(lambda: len(graveyard.handled()) == 3, what="the key has drained")
    assert graveyard.handled() == [5, 8, 9]
    assert graveyard.dead() == []


def test_a_held_letter_that_is_taken_back_is_held_again(graveyard: Graveyard) -> None:
    held = graveyard.bury([5], held=True, key=lambda _: "k")
    dead = graveyard.bury([6, 7], key=lambda _: "k")
    graveyard.park(9, "k", due=None)
    before = letters(graveyard)
    operation = moving(graveyard)
    assert operation.move(held + dead) == 3
    assert due(graveyard) == {5: True, 6: False, 7: False, 9: False}
    assert operation.take_back(CHUNK_MAX) == 3
    assert graveyard.parked()[5] == (False, True, None)
    assert set(graveyard.parked()) == {5, 9}
    assert letters(graveyard) == before
    assert graveyard.settled() == {5: "parked", 6: "dead", 7: "dead", 9: "parked"}
    assert graveyard.operations() == [("redrive", 0, 0, None, "me", "")]
    assert graveyard.touched() == 0


def letters(graveyard: Graveyard) -> list[tuple[Any, ...]]:
    return graveyard.connection.execute(
        "SELECT id, operation_id, redrives FROM events.dead_letter ORDER BY id"
    ).fetchall()


# ── stopping by itself ─────────────────────────────────────────────────────────────────────────


def test_a_handler_that_is_still_broken_meets_few_letters(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 201))
    with working(database_url, fails=lambda _position: True) as worker:
        done = penstock(*REDRIVE, "--all", "--stop-after", "7", "--yes", code=1)
    assert worker.tried == [1, 2, 3, 4, 5, 6, 7]
    assert "Stopped" in done.stderr
    assert "0 handled, 7 failed" in done.stdout
    assert graveyard.operations()[0][:4] == ("redrive", 7, 7, "stopped")
    assert_books_balance(graveyard, range(1, 201))


def test_a_handler_that_breaks_on_the_way_stops_it_and_the_rest_is_taken_back(
    graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 2001))
    # All behind 300 wait in one key, so that most are in flight and in nobody's hands.
    graveyard.connection.execute("UPDATE events.dead_letter SET key_hash = 7 WHERE position > 300")
    graveyard.connection.execute(
        "INSERT INTO events.parked_event (consumer, stream_name, position, event_uuid, key_hash,"
        " entry, next_attempt_at) VALUES (%s, 'orders', 5000, gen_random_uuid(), 7, '', NULL)",
        (BILL,),
    )
    with working(database_url, fails=lambda position: position > 300) as worker:
        done = redrive(graveyard)
        wait_until(
            lambda: set(graveyard.parked()) <= {5000} or 5000 not in graveyard.parked(),
            what="what workers had in hand is settled",
        )
    assert done.ended_as == "stopped"
    assert done.taken_back > 0
    assert done.tally.handled == 300
    assert done.tally.moved == 300 + done.tally.failed + done.tally.in_flight
    assert len(worker.tried) < 1000
    assert sorted(p for p in graveyard.handled() if p <= 300) == list(range(1, 301))
    # The event behind them has its turn when they are gone.
    assert graveyard.parked().get(5000, (True,))[0] is True
    assert set(graveyard.dead()) == set(range(301, 2001))


def test_failures_among_successes_do_not_stop_it(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 201))
    with working(database_url, fails=lambda position: position % 5 == 0):
        done = penstock(*REDRIVE, "--all", "--yes", code=1)
    assert "160 handled, 40 failed" in done.stdout
    assert "Stopped" not in done.stderr
    assert graveyard.operations()[0][:4] == ("redrive", 200, 40, "done")
    assert_books_balance(graveyard, range(1, 201))


def test_what_waits_behind_letters_that_are_taken_back_gets_its_turn(
    graveyard: Graveyard,
) -> None:
    ids = graveyard.bury([3, 5, 6], key=lambda _: "k")
    graveyard.park(9, "k", due=None)
    operation = moving(graveyard)
    operation.move(ids)
    # The worker has chosen who is next when it is done with 3; whoever that was may be gone.
    with graveyard.in_hand(3):
        assert operation.take_back(CHUNK_MAX) == 2
        assert due(graveyard) == {3: True, 9: True}
    assert operation.tally() == (1, 0)


# ── interrupting ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.long
def test_an_interrupted_redrive_goes_on_where_it_stopped_and_handles_nothing_twice(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 501), key=lambda position: f"k{position % 7}")
    command = (*REDRIVE, "--all", "--yes")
    with working(database_url):
        for number, until in ((signal.SIGINT, 20), (signal.SIGTERM, 100)):
            process = penstock.start(*command, "--rate", "100/s")
            try:
                wait_until(
                    lambda until=until: len(graveyard.handled()) > until,  # type: ignore[misc]
                    what=f"{until} letters are handled",
                )
                process.send_signal(number)
                process.send_signal(number)
                stdout, stderr = process.communicate(timeout=SOON_SECONDS)
            finally:
                process.kill()
            assert process.returncode == 130, stderr
            assert "the same command continues" in stderr
            assert "in flight" in stdout
        process = penstock.start(*command)
        stdout, stderr = process.communicate(timeout=SOON_SECONDS)
        assert process.returncode == 0, stderr
    assert_books_balance(graveyard, range(1, 501))
    assert [operation[3] for operation in graveyard.operations()] == [
        "interrupted",
        "interrupted",
        "done",
    ]
    assert sum(operation[1] for operation in graveyard.operations()) == 500
    assert graveyard.touched() == 500


def test_interrupted_before_a_worker_came_it_says_what_is_in_flight(
    graveyard: Graveyard, database_url: str
) -> None:
    graveyard.bury(range(1, 51))
    plan = Plan(criteria=Criteria(), by="me")
    looks: list[Tally] = []
    done = Redrive(graveyard.connection, plan, on_look=looks.append).run(lambda: len(looks) > 2)
    assert (done.ended_as, done.tally) == ("interrupted", Tally(moved=10, in_flight=10))
    again = Redrive(graveyard.connection, plan, on_look=looks.append).run(lambda: len(looks) > 5)
    assert again.tally == Tally(moved=10, in_flight=10)
    with working(database_url):
        assert redrive(graveyard).ended_as == "done"
        wait_until(lambda: len(graveyard.handled()) == 50, what="all are handled")
    assert_books_balance(graveyard, range(1, 51))


@pytest.mark.parametrize(
    ("is_running", "expected"),
    [(False, "shop.bill_order is waiting for a worker"), (True, "Workers are alive")],
)
def test_when_nobody_takes_anything_that_is_said_once(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch, is_running: bool, expected: str
) -> None:
    monkeypatch.setattr(redriving_module, "STALL_SECONDS", 0.05)
    monkeypatch.setattr(redriving_module, "LOOK_SECONDS", 0.02)
    graveyard.bury([1])
    if is_running:
        graveyard.hold()
    told: list[str] = []
    looks: list[Tally] = []
    plan = Plan(criteria=Criteria(), by="me")
    Redrive(graveyard.connection, plan, on_look=looks.append, on_stall=told.append).run(
        lambda: len(looks) > 20
    )
    assert len(told) == 1
    assert expected in told[0]


def test_who_would_handle_the_letters_of_a_replay_is_said(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redriving_module, "STALL_SECONDS", 0.05)
    graveyard.connection.execute(
        "UPDATE events.consumer SET replay_of = 'shop.bill', end_position = 9, operation_id = 1"
    )
    graveyard.bury([1])
    told: list[str] = []
    Redrive(graveyard.connection, Plan(criteria=Criteria(), by="me"), on_stall=told.append).run(
        lambda: bool(told)
    )
    assert f"until `penstock replay --resume {BILL}` runs" in told[0]


def test_a_lost_connection_is_explained(graveyard: Graveyard, database_url: str) -> None:
    graveyard.bury(range(1, 51))
    connection = psycopg.connect(database_url, autocommit=True)

    def cut(_tally: Tally) -> None:
        graveyard.connection.execute(
            "SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,)
        )

    with pytest.raises(ServerUnavailable, match="run the same command again"):
        Redrive(connection, Plan(criteria=Criteria(), by="me"), on_look=cut).run()
    with working(database_url):
        redrive(graveyard)
        wait_until(lambda: len(graveyard.handled()) == 50, what="all are handled")
    assert_books_balance(graveyard, range(1, 51))


# ── decisions ──────────────────────────────────────────────────────────────────────────────────


def test_the_window_opens_as_letters_are_handled_and_is_bounded() -> None:
    assert Tally().room(10) == 10
    assert Tally(moved=10, in_flight=10).room(10) == 0
    assert Tally(moved=10, failed=10).room(10) == 10
    assert Tally(moved=10, in_flight=0).room(10) == 20
    assert Tally(moved=10_000, in_flight=0).room(10) == CHUNK_MAX
    assert Tally(moved=50_000, in_flight=IN_FLIGHT_MAX - 5).room(10) == 5


def test_a_success_between_two_looks_forgives_the_failures() -> None:
    before = Tally(moved=10, in_flight=5, failed=5)
    assert failures_in_a_row(before, Tally(moved=10, in_flight=2, failed=8), 5) == 8
    assert failures_in_a_row(before, Tally(moved=10, in_flight=1, failed=8), 5) == 0
    assert failures_in_a_row(before, before, 5) == 5


def test_a_rate_is_kept_without_bursts_after_a_pause() -> None:
    pace = Pace(per_second=100)
    moved, now = 0, 0.0
    while now < 10:
        allowed = pace.allowance(now)
        pace.spend(allowed)
        moved += allowed
        now += 0.05
    assert 950 <= moved <= 1050
    assert pace.allowance(now + 3600) == 20
    assert Pace(per_second=0.5).allowance(0) == 1
    assert Pace(per_second=None).allowance(0) == CHUNK_MAX


def test_rates_are_understood() -> None:
    assert [parse_rate(text) for text in ("100", "100/s", "30/m", "2.5/s", None)] == [
        100,
        100,
        0.5,
        2.5,
        None,
    ]
    for text in ("0", "-1", "fast", "10/d"):
        with pytest.raises(UsageError, match="no rate"):
            parse_rate(text)


# ── dry run ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Rehearsed:
    outcome: str
    detail: str


@pytest.fixture
def rehearsed(penstock: Penstock, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every rehearsal that the application was asked for."""
    (penstock.folder / "shop.py").write_text(SHOP)
    asked: list[tuple[str, int]] = []

    def rehearse(_pipeline: Pipeline, consumer: str, entry: Entry) -> Rehearsed:
        asked.append((consumer, entry.position))
        if entry.position == 2:
            return Rehearsed("would fail", "KeyError: 7")
        return Rehearsed("would succeed", "")

    monkeypatch.setattr(Pipeline, "rehearse", rehearse)
    return asked


def test_a_dry_run_tells_what_would_happen_and_writes_nothing(
    penstock: Penstock, graveyard: Graveyard, rehearsed: list[tuple[str, int]]
) -> None:
    graveyard.bury([1, 2, 3])
    command = ("--app", "shop:pipeline", *REDRIVE, "--all", "--dry-run")
    shown = penstock(*command, code=1).stdout
    assert "would fail" in shown
    assert "KeyError: 7" in shown
    assert "2 would succeed, 1 would fail" in shown
    found = json.loads(penstock(*command, "--json", "--limit", "1").stdout)
    assert [(letter["position"], letter["outcome"]) for letter in found] == [(1, "would succeed")]
    assert rehearsed == [(BILL, 1), (BILL, 2), (BILL, 3), (BILL, 1)]
    assert graveyard.dead() == [1, 2, 3]
    assert graveyard.parked() == {}
    assert graveyard.operations() == []


def test_what_cannot_be_rolled_back_is_not_rehearsed(
    penstock: Penstock, graveyard: Graveyard, rehearsed: list[tuple[str, int]]
) -> None:
    graveyard.connection.execute("UPDATE events.consumer SET guarantee = 'at_least_once'")
    graveyard.bury([1])
    command = ("--app", "shop:pipeline", *REDRIVE, "--all", "--dry-run")
    assert "not an exactly-once consumer" in penstock(*command, code=1).stderr
    assert rehearsed == []


def test_an_event_that_cannot_be_read_would_fail(
    penstock: Penstock, graveyard: Graveyard, rehearsed: list[tuple[str, int]]
) -> None:
    graveyard.bury([1])
    graveyard.connection.execute("UPDATE events.dead_letter SET entry = 'x'")
    command = ("--app", "shop:pipeline", *REDRIVE, "--all", "--dry-run", "--json")
    (found,) = json.loads(penstock(*command, code=1).stdout)
    assert found["outcome"] == "would fail"
    assert rehearsed == []
