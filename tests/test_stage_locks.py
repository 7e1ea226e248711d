"""Somebody else's lock on a table delays a stage, and never makes it look hung."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock import Pipeline, StreamEvent
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.stores import postgres
from penstock.telemetry import signals
from tests.failing import heard
from tests.waiting import wait_until


@pytest.fixture(params=["lock_timeout", "transaction_timeout"])
def limit(request: pytest.FixtureRequest, database_url: str) -> str:
    """What of the server's ends the wait; the second ends the connection as well."""
    with psycopg.connect(database_url) as connection:
        if request.param == "transaction_timeout" and connection.info.server_version < 170000:
            pytest.skip("PostgreSQL 17 is the first to have it")
    return str(request.param)


@pytest.fixture
def pipeline(
    database_url: str,
    redis_url: str,
    tmp_path: Path,
    limit: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Pipeline:
    url = database_url
    if limit == "lock_timeout":
        monkeypatch.setattr(postgres, "STAGE_LOCK_SECONDS", 0.05)
    else:
        url += "?options=-c%20transaction_timeout%3D50ms"
    pipeline = Pipeline("shop", database_url=url, redis_url=redis_url, archive_url=str(tmp_path))

    @pipeline.consumer("orders", name="bill")
    def bill(event: StreamEvent[Any]) -> None: ...

    return pipeline


@contextmanager
def locked(database_url: str, table: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that somebody has forgotten."""
    with psycopg.connect(database_url) as forgotten:
        forgotten.execute(f"LOCK TABLE events.{table}")
        yield forgotten


@pytest.mark.parametrize(
    ("role", "table"),
    [
        ("publisher", "outbox_event"),
        ("timers", "timer"),
        ("archiver", "stream"),
        ("janitor", "stream_lease"),
        ("consumer:bill", "stream"),
    ],
)
def test_a_table_that_is_locked_for_long_is_waited_for_a_moment_at_a_time(
    pipeline: Pipeline, database_url: str, limit: str, role: str, table: str
) -> None:
    stop, workers = threading.Event(), pipeline._workers()
    with (
        closing(LeaseKeeper(pipeline.settings)) as keeper,
        heard(signals.ServerLost, signals.ServerFound) as told,
    ):
        loop = Loop(role, lambda: workers.open_stage(role, keeper), stop)
        thread = threading.Thread(target=loop.run)
        try:
            with locked(database_url, table):
                thread.start()
                wait_until(lambda: len(told) == 1, what="the stage gives up for now")
            wait_until(lambda: len(told) == 2, what="the stage goes on")
        finally:
            stop.set()
            thread.join()
    assert limit.replace("_", " ") in told[0].error
