"""Quarantine is kept in the database, shown and released by commands, and decided post by post."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from penstock import Pipeline, StreamEvent
from penstock.cli import main
from penstock.cli.invocation import Invocation
from penstock.cli.supervision import Supervision, process_specs
from penstock.core.crash_budget import Crash, CrashLimits
from penstock.core.settings import Settings
from penstock.ops.quarantine import QuarantineTable, quarantine, read_all
from penstock.ops.workers import release_dead_worker
from penstock.runtime.children import ProcessSpec
from penstock.runtime.last_rites import THREAD_NAME, LastRites
from penstock.runtime.posts import (
    EXIT_SURROUNDINGS,
    RESTART_LOOPING_SECONDS,
    AwaitInquiry,
    Post,
    RestartAfter,
    SetAside,
)
from penstock.runtime.quarantine import ANSWER_SECONDS, Quarantine, Quarantined
from tests.proxy import Proxy
from tests.waiting import wait_until

CRASH = Crash("w-1", 1.0, 0.5, -11, datetime(2026, 1, 31, tzinfo=UTC), was_silent=True)
Command = Callable[..., str]


@pytest.fixture
def penstock(
    database_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """The command line, in this process; returns what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_DATABASE_URL", database_url)

    def run(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["penstock", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code or 0) == code, said
        return said.out + said.err

    return run


def set_aside(database_url: str, *names: str) -> None:
    with closing(QuarantineTable(Settings(database_url=database_url))) as table:
        table.write([Quarantined(name, "5 crashes within 60 s", (CRASH,)) for name in names])


# ── the table and the commands ─────────────────────────────────────────────────────────────────


def test_the_list_tells_who_why_and_how(penstock: Command, database_url: str) -> None:
    set_aside(database_url, "shop.bill")
    shown = penstock("quarantine", "list")
    assert "shop.bill" in shown
    assert "5 crashes within 60 s" in shown
    (row,) = json.loads(penstock("quarantine", "list", "--json"))
    assert row["crashes"] == [
        {
            "died_at": "2026-01-31T00:00:00+00:00",
            "exit_code": -11,
            "ran_seconds": 0.5,
            "was_silent": True,
            "worker_id": "w-1",
        }
    ]
    assert row["host"]


def test_release_takes_a_full_or_a_plain_short_name(penstock: Command, database_url: str) -> None:
    set_aside(database_url, "shop.bill", "shop.ship", "depot.ship")
    assert "shop.bill is released" in penstock("quarantine", "release", "bill")
    assert "shop.ship or depot.ship" in penstock("quarantine", "release", "ship", code=1)
    assert "shop.ship is released" in penstock("quarantine", "release", "shop.ship")
    assert "did you mean depot.ship?" in penstock("quarantine", "release", "depto.ship", code=1)
    assert "depot.ship is released" in penstock("quarantine", "release", "--all")
    assert "Nobody is quarantined" in penstock("quarantine", "release", "--all")
    assert "quarantined are: none" in penstock("quarantine", "release", "bill", code=1)


def test_release_wants_one_name_or_all(penstock: Command) -> None:
    assert "--all" in penstock("quarantine", "release", code=2)
    assert "--all" in penstock("quarantine", "release", "bill", "--all", code=2)


def test_the_first_history_stays(database_url: str) -> None:
    set_aside(database_url, "shop.bill")
    with psycopg.connect(database_url) as connection:
        quarantine(connection, Quarantined("shop.bill", "another", ()))
        assert [row.reason for row in read_all(connection)] == ["5 crashes within 60 s"]


def test_whoever_has_nothing_to_write_does_not_wait_for_a_database_that_is_silent(
    database_url: str,
) -> None:
    with Proxy.to(database_url) as proxy:
        table = QuarantineTable(Settings(database_url=proxy.url(database_url)))
        kept = Quarantine(table)
        kept.start(lambda: None)
        assert kept.is_known
        with proxy.black_hole():
            began_at = time.monotonic()
            kept.stop()
            assert time.monotonic() - began_at < ANSWER_SECONDS / 2


def test_a_dead_worker_is_forgotten_and_its_suspect_explains_it(database_url: str) -> None:
    settings = Settings(database_url=database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        for worker_id in ("w-1", "w-2"):
            connection.execute(
                "INSERT INTO events.worker (consumer, worker_id, host, pid, alive_until) "
                "VALUES ('shop.bill', %s, 'h', 1, 'infinity')",
                [worker_id],
            )
        assert release_dead_worker(settings, "w-1") is False
        connection.execute(
            "INSERT INTO events.suspect (consumer, position, event_uuid, worker_id) "
            "VALUES ('shop.bill', 7, gen_random_uuid(), 'w-2')"
        )
        assert release_dead_worker(settings, "w-2") is True
        left = connection.execute("SELECT count(*) FROM events.worker").fetchone()
    assert left == (0,)


def test_what_a_dead_worker_held_is_given_back_when_the_server_is_back(database_url: str) -> None:
    told: list[tuple[str, bool]] = []
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO events.stream_lease (stream_name, role, worker_id, lease_until) "
            "VALUES ('orders', 'publisher', 'w-1', 'infinity')"
        )

        def is_held() -> bool:
            row = connection.execute("SELECT lease_until > now() FROM events.stream_lease")
            return row.fetchone() == (True,)

        with Proxy.to(database_url) as proxy:
            rites = last_rites(proxy.url(database_url), told)
            with proxy.refusing():
                rites.begin(dead_child("w-1"))
                wait_until(lambda: told == [("w-1", False)], what="nobody waits for an answer")
                assert is_held()
            wait_until(lambda: not is_held(), what="it is given back")
            rites.finish()
    assert told == [("w-1", False)]


def test_a_supervisor_that_ends_does_not_wait_for_a_server_that_is_away(database_url: str) -> None:
    told: list[tuple[str, bool]] = []
    with Proxy.to(database_url) as proxy, proxy.refusing():
        rites = last_rites(proxy.url(database_url), told)
        rites.begin(dead_child("w-1"))
        wait_until(lambda: told == [("w-1", False)], what="it has asked once")
        rites.finish()
        assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}


