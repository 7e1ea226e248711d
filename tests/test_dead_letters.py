"""Dead letters are listed, grouped, shown and discarded; what waited behind them goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OperationRefused, UsageError
from penstock.ops import dead_letters as dead_letters_module
from penstock.ops.dead_letters import (
    Request,
    Walk,
    choose,
    discard,
    parse_moment,
    parse_positions,
    parse_reference,
)
from penstock.stores.dead_letters import Criteria, DeadLetters
from penstock.stores.identity import operator_id
from penstock.stores.operations import Operation
from penstock.stores.queries import Queries
from tests.bookkeeper import BILL
from tests.graveyard import Graveyard
from tests.test_cli import Penstock
from tests.waiting import SOON_SECONDS, wait_until

SHIP = "shop.ship_order"
LETTERS = 50_000


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    graveyard = Graveyard(database_url)
    graveyard.consumer()
    yield graveyard
    graveyard.connection.close()


# ── list ───────────────────────────────────────────────────────────────────────────────────────


def positions(penstock: Penstock, *arguments: str) -> list[int]:
    listed = json.loads(penstock("dlq", "list", "--json", *arguments).stdout)
    return [letter["position"] for letter in listed["dead_letters"]]


def test_the_newest_letters_come_last_and_the_rest_is_counted(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.bury(range(1, 8))
    assert positions(penstock) == [1, 2, 3, 4, 5, 6, 7]
    listed = json.loads(penstock("dead-letters", "list", "--json", "--limit", "2").stdout)
    assert listed["total"] == 7
    assert [letter["position"] for letter in listed["dead_letters"]] == [6, 7]
    shown = penstock("dlq", "list", "--limit", "2")
    assert "5 older letters are not shown" in shown.stderr
    assert "orders/7" in shown.stdout
    assert "KeyError: no order 7" in shown.stdout
    assert "not shown" not in penstock("dlq", "list").stderr


def test_every_criterion_chooses(penstock: Penstock, graveyard: Graveyard) -> None:
    graveyard.consumer(SHIP, stream="parcels")
    graveyard.bury([1], age="3 hours")
    graveyard.bury([2], error_type="shop.errors.CardDeclined", fingerprint="cafe")
    graveyard.bury([3], reason="fatal", key=lambda _: "customer 7")
    graveyard.bury([4], consumer=SHIP)
    graveyard.bury([5], held=True)
    graveyard.connection.execute(
        "UPDATE events.dead_letter SET stream_name = 'parcels', event_type = 'sent'"
        " WHERE position = 4"
    )
    (moved,) = graveyard.bury([6])
    redriven(graveyard, moved)
    expected = {
        ("--consumer", "ship_order"): [4],
        ("--stream", "parcels"): [4],
        ("--type", "sent"): [4],
        ("--error", "carddeclined"): [2],
        ("--group", "cafe"): [2],
        ("--reason", "fatal"): [3],
        ("--key", "customer 7"): [3],
        ("--since", "2h"): [2, 3, 4, 5, 6],
        ("--until", "120m"): [1],
        ("--position", "2..3"): [2, 3],
        ("--position", "4"): [4],
        ("--position", "5.."): [5, 6],
        ("--state", "held"): [5],
        ("--state", "redriving"): [6],
        ("--state", "dead"): [1, 2, 3, 4],
        ("--consumer", BILL, "--position", "1..4"): [1, 2, 3],
    }
    assert {given: sorted(positions(penstock, *given)) for given in expected} == expected


def redriven(graveyard: Graveyard, *ids: int) -> Operation:
    operation = Operation(
        graveyard.connection, "redrive", {}, consumer=None, by="me", reason="mended"
    )
    assert operation.move(ids) == len(ids)
    return operation


def test_groups_tell_how_many_died_of_the_same_and_since_when(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    ids = graveyard.bury(range(1, 16), age="2 days")
    graveyard.bury([20], held=True)
    graveyard.bury([21, 22], error_type="builtins.ValueError", fingerprint="beef", age="3 days")
    found = json.loads(penstock("dlq", "list", "--groups", "--json").stdout)
    beef, f00d = found["groups"]
    assert found["total"] == 2
    assert (beef["consumer"], beef["error_type"], beef["count"]) == (BILL, "builtins.ValueError", 2)
    assert beef["example"] == "no order 22"
    assert (f00d["fingerprint"], f00d["count"], f00d["held"]) == ("f00d", 16, 1)
    assert f00d["ids"][1:] == sorted(ids, reverse=True)[:9]
    assert f00d["first_buried_at"] < f00d["last_buried_at"]
    shown = penstock("dlq", "list", "--groups", "--limit", "1")
    assert "f00d" in shown.stdout
    assert "beef" not in shown.stdout
    assert "1 older groups" in shown.stderr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--since", "2030-01-31T06:00:00"), "has no time zone"),
        (("--until", "soon"), "neither a span"),
        (("--since", "99999999999999d"), "before all time"),
        (("--position", "a..b"), "neither a position"),
        (("--state", "buried"), "dead, held, redriving"),
    ],
)
def test_what_cannot_be_understood_is_explained(
    penstock: Penstock, given: tuple[str, ...], expected: str
) -> None:
    assert expected in penstock("dlq", "list", *given, code=2).stderr


def test_words_of_the_command_line_are_understood() -> None:
    now = datetime(2030, 1, 31, 6, tzinfo=UTC)
    assert parse_moment("--since", "90m", now) == datetime(2030, 1, 31, 4, 30, tzinfo=UTC)
    assert parse_moment("--since", "2030-01-01T00:00:00+00:00", now) == datetime(
        2030, 1, 1, tzinfo=UTC
    )
    assert parse_positions("7..9") == (7, 9)
    assert parse_reference("orders/eu/17") == ("orders/eu", 17)
    with pytest.raises(UsageError, match="names no dead letter"):
        parse_reference("seventeen")


# ── show ───────────────────────────────────────────────────────────────────────────────────────


def test_show_tells_everything_by_number_event_or_place(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    (letter_id,) = graveyard.bury([7])
    redriven(graveyard, letter_id)
    found = json.loads(penstock("dlq", "show", str(letter_id), "--json").stdout)
    assert found["payload"] == {"cents": 990}
    assert found["metadata"] == {"source": "web"}
    assert found["key"] == "k7"
    assert "shop.py" in found["traceback"]
    assert [(attempt["host"], attempt["error"]) for attempt in found["attempts"]] == [
        ("web02", "KeyError: 7"),
        ("web03", "KeyError: 8"),
    ]
    assert (found["state"], found["redrives"], found["handler"]) == (
        "redriving",
        0,
        "shop.bill_order",
    )
    (operation,) = found["operations"]
    assert (operation["kind"], operation["requested_by"], operation["reason"]) == (
        "redrive",
        "me",
        "mended",
    )
    for reference in (found["event_uuid"], "orders/7"):
        shown = penstock("dlq", "show", reference).stdout
        for part in ("KeyError: 8", "web03", "shop.py", '"cents": 990', "mended", "redriving"):
            assert part in shown


def test_show_wants_one_letter(penstock: Penstock, graveyard: Graveyard) -> None:
    graveyard.consumer(SHIP)
    graveyard.bury([7])
    graveyard.bury([7], consumer=SHIP)
    assert "several consumers" in penstock("dlq", "show", "orders/7", code=1).stderr
    one = penstock("dlq", "show", "orders/7", "--consumer", "ship_order", "--json").stdout
    assert json.loads(one)["consumer"] == SHIP
    assert "There is no dead letter 999" in penstock("dlq", "show", "999", code=1).stderr


def test_an_encrypted_event_is_not_shown(penstock: Penstock, graveyard: Graveyard) -> None:
    (letter_id,) = graveyard.bury([7], key_id="orders-v3")
    for arguments in ((), ("--json",)):
        shown = penstock("dlq", "show", str(letter_id), *arguments).stdout
        assert "encrypted with key orders-v3" in shown
        assert "990" not in shown
        assert 'web"' not in shown


def test_what_an_event_says_does_not_steer_the_terminal(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    (letter_id,) = graveyard.bury([7], error_type="\x1b[2Jgone", traceback="\x1b]0;title\x07")
    shown = penstock("dlq", "show", str(letter_id)).stdout + penstock("dlq", "list").stdout
    assert "gone" in shown
    assert "\x1b" not in shown


def test_a_letter_whose_event_cannot_be_read_is_shown_all_the_same(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.leave_traces()
    assert "cannot be shown" in penstock("dlq", "show", "orders/3").stdout


# ── discard ────────────────────────────────────────────────────────────────────────────────────


def test_discarded_letters_are_gone_and_the_books_say_who_did_it(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    ids = graveyard.bury(range(1, 6))
    why = ("--reason", "test data")
    assert "--yes" in penstock("dlq", "discard", str(ids[0]), *why, code=2).stderr
    assert graveyard.dead() == [1, 2, 3, 4, 5]
    done = penstock("dlq", "discard", str(ids[0]), "orders/3", *why, "--yes").stdout
    assert "2 dead letters are discarded" in done
    assert graveyard.dead() == [2, 4, 5]
    assert graveyard.settled() == {1: "discarded", 2: "dead", 3: "discarded", 4: "dead", 5: "dead"}
    rest = penstock("dlq", "discard", "--all", *why, "--by", "ann", "--yes", "--json").stdout
    assert json.loads(rest)["discarded"] == 3
    assert graveyard.operations() == [
        ("discard", 2, 0, "done", operator_id(), "test data"),
        ("discard", 3, 0, "done", "ann", "test data"),
    ]
    assert graveyard.touched() == 5
    assert "nothing to discard" in penstock("dlq", "discard", "--all", *why, "--yes").stderr


@pytest.mark.parametrize(
    ("given", "code", "expected"),
    [
        (("--reason", "x", "--yes"), 2, "Say which letters"),
        (("--all", "--yes"), 2, "needs --reason"),
        (("--all", "--reason", " ", "--yes"), 2, "needs --reason"),
        (("99", "--reason", "x", "--yes"), 1, "no dead letter 99"),
    ],
)
def test_a_discard_that_is_not_meant_so_is_refused(
    penstock: Penstock, graveyard: Graveyard, given: tuple[str, ...], code: int, expected: str
) -> None:
    graveyard.bury([1])
    assert expected in penstock("dlq", "discard", *given, code=code).stderr
    assert graveyard.dead() == [1]
    assert graveyard.operations() == []


def test_what_waited_behind_a_held_letter_goes_on_when_it_is_discarded(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.bury([5], held=True, key=lambda _: "k")
    graveyard.park(8, "k", due=None)
    graveyard.park(9, "k", due=None)
    graveyard.park(11, "other", due="1 hour")
    penstock("dlq", "discard", "orders/5", "--reason", "x", "--yes")
    assert graveyard.parked() == {
        8: (True, False, None),
        9: (False, False, None),
        11: (True, False, None),
    }
    assert graveyard.settled()[5] == "discarded"


def test_an_event_in_a_workers_hands_is_not_discarded(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters_module, "LOCK_SECONDS", 0.2)
    monkeypatch.setattr(dead_letters_module, "DISCARD_CHUNK", 2)
    ids = graveyard.bury([1, 2, 3, 4, 5])
    redriven(graveyard, ids[3])
    before = graveyard.parked()
    with (
        graveyard.in_hand(4),
        pytest.raises(OperationRefused, match=r"position 4 in hand.* 2 letters"),
    ):
        discard(graveyard.connection, Criteria(), by="me", reason="x")
    assert graveyard.dead() == [3, 4, 5]
    assert graveyard.parked() == before
    assert graveyard.operations()[1] == ("discard", 2, 0, "stopped", "me", "x")
    # On its way, but in nobody's hands: it can be given up.
    assert discard(graveyard.connection, Criteria(), by="me", reason="x").discarded == 3
    assert graveyard.parked() == {}
    assert set(graveyard.settled().values()) == {"discarded"}


def test_a_letter_that_another_operator_works_on_is_not_discarded(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch, database_url: str
) -> None:
    import psycopg

    monkeypatch.setattr(dead_letters_module, "LOCK_SECONDS", 0.2)
    graveyard.bury([1])
    with psycopg.connect(database_url) as other:
        other.execute("SELECT 1 FROM events.dead_letter FOR UPDATE")
        with pytest.raises(OperationRefused, match="in hand"):
            discard(graveyard.connection, Criteria(), by="me", reason="x")
        other.rollback()
    assert graveyard.dead() == [1]


def test_an_interrupted_discard_says_so_and_can_go_on(graveyard: Graveyard) -> None:
    graveyard.bury([1, 2])
    done = discard(
        graveyard.connection, Criteria(), by="me", reason="x", is_interrupted=lambda: True
    )
    assert (done.ended_as, done.discarded) == ("interrupted", 0)
    assert graveyard.dead() == [1, 2]


@pytest.mark.slow
def test_ctrl_c_ends_a_discard_between_two_chunks(penstock: Penstock, graveyard: Graveyard) -> None:
    graveyard.bury(range(1, 20_001))
    process = penstock.start("dlq", "discard", "--all", "--reason", "x", "--yes")
    wait_until(lambda: graveyard.touched() > 0, what="the first chunk is discarded")
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=SOON_SECONDS)
    assert process.returncode in (0, 130), stderr
    left = len(graveyard.dead())
    assert graveyard.touched() == 20_000 - left
    assert (process.returncode == 0) == (left == 0)


# ── many ───────────────────────────────────────────────────────────────────────────────────────


def test_a_walk_meets_every_letter_once_page_by_page(
    graveyard: Graveyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters_module, "PAGE_LETTERS", 7)
    graveyard.consumer(SHIP)
    graveyard.bury(range(20, 0, -1))
    graveyard.bury(range(1, 11), consumer=SHIP)
    walk = Walk(DeadLetters(graveyard.connection), Criteria())
    graveyard.bury([999])
    ids: list[int] = []
    while taken := walk.take(4):
        ids += taken
    assert walk.is_over
    assert len(set(ids)) == len(ids) == 30
    order = {letter.letter.id: letter.letter.position for letter in _read(graveyard, ids)}
    assert [order[letter_id] for letter_id in ids] == sorted(order.values())
    limited = Walk(DeadLetters(graveyard.connection), Criteria(), limit=10)
    assert sum(len(limited.take(3)) for _ in range(10)) == 10


def _read(graveyard: Graveyard, ids: list[int]) -> Any:
    return DeadLetters(graveyard.connection).read(ids)


@pytest.mark.slow
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_fifty_thousand_letters_are_looked_at_once(graveyard: Graveyard, is_analyzed: bool) -> None:
    for n in range(10):
        first = n * LETTERS // 10
        graveyard.bury(range(first + 1, first + LETTERS // 10 + 1), fingerprint=f"f{n}")
    if is_analyzed:
        graveyard.connection.execute("ANALYZE")
    # Some are on their way, so that both tables count.
    redriven(graveyard, *Walk(DeadLetters(graveyard.connection), Criteria()).take(5000))
    queries = Queries("dead_letter.sql")
    for request in (Request(), Request(consumer=BILL), Request(key="k7"), Request(state="dead")):
        criteria = choose(graveyard.connection, request).criteria
        parameters = {**criteria.parameters(), "limit": 50, "ids_shown": 10}
        for query in ("list", "groups"):
            assert rows_visited(graveyard, queries[query], parameters) < 12 * LETTERS
    total, groups = DeadLetters(graveyard.connection).groups(Criteria())
    assert (total, sum(group.count for group in groups)) == (10, LETTERS)


@pytest.mark.slow
@pytest.mark.parametrize("is_analyzed", [False, True])
def test_a_chunk_costs_the_same_among_many(graveyard: Graveyard, is_analyzed: bool) -> None:
    ids = graveyard.bury(range(1, 20_001))
    if is_analyzed:
        graveyard.connection.execute("ANALYZE")
    operation = redriven(graveyard, *ids[:1000])
    with graveyard.connection.transaction():
        before = rows_fetched(graveyard)
        assert operation.move(ids[1000:2000]) == 1000
        assert rows_fetched(graveyard) - before < 15_000
        before = rows_fetched(graveyard)
        assert operation.take_back(1000) == 1000
        assert rows_fetched(graveyard) - before < 15_000


def rows_visited(graveyard: Graveyard, query: str, parameters: dict[str, Any]) -> float:
    explain = "EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) "
    row = graveyard.connection.execute(
        (explain + query).encode(), parameters, prepare=False
    ).fetchone()
    assert row is not None
    return visited_by(row[0][0]["Plan"])


def visited_by(node: dict[str, Any]) -> float:
    rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    rows += node.get("Rows Removed by Join Filter", 0)
    return float(rows * node["Actual Loops"] + sum(map(visited_by, node.get("Plans", ()))))


def rows_fetched(graveyard: Graveyard) -> int:
    """Rows of tables that this transaction has read so far, by whatever way."""
    row = graveyard.connection.execute(
        "SELECT sum(seq_tup_read + idx_tup_fetch) FROM pg_stat_xact_user_tables"
        " WHERE schemaname = 'events'"
    ).fetchone()
    assert row is not None
    return int(row[0])
