"""`penstock status --check` tells a probe whether somebody should get up, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bookkeeper import BILL, Bookkeeper
from tests.test_cli import CANARY, Penstock


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def books(database_url: str) -> Iterator[Bookkeeper]:
    books = Bookkeeper(database_url)
    yield books
    books.connection.close()


def test_nothing_to_do_is_healthy(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    # Nobody works on it, and nothing waits for it.
    books.consumer(checkpoints=(10,))
    assert penstock("status", "--check").stdout == "Healthy.\n"
    assert json.loads(penstock("status", "--check", "--json").stdout) == {
        "healthy": True,
        "problems": [],
    }


def test_a_consumer_that_lags_needs_a_worker_unless_it_is_paused(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(9, 10))
    assert problems(penstock) == [("no_worker", BILL)]
    books.hold()
    assert problems(penstock) == []
    books.release()
    penstock("consumers", "pause", BILL)
    assert problems(penstock) == []


def test_a_lag_is_a_problem_only_beyond_the_limit(penstock: Penstock, books: Bookkeeper) -> None:
    books.stream(10)
    books.consumer(checkpoints=(5,))
    books.hold()
    # Position 6 is four minutes old.
    assert problems(penstock) == []
    assert problems(penstock, "--lag-seconds", "200") == [("lag", BILL)]
    penstock("consumers", "pause", BILL)
    assert problems(penstock, "--lag-seconds", "200") == []


def test_events_that_wait_for_no_publisher_are_a_problem_after_a_minute(
    penstock: Penstock, books: Bookkeeper
) -> None:
    for stream, seconds in (("fresh", 30), ("stale", 90)):
        books.connection.execute(
            "INSERT INTO events.outbox_event"
            " (event_uuid, stream_name, event_type, payload, created_at)"
            " VALUES (gen_random_uuid(), %s, 'placed', '{}',"
            "         clock_timestamp() - make_interval(secs => %s))",
            (stream, seconds),
        )
    assert problems(penstock) == [("no_publisher", "stale")]
    books.connection.execute(
        "INSERT INTO events.stream_lease (stream_name, role, owner_id, lease_until)"
        " VALUES ('stale', 'publisher', 'me', clock_timestamp() + interval '1 minute')"
    )
    assert problems(penstock) == []
    assert problems(penstock, "--lag-seconds", "60") == [("publisher_late", "stale")]


def test_a_quarantined_consumer_is_a_problem_even_when_it_is_paused(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.stream(10)
    books.consumer(checkpoints=(10,))
    books.quarantine()
    penstock("consumers", "pause", BILL)
    shown = penstock("status", "--check", code=1).stdout
    assert shown.count("\n") == 1
    assert "it crashed 5 times" in shown
    assert f"penstock quarantine release {BILL}" in shown


def test_a_database_that_does_not_answer_is_a_problem_like_the_others(penstock: Penstock) -> None:
    url = f"postgresql://user:{CANARY}@127.0.0.1:1/shop"
    found = penstock("status", "--check", "--json", code=1, DATABASE_URL=url).stdout
    assert [problem["kind"] for problem in json.loads(found)["problems"]] == ["database"]
    shown = penstock("status", "--check", code=1, DATABASE_URL=url)
    assert "cannot be reached" in shown.stdout
    assert CANARY not in found + shown.stdout + shown.stderr


def test_watching_and_checking_exclude_each_other(penstock: Penstock) -> None:
    for option in ("--check", "--json"):
        assert "--watch stands alone" in penstock("status", "--watch", option, code=2).stderr


def problems(penstock: Penstock, *options: str) -> list[tuple[str, str]]:
    """What the check finds; the exit code says the same."""
    command = ("status", "--check", "--json", *options)
    try:
        found = json.loads(penstock(*command).stdout)
    except AssertionError:
        found = json.loads(penstock(*command, code=1).stdout)
        assert found["problems"]
    assert found["healthy"] == (not found["problems"])
    return [(problem["kind"], problem["name"]) for problem in found["problems"]]
