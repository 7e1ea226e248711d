"""Timers on the command line: listed, shown, cancelled, moved; and one line in the status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import Pipeline, RawEvent
from penstock.cli.output import span
from penstock.ops.timer_status import COUNT_MAX
from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.test_cli import Penstock
from tests.vault import STREAM, Admitted, Vault, new_key_file

NOON = datetime(2100, 6, 1, 12, tzinfo=UTC)


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Three timers: far, held, and recurring."""
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    event = RawEvent("Reminder", {"order": 7, "\u001b[2J": "odd"}, key="k7")
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("TRUNCATE events.timer, events.operation CASCADE")
        with connection.transaction():
            meta: dict[str, Any] = {"metadata": {"tenant": "t"}}
            pipeline.schedule(connection, "mails", event, at=NOON, timer_id="far", **meta)
            pipeline.schedule(connection, "orders", event, delay=timedelta(hours=3), timer_id="bad")
            cron: dict[str, Any] = {"cron": "0 9 * * MON", "zone": "Europe/Berlin"}
            cron["delay"] = timedelta(days=3)
            pipeline.schedule(connection, "orders", event, **cron, timer_id="weekly")
            connection.execute(
                "UPDATE events.timer SET held_at = now(), held_reason = 'no seal'"
                " WHERE timer_id = 'bad'"
            )
        yield connection


def listed(penstock: Penstock, *options: str) -> list[str]:
    found = json.loads(penstock("timers", "list", "--json", *options).stdout)
    return [timer["timer_id"] for timer in found["timers"]]


