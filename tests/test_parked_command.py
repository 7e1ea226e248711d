"""Parked keys are listed and shown, and released: tried now instead of later."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.stores.identity import operator_id
from tests.bookkeeper import BILL
from tests.graveyard import Graveyard, Worker
from tests.test_cli import Penstock

SHIP = "shop.ship_order"


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    """Two keys that wait, one that is held, and a key of another consumer."""
    graveyard = Graveyard(database_url)
    graveyard.consumer()
    graveyard.consumer(SHIP)
    graveyard.park(3, "a", due="1 hour")
    graveyard.park(5, "a", due=None)
    graveyard.park(6, "a", due=None)
    graveyard.park(4, "b", due="2 hours")
    graveyard.bury([7], held=True, key=lambda _: "c")
    graveyard.park(8, "c", due=None)
    graveyard.park(3, "a", consumer=SHIP, due="-1 s")
    yield graveyard
    graveyard.connection.close()


def is_due_now(graveyard: Graveyard, consumer: str = BILL) -> set[int]:
    rows = graveyard.connection.execute(
        "SELECT position FROM events.parked_event"
        " WHERE consumer = %s AND next_attempt_at <= clock_timestamp()",
        (consumer,),
    )
    return {position for (position,) in rows}


# ── list and show ──────────────────────────────────────────────────────────────────────────────


def test_one_line_tells_of_each_key(penstock: Penstock, graveyard: Graveyard) -> None:
    found = json.loads(penstock("parked", "list", "--json").stdout)
    assert found["total"] == 4
    told = [
        (k["consumer"], k["position"], k["key"], k["waiting"], k["attempts"], k["held"])
        for k in found["keys"]
    ]
    assert told == [
        (BILL, 3, "a", 2, 2, False),
        (BILL, 4, "b", 0, 2, False),
        (BILL, 7, "c", 1, 3, True),
        (SHIP, 3, "a", 0, 2, False),
    ]
    in_seconds = found["keys"][0]["next_attempt_in_seconds"]
    assert 3500 < in_seconds <= 3600
    assert found["keys"][2]["next_attempt_in_seconds"] is None
    shown = penstock("parked", "list", "--consumer", "bill_order", "--limit", "2")
    assert "KeyError: 7" in shown.stdout
    assert re.search(r"in 3,(5\d\d|600)\.\d s", shown.stdout)
    assert SHIP not in shown.stdout
    assert "1 more keys" in shown.stderr
    assert "held" in penstock("parked", "list").stdout


def test_a_time_that_is_early_makes_no_second_key(penstock: Penstock, graveyard: Graveyard) -> None:
    graveyard.connection.execute("UPDATE events.parked_event SET next_attempt_at = now()")
    assert json.loads(penstock("parked", "list", "--json").stdout)["total"] == 4


def test_show_tells_the_history_and_who_waits_for_whom(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    first = show(penstock, "3", "--consumer", BILL)
    assert [attempt["error"] for attempt in first["history"]] == ["KeyError: 7", "KeyError: 8"]
    assert (first["behind"], first["waiting"], first["payload"]) == (None, 2, {})
    assert show(penstock, "5")["behind"] == 3
    held = show(penstock, "7")
    assert (held["held"], held["letter_id"], held["payload"]) == (True, 1, {"cents": 990})
    shown = penstock("parked", "show", "3", "--consumer", "bill_order").stdout
    assert "web03" in shown
    assert "KeyError: 8" in shown
    assert "Several consumers" in penstock("parked", "show", "3", code=1).stderr
    assert "Nothing is parked" in penstock("parked", "show", "99", code=1).stderr


def show(penstock: Penstock, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(penstock("parked", "show", *arguments, "--json").stdout)
    return found


def test_status_counts_what_is_parked_and_dead(penstock: Penstock, graveyard: Graveyard) -> None:
    graveyard.bury([20, 21])
    consumers = json.loads(penstock("status", "--json").stdout)["consumers"]
    told = {
        c["name"]: (c["parked_keys"], c["held_keys"], c["parked_events"], c["dead_letters"])
        for c in consumers
    }
    assert told == {BILL: (3, 1, 6, 3), SHIP: (1, 0, 1, 0)}
    assert "6 in 3 keys, 1 held" in penstock("status").stdout


# ── release ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("what", [("3",), ("--key", "a")])
def test_a_waiting_event_is_due_now(
    penstock: Penstock, graveyard: Graveyard, what: tuple[str, ...]
) -> None:
    done = penstock("parked", "release", *what, "--consumer", BILL, "--reason", "up again")
    assert "1 waiting events are due now" in done.stdout
    assert is_due_now(graveyard) == {3}
    # It is an attempt like any other, not a redrive.
    assert graveyard.parked()[3] == (True, False, None)
    assert graveyard.operations() == [("release", 1, 0, "done", operator_id(), "up again")]
    assert graveyard.touched() == 1


def test_a_held_event_gets_one_more_attempt_and_its_key_goes_on(
    penstock: Penstock, graveyard: Graveyard, database_url: str
) -> None:
    arguments = ("parked", "release", "7", "--consumer", "bill_order", "--by", "ann", "--json")
    done = json.loads(penstock(*arguments).stdout)
    assert done == {"operation_id": 1, "waiting": 0, "held": 1, "in_hand": 0}
    assert graveyard.parked()[7] == (True, False, 1)
    assert graveyard.operations()[0][:5] == ("release", 1, 0, "done", "ann")
    worker = Worker(database_url)
    while worker.step():
        pass
    worker.close()
    assert graveyard.handled() == [7, 8]
    assert graveyard.dead() == []


def test_all_keys_of_a_consumer_are_released_and_no_other(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    command = ("parked", "release", "--all", "--consumer", BILL)
    assert "All 3 parked keys" in penstock(*command, code=2).stderr
    assert is_due_now(graveyard) == set()
    with graveyard.in_hand(4):
        done = penstock(*command, "--yes").stdout
    assert "1 waiting events are due now, 1 held ones get" in done
    assert "1 are being tried already" in done
    assert is_due_now(graveyard) == {3, 7}


def test_more_keys_than_a_chunk_are_all_released(
    penstock: Penstock, graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.parked.RELEASE_CHUNK", 2)
    for position in range(100, 107):
        graveyard.park(position, f"k{position}", due="1 hour")
    penstock("parked", "release", "--all", "--consumer", BILL, "--yes")
    assert is_due_now(graveyard) == {3, 4, 7, *range(100, 107)}
    assert graveyard.operations()[0][1] == 10


@pytest.mark.parametrize(
    ("given", "code", "expected"),
    [
        (("--consumer", BILL), 2, "Name one POSITION"),
        (("3", "--all", "--consumer", BILL), 2, "Name one POSITION"),
        (("5", "--consumer", BILL), 1, "waits behind 3"),
        (("99", "--consumer", BILL), 1, "Nothing is parked"),
        (("--key", "zzz", "--consumer", BILL), 1, "parked nothing of key"),
        (("3", "--consumer", "absent"), 1, "There is no consumer"),
    ],
)
def test_what_cannot_be_released_is_explained(
    penstock: Penstock, graveyard: Graveyard, given: tuple[str, ...], code: int, expected: str
) -> None:
    assert expected in penstock("parked", "release", *given, code=code).stderr
    assert is_due_now(graveyard) == set()
    assert graveyard.operations() == []


def test_where_no_order_is_kept_every_event_is_released(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.connection.execute("UPDATE events.consumer SET ordering = 'none'")
    penstock("parked", "release", "--all", "--consumer", BILL, "--yes")
    assert is_due_now(graveyard) == {3, 4, 5, 6, 7, 8}