def last_rites(url: str, told: list[tuple[str, bool]]) -> LastRites:
    """Those of a supervisor whose workers' leases run for a long time."""
    return LastRites(
        partial(release_dead_worker, Settings(database_url=url)),
        lambda child, is_explained: told.append((child.worker_id, is_explained)),
        patience_seconds=3600,
    )


def dead_child(worker_id: str) -> Any:
    return SimpleNamespace(worker_id=worker_id)


# ── posts ──────────────────────────────────────────────────────────────────────────────────────


def died(post: Post, worker_id: str, exit_code: int = 3) -> Any:
    child = SimpleNamespace(
        worker_id=worker_id,
        started_at=time.monotonic(),
        process=SimpleNamespace(returncode=exit_code),
        was_silent=False,
    )
    post.record_death(child)  # type: ignore[arg-type]
    return post.decide()


def post(quarantine_as: str | None) -> Post:
    return Post(ProcessSpec("p", ["p"], quarantine_as=quarantine_as), CrashLimits(crashes_max=2))


def test_after_a_first_crash_the_next_one_starts_at_once() -> None:
    assert died(post("shop.bill"), "w-1") == RestartAfter(0.1)


def test_too_many_crashes_set_a_consumer_aside_once_their_inquiries_have_ended() -> None:
    bill = post("shop.bill")
    died(bill, "w-1")
    assert died(bill, "w-2") == AwaitInquiry()
    bill.end_inquiry("w-1", is_explained=False)
    assert bill.decide() == AwaitInquiry()
    bill.end_inquiry("w-2", is_explained=False)
    assert bill.decide() == SetAside("2 crashes within 60 s")


def test_a_crash_that_was_explained_is_not_held_against_it() -> None:
    bill = post("shop.bill")
    died(bill, "w-1")
    assert died(bill, "w-2") == AwaitInquiry()
    bill.end_inquiry("w-2", is_explained=True)
    assert isinstance(bill.decide(), RestartAfter)


def test_a_publisher_that_keeps_crashing_is_started_more_slowly() -> None:
    publisher = post(None)
    assert died(publisher, "w-1") == RestartAfter(0.1)
    assert died(publisher, "w-2") == RestartAfter(RESTART_LOOPING_SECONDS, "2 crashes within 60 s")


def test_an_unsuitable_server_quarantines_nobody() -> None:
    bill = post("shop.bill")
    verdicts = [died(bill, f"w-{n}", EXIT_SURROUNDINGS) for n in range(10)]
    assert all(isinstance(verdict, RestartAfter) for verdict in verdicts)
    assert verdicts[-1].seconds == 5.0


# ── packing ────────────────────────────────────────────────────────────────────────────────────


def specs(database_url: str, processes: int | None) -> list[ProcessSpec]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None)
    for name in "abcde":
        pipeline.consumer("orders", name=name)(_ignore)
    invocation = Invocation("shop:pipeline")
    invocation.__dict__["pipeline"] = pipeline
    how = Supervision(
        environment={}, processes=processes, shutdown_seconds=1, heartbeat_timeout_seconds=1
    )
    return process_specs(invocation, ["publisher", *(f"consumer:{n}" for n in "abcde")], how)


def _ignore(event: StreamEvent[Any]) -> None:
    pass


def roles(spec: ProcessSpec) -> list[str]:
    return [spec.argv[n + 1] for n, part in enumerate(spec.argv) if part == "--role"]


def test_every_consumer_has_a_process_unless_they_are_packed(database_url: str) -> None:
    publisher, *consumers = specs(database_url, None)
    assert (publisher.name, publisher.quarantine_as) == ("publisher", None)
    assert [roles(spec) for spec in consumers] == [[f"consumer:{n}"] for n in "abcde"]
    assert [spec.quarantine_as for spec in consumers] == [f"shop.{n}" for n in "abcde"]
    assert "--deployed-at" in publisher.argv


def test_packed_consumers_know_how_to_run_apart(database_url: str) -> None:
    publisher, first, second = specs(database_url, 2)
    assert publisher.apart == ()
    assert roles(first) == ["consumer:a", "consumer:c", "consumer:e"]
    assert roles(second) == ["consumer:b", "consumer:d"]
    assert [roles(part) for part in second.apart] == [["consumer:b"], ["consumer:d"]]
    assert first.everybody == {"shop.a", "shop.c", "shop.e"}
    assert len(specs(database_url, 10)) == 6


def test_without_a_database_a_worker_that_is_started_again_is_no_later_deployment() -> None:
    began = datetime.now(UTC)
    moments = {
        spec.argv[spec.argv.index("--deployed-at") + 1]
        for spec in specs("postgresql://nobody@127.0.0.1:1/none", None)
    }
    assert [began <= datetime.fromisoformat(moment) for moment in moments] == [True]