def test_timers_are_listed_in_the_order_in_which_they_are_due(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    assert listed(penstock) == ["bad", "weekly", "far"]
    assert listed(penstock, "--stream", "mails") == ["far"]
    assert listed(penstock, "--held") == ["bad"]
    assert listed(penstock, "--before", "8d") == ["bad", "weekly"]
    assert listed(penstock, "--before", "2100-06-01T14:00:01+02:00") == ["bad", "weekly", "far"]
    assert listed(penstock, "--before", "2100-06-01T14:00:00+02:00") == ["bad", "weekly"]
    said = penstock("timers", "list", "--limit", "2")
    assert "There are more" in said.stderr
    assert "cron 0 9 * * MON (Europe/Berlin)" in said.stdout
    assert "no seal" in said.stdout
    found = json.loads(penstock("timers", "list", "--json", "--limit", "1").stdout)
    assert found["has_more"] is True
    assert found["timers"][0]["held_reason"] == "no seal"


def test_a_timer_is_shown_with_its_event(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    said = penstock("timers", "show", "far").stdout
    for words in ("mails", "Reminder v1", "k7", "2100-06-01 12:00:00+0000", '"order": 7', "tenant"):
        assert words in said
    assert "\u001b" not in said
    assert "no seal" in penstock("timers", "show", "bad").stdout
    shown = json.loads(penstock("timers", "show", "weekly", "--json").stdout)
    assert shown["payload"]["order"] == 7
    assert shown["recurrence"] == {
        "cron": "0 9 * * MON",
        "zone": "Europe/Berlin",
        "catch_up": "one",
    }


def test_a_recurrence_that_only_postgresql_can_read_hides_no_timer(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    for timer_id, every in {"long": "1e5000", "deep": "[" * 2000 + "]" * 2000}.items():
        connection.execute(
            "SELECT events.schedule(%s, 'mails', 'Reminder', '{}', delay => '1 h',"
            "                       recurrence => %s::jsonb)",
            (timer_id, f'{{"every_seconds": {every}}}'),
        )
    assert set(listed(penstock)) == {"long", "deep", "bad", "weekly", "far"}
    assert (
        "cannot be read"
        in penstock("timers", "show", "long").stdout + penstock("timers", "list").stdout
    )


def test_an_event_that_is_nested_too_deeply_to_be_printed_is_told_so(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(
        "SELECT events.schedule('deep', 'mails', 'Reminder', %s::jsonb, delay => '1 h')",
        ("[" * 980 + "]" * 980,),
    )
    assert "nested deeper" in penstock("timers", "show", "deep").stdout
    assert (
        "nested deeper" in json.loads(penstock("timers", "show", "deep", "--json").stdout)["note"]
    )


def test_a_timer_is_cancelled_once(penstock: Penstock, connection: psycopg.Connection[Any]) -> None:
    assert penstock("timers", "cancel", "far").stdout == "Timer far is cancelled.\n"
    for command in ("cancel", "show"):
        said = penstock("timers", command, "far", code=1)
        assert "There is no timer 'far'" in said.stderr
    assert json.loads(penstock("timers", "cancel", "weekly", "--json").stdout) == {
        "timer_id": "weekly",
        "cancelled": True,
    }
    assert listed(penstock) == ["bad"]


def test_a_held_timer_is_let_go_when_it_is_moved(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    said = penstock("timers", "reschedule", "bad", "--at", "2100-06-01T14:00:00+02:00")
    assert said.stdout == "Timer bad is due 2100-06-01 12:00:00+0000.\n"
    assert listed(penstock, "--held") == []
    moved = json.loads(penstock("timers", "reschedule", "far", "--delay", "2h", "--json").stdout)
    due = datetime.fromisoformat(moved["due_at"])
    assert timedelta(hours=1) < due - datetime.now(UTC) < timedelta(hours=3)
    penstock("timers", "reschedule", "gone", "--delay", "0s", code=1)


def test_what_is_done_to_timers_is_on_record(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    penstock("timers", "reschedule", "far", "--at", "2100-06-02T12:00:00+00:00", "--reason", "late")
    penstock("timers", "cancel", "far", "--by", "ada", "--reason", "ordered twice")
    penstock("timers", "cancel", "far", code=1)
    penstock("timers", "cancel", "far", "--topic", "mails", "--by", "ada", code=2)
    moved, cancelled = connection.execute(
        "SELECT kind, criteria, requested_by, reason, events, ended_as FROM events.operation"
        " ORDER BY id"
    ).fetchall()
    about = {"timer_id": "far", "stream_name": "mails", "event_type": "Reminder"}
    due_at, then = "2100-06-01T12:00:00+00:00", "2100-06-02T12:00:00+00:00"
    assert moved[:2] == ("reschedule timer", {**about, "due_at": due_at, "moved_to": then})
    assert "@" in moved[2]
    assert moved[3:] == ("late", 1, "done")
    assert cancelled[:2] == ("cancel timer", {**about, "due_at": then})
    assert cancelled[2:] == ("ada", "ordered twice", 1, "done")


WRONG: list[tuple[list[str], str]] = [
    (["reschedule", "far"], "either --at or --delay"),
    (["reschedule", "far", "--at", NOON.isoformat(), "--delay", "1h"], "either --at or"),
    (["reschedule", "far", "--at", "2100-06-01T14:00:00"], "has no time zone"),
    (["reschedule", "far", "--at", "noon"], "neither a span"),
    (["reschedule", "far", "--delay", "soon"], "is no span"),
    (["reschedule", "far", "--delay", "999999999w"], "longer than"),
    (["list", "--before", "noon"], "neither a span"),
    (["list", "--stream", "no stream"], "name of a stream"),
    (["list", "--dead"], "add --topic"),
    (["list", "--topic", "t", "--held"], "--topic for Redis"),
    (["cancel", "x" * 201], "timer_id must be"),
]


def test_a_wrong_word_changes_nothing_and_says_why(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    for arguments, words in WRONG:
        assert words in penstock("timers", *arguments, code=2).stderr
    assert listed(penstock) == ["bad", "weekly", "far"]


def test_a_sealed_timer_is_shown_to_those_who_may_use_its_key(
    penstock: Penstock,
    connection: psycopg.Connection[Any],
    database_url: str,
    tmp_path: Path,
) -> None:
    vault = Vault(database_url, None, new_key_file(tmp_path))
    try:
        vault.make_confidential()
        event = Admitted(patient="Ada", diagnosis="measles")
        with connection.transaction():
            options: dict[str, Any] = {"metadata": {"ward": "north"}, "timer_id": "sealed"}
            vault.pipeline.schedule(connection, STREAM, event, at=NOON, **options)
        for command in (["list"], ["show", "sealed"], ["list", "--json"]):
            said = penstock("timers", *command).stdout
            assert not any(word in said for word in ("Ada", "measles", "north"))
        assert "--reveal shows it" in penstock("timers", "show", "sealed").stdout
        revealed = json.loads(penstock("timers", "show", "sealed", "--reveal", "--json").stdout)
        assert revealed["key"] == "Ada"
        assert revealed["payload"] == {"patient": "Ada", "diagnosis": "measles"}
        assert revealed["metadata"] == {"ward": "north"}
    finally:
        vault.close()


# ── status ─────────────────────────────────────────────────────────────────────────────────────


def test_status_has_a_line_for_timers(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    said = penstock("status").stdout
    assert "timers: 2 pending (0 late, 1 held), next due in " in said
    assert [span(ms) for ms in (900, 61_000, 125_000, 3_660_000, 90_000_000)] == [
        *("900 ms", "61.0 s", "2 min", "1 h 1 min", "1 d 1 h")
    ]
    connection.execute(
        "UPDATE events.timer SET due_at = now() - interval '2 min' WHERE timer_id = 'far'"
    )
    assert "timers: 2 pending (1 late, 1 held), next due 2 min ago" in penstock("status").stdout
    timers = json.loads(penstock("status", "--json").stdout)["timers"]
    assert (timers["pending"], timers["late"], timers["held"]) == (2, 1, 1)
    assert timers["next_due_ms"] < -119_000
    assert "timers: the next one is late" in penstock("status", "--check", code=1).stdout
    connection.execute("TRUNCATE events.timer, events.operation CASCADE")
    assert "timers: 0 pending\n" in penstock("status").stdout
    assert penstock("status", "--check").stdout == "Healthy.\n"


def test_counting_timers_stops_at_a_limit(
    penstock: Penstock, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(
        "INSERT INTO events.timer (timer_id, stream_name, event_type, payload, due_at)"
        " SELECT n, 'orders', 'T', '1', now() + interval '1 h' FROM generate_series(1, %s) AS n",
        [COUNT_MAX + 1],
    )
    assert f"timers: {COUNT_MAX:,}+ pending" in penstock("status").stdout
