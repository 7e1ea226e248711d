"""What operators do to consumers: list, pause, rename, forget; and what they are told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from penstock.errors import OperationRefused
from penstock.ops import consumers as consumers_module
from penstock.ops.consumers import Consumers, find_name
from penstock.stores.identity import operator_id
from tests.bookkeeper import BILL, Bookkeeper
from tests.test_cli import Penstock


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    """The command line without an application: these commands need none."""
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def books(database_url: str) -> Iterator[Bookkeeper]:
    books = Bookkeeper(database_url)
    yield books
    books.connection.close()


# ── list ───────────────────────────────────────────────────────────────────────────────────────


def test_list_tells_states_lanes_workers_and_lag(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4, 7))
    books.hold()
    books.worker()
    books.worker(alive_seconds=-1)
    for name in ("shop.paused", "shop.sick", "shop.waiting"):
        books.consumer(name, checkpoints=(10,))
    books.quarantine("shop.sick")
    penstock("consumers", "pause", "paused", "--reason", "the printer burns")
    by_name = {c["name"]: c for c in json.loads(penstock("consumers", "list", "--json").stdout)}
    assert {name: c["state"] for name, c in by_name.items()} == {
        BILL: "running",
        "shop.paused": "paused",
        "shop.sick": "quarantined",
        "shop.waiting": "waiting for a worker",
    }
    bill = by_name[BILL]
    assert (bill["lanes"], bill["lanes_held"], bill["workers"]) == (2, 2, 1)
    assert (bill["stream_name"], bill["checkpoint"], bill["lag_events"]) == ("orders", 4, 6)
    # Position 5 is the next, and one event came a minute.
    assert 5 * 60_000 <= bill["lag_ms"] < 6 * 60_000
    for command in (("consumers", "list"), ("status",)):
        shown = penstock(*command).stdout
        assert "the printer burns" in shown
        assert "paused by" in shown
        assert "quarantined" in shown
    assert "2 of 2" in penstock("consumers", "list").stdout


def test_list_of_nothing_is_empty(penstock: Penstock) -> None:
    assert json.loads(penstock("consumers", "list", "--json").stdout) == []


# ── names ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("shop.bil_order", "did you mean shop.bill_order?"),
        ("bil_order", "did you mean shop.bill_order?"),
        ("ship_order", "several consumers: shop.ship_order, store.ship_order"),
        ("zzz", "there are: shop.bill_order, shop.ship_order, store.ship_order"),
    ],
)
def test_a_name_that_nobody_or_two_have_is_explained(
    penstock: Penstock, books: Bookkeeper, given: str, expected: str
) -> None:
    for name in (BILL, "shop.ship_order", "store.ship_order"):
        books.consumer(name)
    for command in (("pause",), ("resume",), ("seek", "--to", "1"), ("forget", "--yes")):
        assert expected in penstock("consumers", *command, given, code=1).stderr
    assert expected in penstock("consumers", "rename", given, "shop.other", code=1).stderr
    assert books.row("paused_at") is None


def test_a_short_name_may_hold_dots() -> None:
    assert find_name("bill.order", ["shop.bill.order", "shop.order"]) == "shop.bill.order"
    assert find_name("order", ["shop.bill.order", "shop.order"]) == "shop.order"


def test_without_consumers_that_is_said(penstock: Penstock) -> None:
    assert "has none yet" in penstock("consumers", "pause", "x", code=1).stderr


# ── pause and resume ───────────────────────────────────────────────────────────────────────────


def test_the_first_pause_stands_and_the_second_says_so(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.consumer()
    assert penstock("consumers", "pause", BILL, "--reason", "one").stdout == f"{BILL} is paused.\n"
    first = books.row("paused_at paused_by pause_reason")
    assert first[1:] == (operator_id(), "one")
    again = penstock("consumers", "pause", "bill_order", "--reason", "two").stdout
    assert again == f"{BILL} was paused already.\n"
    assert books.row("paused_at paused_by pause_reason") == first


def test_resume_clears_the_pause_and_may_be_repeated(penstock: Penstock, books: Bookkeeper) -> None:
    books.consumer()
    penstock("consumers", "pause", BILL, "--reason", "one")
    assert penstock("consumers", "resume", BILL).stdout == f"{BILL} goes on.\n"
    assert books.row("paused_at paused_by pause_reason") == (None, None, None)
    assert penstock("consumers", "resume", BILL).stdout == f"{BILL} was not paused.\n"


def test_one_unknown_name_pauses_nobody(penstock: Penstock, books: Bookkeeper) -> None:
    books.consumer()
    penstock("consumers", "pause", BILL, "absent", code=1)
    assert books.row("paused_at") is None


def test_pause_waits_until_no_lane_is_held(penstock: Penstock, books: Bookkeeper) -> None:
    books.consumer(checkpoints=(1, 2))
    books.hold()
    refused = penstock("consumers", "pause", BILL, "--wait", "0.3", code=1)
    assert "still hold 2 lanes" in refused.stderr
    assert books.row("paused_at") is not None
    letting_go = threading.Timer(0.3, books.release)
    letting_go.start()
    done = penstock("consumers", "pause", BILL, "--wait", "20")
    letting_go.join()
    assert "No lane is held any more." in done.stdout


def test_a_row_that_is_held_for_long_is_not_waited_for(
    books: Bookkeeper, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers_module, "LOCK_SECONDS", 0.2)
    books.consumer()
    with (
        books.connection.transaction(),
        psycopg.connect(database_url, autocommit=True) as connection,
    ):
        books.connection.execute("SELECT 1 FROM events.consumer FOR UPDATE")
        with pytest.raises(OperationRefused, match=r"for 0.2 s: .* Nothing was changed"):
            Consumers(connection).pause([BILL], by="somebody")
    assert books.row("paused_at") is None


# ── rename ─────────────────────────────────────────────────────────────────────────────────────


def test_rename_takes_everything_along(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4, 6))
    books.consumer("shop.bill_order.eu", checkpoints=(5,))
    books.leave_traces()
    before, other = books.mentions(BILL), books.mentions("shop.bill_order.eu")
    assert before.keys() >= {
        "consumer",
        "stream_lease",
        "processed_event",
        "parked_event",
        "dead_letter",
        "quarantine",
        "suspect",
        "seek",
        "effect",
        "operation",
        "operation_event",
        "worker",
    }
    done = penstock("consumers", "rename", "bill_order", "shop.invoice")
    assert "before workers start again" in done.stderr
    assert books.mentions(BILL) == {}
    assert books.mentions("shop.invoice") == before
    assert books.mentions("shop.bill_order.eu") == other
    assert [(role, at) for role, _, _, at in books.lanes("shop.invoice")] == [
        ("consumer:shop.invoice/3/0", 4),
        ("consumer:shop.invoice/3/1", 6),
    ]


def test_rename_also_knows_the_role_of_a_single_lane(penstock: Penstock, books: Bookkeeper) -> None:
    books.consumer()
    books.connection.execute(
        "UPDATE events.stream_lease SET role = 'consumer:shop.bill_order', epoch = 1"
    )
    penstock("consumers", "rename", BILL, "shop.invoice")
    assert [role for role, *_ in books.lanes("shop.invoice")] == ["consumer:shop.invoice"]


def test_rename_and_forget_are_refused_while_it_runs(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4, 6))
    before = books.mentions(BILL)
    commands = (("rename", BILL, "shop.invoice"), ("forget", BILL, "--yes"))
    books.hold()
    for command in commands:
        assert "2 of its lanes are held" in penstock("consumers", *command, code=1).stderr
    assert books.mentions(BILL) == before
    books.release()
    books.worker()
    before = books.mentions(BILL)
    for command in commands:
        assert "web02 (pid 8812)" in penstock("consumers", *command, code=1).stderr
    assert books.mentions(BILL) == before


@pytest.mark.parametrize(
    ("new", "code", "expected"),
    [
        ("shop.ship_order", 1, "shop.ship_order is taken"),
        (BILL, 1, "has that name already"),
        ("invoice", 2, "pipeline.consumer"),
        ("shop.", 2, "pipeline.consumer"),
        ("shop.no spaces", 2, "letters, digits"),
        ("shop." + "x" * 101, 2, "at most 100"),
        ("sh/op.invoice", 2, "letters, digits"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused(
    penstock: Penstock, books: Bookkeeper, new: str, code: int, expected: str
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4,))
    books.consumer("shop.ship_order")
    before = books.mentions(BILL)
    assert expected in penstock("consumers", "rename", BILL, new, code=code).stderr
    assert books.mentions(BILL) == before


@pytest.mark.parametrize(("outcome", "code"), [("parked", 1), ("dead", 1), ("handled", 0)])
def test_a_name_is_kept_while_a_call_to_the_outside_may_be_made_again(
    penstock: Penstock, books: Bookkeeper, outcome: str, code: int
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(4,))
    books.connection.execute(
        "WITH call AS (INSERT INTO events.effect (consumer, event_uuid, effect, host)"
        "              VALUES (%(name)s, gen_random_uuid(), 'charge', 'web02')"
        "              RETURNING event_uuid)"
        " INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
        " SELECT %(name)s, event_uuid, 2, %(outcome)s FROM call",
        {"name": BILL, "outcome": outcome},
    )
    before = books.mentions(BILL)
    said = penstock("consumers", "rename", BILL, "shop.invoice", code=code).stderr
    assert ("1 of its calls to the outside began and never returned" in said) == bool(code)
    assert (books.mentions(BILL) == before) == bool(code)


# ── forget ─────────────────────────────────────────────────────────────────────────────────────


def test_forget_leaves_nothing_of_it_and_everything_of_others(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    for name in (BILL, "shop.bill_order.eu"):
        books.consumer(name, checkpoints=(4, 6))
        books.leave_traces(name)
    other = books.mentions("shop.bill_order.eu")
    refused = penstock("consumers", "forget", BILL, "--yes", code=1).stderr
    assert "1 parked events and 1 dead letters" in refused
    asked = penstock("consumers", "forget", BILL, "--with-dead-letters", code=2).stderr
    assert "5 settled rows" in asked
    assert "--yes" in asked
    assert books.settled()
    penstock("consumers", "forget", BILL, "--with-dead-letters", "--yes")
    assert books.mentions(BILL) == {}
    assert books.mentions("shop.bill_order.eu") == other


def test_whoever_is_interrupted_leaves_a_consumer_that_repeats_nothing_and_can_be_forgotten(
    books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers_module, "FORGET_BATCH", 10)
    books.stream(100)
    books.consumer(checkpoints=(60, 90))
    books.settle(7, "dead")
    lanes, settled = books.lanes(), books.settled()
    ahead = {position for position in settled if position > 60}
    assert ahead
    consumers = Consumers(books.connection)

    def interrupt(deleted: int) -> None:
        if deleted >= 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consumers.forget(BILL, on_progress=interrupt)
    assert books.lanes() == lanes
    assert len(books.settled()) == len(settled) - 30
    # Below the floor the checkpoint is the deduplication; ahead of it only these rows are.
    assert ahead | {7} <= books.settled().keys()
    steps: list[int] = []
    consumers.forget(BILL, on_progress=steps.append)
    assert steps == [10, 20, 29]
    assert books.mentions(BILL) == {}


def test_a_consumer_that_starts_during_the_deletion_is_not_forgotten(
    books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers_module, "FORGET_BATCH", 10)
    books.stream(30)
    books.consumer(checkpoints=(20, 25))
    lanes = books.lanes()
    with pytest.raises(OperationRefused, match="while it runs"):
        Consumers(books.connection).forget(BILL, on_progress=lambda _deleted: books.hold())
    assert books.lanes() == lanes
    assert {21, 23, 25} <= books.settled().keys()
