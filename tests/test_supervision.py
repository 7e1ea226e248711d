"""Silent workers are replaced, crash loops end in quarantine, and probes can tell."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.ops.quarantine import read_all, release
from tests.process_group import children, dead, host, is_there
from tests.proxy import Proxy
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]

GUILTY = "shop.guilty-1"


def test_workers_that_hang_in_any_way_are_replaced_and_others_left_alone(tmp_path: Path) -> None:
    options = {"heartbeat_timeout": 0.8, "shutdown_seconds": 0.5}
    with host(tmp_path, "guilty-of-nothing", "beating", "greedy", "hung", **options):
        first = {child.kind: child for child in children(tmp_path, count=4)}
        well = first.pop("guilty-of-nothing")
        # Before its first beat a worker may take its time.
        wait_until(lambda: states(tmp_path)["beating"] == "running", what="it has beaten")
        os.kill(first["beating"].pid, signal.SIGSTOP)
        wait_until(
            lambda: all(starts(tmp_path, kind) >= 2 for kind in first),
            what=lambda: f"each is replaced: {log(tmp_path)}",
        )
        assert not any(is_there(child.pid) for child in first.values())
        assert {line["worker"] for line in said(tmp_path, "WorkerSilent")} == set(first)
        assert first["greedy"].worker_id in dead(tmp_path)
        assert is_there(well.pid)


def test_only_so_many_workers_start_at_a_time(tmp_path: Path) -> None:
    """On a small machine many at once would take so long that they look hung."""
    at_a_time = 2 * (os.cpu_count() or 1)
    kinds = [f"late-{number}" for number in range(at_a_time + 3)]
    with host(tmp_path, *kinds, heartbeat_timeout=2.0):
        children(tmp_path, count=at_a_time)
        wait_until(
            lambda: states(tmp_path)[kinds[-1]] == "waiting to be started",
            what="the last one waits",
        )
        assert starts(tmp_path, kinds[-1]) == 0
        (tmp_path / "go").touch()
        wait_until(
            lambda: set(states(tmp_path).values()) == {"running"}, what="all of them are running"
        )


def test_a_spare_takes_over_at_once_and_another_one_waits(tmp_path: Path) -> None:
    with host(tmp_path, "beating", with_spare=True, heartbeat_timeout=2.0):
        wait_until(lambda: len(spares(tmp_path)) == 1, what="a spare waits")
        (first,) = children(tmp_path, count=1)
        os.kill(first.pid, signal.SIGKILL)
        _, second = children(tmp_path, count=2)
        assert second.pid == spares(tmp_path)[0]
        assert second.worker_id != first.worker_id
        wait_until(lambda: states(tmp_path) == {"beating": "running"}, what="it beats")
        wait_until(lambda: len(spares(tmp_path)) == 2, what="the next spare waits")
        os.kill(spares(tmp_path)[1], signal.SIGKILL)
        os.kill(second.pid, signal.SIGKILL)
        assert children(tmp_path, count=3)[2].pid not in spares(tmp_path)
    assert not any(is_there(pid) for pid in spares(tmp_path))


def test_a_crash_loop_is_quarantined_until_somebody_releases_it(
    tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "guilty").touch()
    options = {"crashes_max": 3, "database_url": database_url, "heartbeat_timeout": 2.0}
    with host(tmp_path, "guilty-1", "beating", **options):
        wait_until(lambda: names(database_url) == [GUILTY], what="the quarantine is kept")
        (row,) = quarantined(database_url)
        assert row.reason == "3 crashes within 60 s"
        assert [crash["exit_code"] for crash in row.crashes] == [3, 3, 3]
        wait_until(lambda: readiness(tmp_path)[0] == 503, what="the supervisor is not ready")
        assert readiness(tmp_path)[1]["reasons"] == ["guilty-1 is quarantined"]
        assert "supervisor_worker_quarantined_total 1" in ask(tmp_path, "metrics")[1]
        assert "supervisor_workers_quarantined 1" in ask(tmp_path, "metrics")[1]
        assert json.loads(ask(tmp_path, "healthz")[1])["quarantined"] == [GUILTY]
        assert states(tmp_path) == {"guilty-1": "quarantined", "beating": "running"}
    assert starts(tmp_path, "guilty-1") == 3
    (told,) = said(tmp_path, "WorkerQuarantined")
    assert (told["name"], told["crashes"]) == (GUILTY, 3)
    assert '"supervisor.worker.quarantined": 1' in log(tmp_path)
    assert '"supervisor.workers.quarantined": 1' in log(tmp_path)

    (tmp_path / "port").unlink()
    with host(tmp_path, "guilty-1", "beating", **options):
        wait_until(lambda: starts(tmp_path, "beating") == 2, what="the other worker is started")
        assert starts(tmp_path, "guilty-1") == 3
        (tmp_path / "guilty").unlink()
        with psycopg.connect(database_url, autocommit=True) as connection:
            assert release(connection, GUILTY) == [GUILTY]
        wait_until(lambda: readiness(tmp_path)[0] == 200, what="the supervisor is ready again")
        assert starts(tmp_path, "guilty-1") == 4
    assert [line["name"] for line in said(tmp_path, "QuarantineReleased")] == [GUILTY]


def test_without_the_database_quarantine_holds_and_is_written_later(
    tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "guilty").touch()
    with Proxy.to(database_url) as proxy:
        options = {"crashes_max": 2, "database_url": proxy.url(database_url)}
        with proxy.refusing(), host(tmp_path, "guilty-1", "beating", **options):
            wait_until(
                lambda: bool(said(tmp_path, "WorkerQuarantined")), what="it is quarantined anyway"
            )
            wait_until(
                lambda: "the database does not answer" in readiness(tmp_path)[1]["reasons"],
                what="probes are told",
            )
            assert names(database_url) == []
            proxy._refuse.clear()
            wait_until(lambda: names(database_url) == [GUILTY], what="it is written")
            assert starts(tmp_path, "guilty-1") == 2


def test_who_is_found_in_quarantine_too_late_is_stopped(tmp_path: Path, database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        connection.execute(
            "INSERT INTO events.quarantine (name, reason) VALUES ('shop.beating', '')"
        )
    with Proxy.to(database_url) as proxy:
        url = proxy.url(database_url)
        with proxy.refusing(), host(tmp_path, "beating", crashes_max=2, database_url=url):
            (running,) = children(tmp_path, count=1)
            proxy._refuse.clear()
            wait_until(lambda: not is_there(running.pid), what="it is stopped")
            wait_until(lambda: readiness(tmp_path)[0] == 503, what="it stays so")
            assert starts(tmp_path, "beating") == 1
    assert dead(tmp_path) == []


def test_the_guilty_one_of_a_packed_process_is_found_and_the_others_go_on(
    tmp_path: Path, database_url: str
) -> None:
    (tmp_path / "guilty").touch()
    options = {"is_packed": True, "crashes_max": 2, "database_url": database_url}
    with host(tmp_path, "guilty-1", "beating", **options):
        wait_until(lambda: names(database_url) == [GUILTY], what="the guilty one is quarantined")
        assert starts(tmp_path, "beating") == 1
        assert [line["worker"] for line in said(tmp_path, "WorkerDied")] == [
            "together",
            "guilty-1",
            "guilty-1",
        ]
    assert "a process each runs guilty-1, beating" in log(tmp_path)


def test_crashes_that_an_event_explains_do_not_lead_to_quarantine(tmp_path: Path) -> None:
    (tmp_path / "guilty").touch()
    with host(tmp_path, "guilty-1", crashes_max=2, is_explained=True):
        wait_until(lambda: starts(tmp_path, "guilty-1") >= 4, what="it is started again and again")
    assert said(tmp_path, "WorkerQuarantined") == []


# ── the words used above ───────────────────────────────────────────────────────────────────────


def starts(folder: Path, kind: str) -> int:
    path = folder / "started"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(line.split()[0] == kind for line in lines)


def spares(folder: Path) -> list[int]:
    path = folder / "spares"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def log(folder: Path) -> str:
    return (folder / "log").read_text()


def said(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log(folder).splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("signal") == name]


def quarantined(database_url: str) -> list[Any]:
    with psycopg.connect(database_url) as connection:
        return list(read_all(connection))


def names(database_url: str) -> list[str]:
    return [row.name for row in quarantined(database_url)]


def ask(folder: Path, path: str) -> tuple[int, str]:
    port = int((folder / "port").read_text())
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, refusal.read().decode()


def states(folder: Path) -> dict[str, str]:
    workers = json.loads(ask(folder, "healthz")[1])["workers"]
    return {worker["name"]: worker["state"] for worker in workers}


def readiness(folder: Path) -> tuple[int, Any]:
    code, body = ask(folder, "readyz")
    return code, json.loads(body)
