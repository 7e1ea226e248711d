"""Two versions of an application at work side by side, as in every deployment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from penstock.stores.configuration import PREFIX
from tests.line import Worker
from tests.upgrade_app import TABLES, VERSION, cents_of
from tests.waiting import SOON_SECONDS, wait_until

EVENTS = 60
SETTINGS = {"lease_seconds": "2", "lease_renew_seconds": "0.5", "poll_seconds": "0.5"}


class Deployment:
    """One database and one hot log; hosts and senders with either version of the code."""

    def __init__(self, database_url: str, redis_url: str, folder: Path) -> None:
        urls = {"database_url": database_url, "redis_url": redis_url}
        self._environment = {
            f"{PREFIX}{name.upper()}": value for name, value in {**urls, **SETTINGS}.items()
        }
        self._folder = folder
        self.connection = psycopg.connect(database_url, autocommit=True)
        self.connection.execute(TABLES)

    @contextmanager
    def host(self, version: int) -> Iterator[Worker]:
        argv = [sys.executable, "-m", "penstock", "--app", "tests.upgrade_app:pipeline"]
        environment = {**self._environment, VERSION: str(version)}
        log = self._folder / f"host-{version}.log"
        worker = Worker([*argv, "run", "--no-spare"], environment, log)
        try:
            yield worker
        finally:
            worker.end()

    @contextmanager
    def sender(self, version: int, first: int) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "tests.upgrade_app", str(first), str(EVENTS)]
        log = self._folder / f"sender-{version}.log"
        process = Worker(argv, {**self._environment, VERSION: str(version)}, log)
        try:
            yield process.process
            process.wait_until_dead()
            assert process.process.returncode == 0, process.tail()
        finally:
            process.end()

    def billed(self) -> dict[int, int]:
        return dict(self.connection.execute("SELECT number, cents FROM bill").fetchall())

    def disorder(self) -> list[str]:
        """Customers whose orders of one sender were not billed in their order."""
        rows = self.connection.execute(
            "SELECT DISTINCT customer FROM (SELECT customer, number < lag(number) OVER "
            "(PARTITION BY customer, number >= 1000 ORDER BY seq) AS is_late FROM bill) AS b "
            "WHERE is_late"
        ).fetchall()
        return [name for (name,) in rows]


@pytest.mark.slow
def test_both_versions_together_then_the_new_one_alone(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    line = Deployment(database_url, redis_url, tmp_path)
    old, new = range(1, 1 + EVENTS), range(1001, 1001 + EVENTS)
    with ExitStack() as stack:
        old_host = stack.enter_context(line.host(1))
        wait_until(lambda: old_host.has_said("LeaseAcquired"), what="the old code is at work")
        new_host = stack.enter_context(line.host(2))
        wait_until(
            lambda: new_host.has_said("LeaseAcquired", "LanesShared"), what="the new code is there"
        )
        with line.sender(1, old.start), line.sender(2, new.start):
            pass
        # Whoever of the old code meets a new event waits, aloud, and nothing passes it by.
        wait_until(lambda: old_host.has_said("ConsumerBlocked"), what="the old code waits")
        old_host.process.terminate()
        old_host.wait_until_dead(SOON_SECONDS)
        wait_until(
            lambda: len(line.billed()) == 2 * EVENTS,
            what=lambda: f"all are billed, not {len(line.billed())}:\n{new_host.tail()}",
        )
    assert line.billed() == {number: cents_of(number) for number in (*old, *new)}
    assert line.disorder() == []
    letters = line.connection.execute("SELECT count(*) FROM events.dead_letter").fetchone()
    assert letters == (0,)
    versions = line.connection.execute(
        "SELECT version, count(*) FROM events.outbox_event GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert versions == [(1, EVENTS), (2, EVENTS)]
    recorded = line.connection.execute(
        "SELECT version, count(*) FROM events.contract GROUP BY 1 ORDER BY 1"
    ).fetchall()
    assert recorded == [(1, 1), (2, 1)]
    line.connection.close()
