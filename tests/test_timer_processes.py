"""Real worker processes of Redis timers: killed at every step, stopped, ended, supervised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from penstock.stores.timer_queue import RedisTimers
from penstock.telemetry.failpoints import ENVIRONMENT_NAME
from tests.redis_timer_app import ONCE, PLAIN
from tests.timers_at_work import arm, wait_until_empty
from tests.waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).parent.parent
LEASE_SECONDS = 0.5


@dataclass(frozen=True)
class Site:
    """Where the processes run, and what they leave behind."""

    database_url: str
    redis_url: str
    folder: Path
    store: RedisTimers

    @contextmanager
    def running(
        self, *arguments: str, failpoint: str | None = None, **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A `penstock` process on the drill's application; ended at the end, whatever happens."""
        environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": self.database_url,
            "PENSTOCK_REDIS_URL": self.redis_url,
            "DRILL_LEASE": str(LEASE_SECONDS),
            "DRILL_NOTES": str(self.folder / "notes"),
            **variables,
        }
        if failpoint is not None:
            environment[ENVIRONMENT_NAME] = failpoint
        argv = [sys.executable, "-m", "penstock", "--app", "tests.redis_timer_app:pipeline"]
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [*argv, *arguments], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(SOON_SECONDS)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def effects(self) -> list[str]:
        with psycopg.connect(self.database_url) as connection:
            rows = connection.execute("SELECT timer_id FROM drill_effect ORDER BY 1")
            return [row[0] for row in rows]


@pytest.fixture
def site(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Site]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE drill_effect (timer_id text, due_at timestamptz, begun_at timestamptz)"
        )
    with closing(RedisTimers(redis_url)) as store:
        yield Site(database_url, redis_url, tmp_path, store)


KILLED_AT = [
    ("TimersClaimed", 0, "handled"),
    ("TimerWritten", 0, "handled"),
    ("TimerHandled", 0, "handled"),
    ("TimerFailed", 1, "handled"),
    ("TimerRetried", 1, "handled"),
    ("TimerFailed", 9, "dead"),
    ("TimerBuried", 9, "dead"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "failures", "end"), KILLED_AT)
def test_a_worker_killed_at_any_step_loses_and_repeats_nothing(
    site: Site, name: str, failures: int, end: str
) -> None:
    _killed_and_replaced(site, name, failures, end)


@pytest.mark.slow
def test_a_worker_killed_between_commit_and_redis_repeats_nothing(site: Site) -> None:
    _killed_and_replaced(site, "TimerWritten", 0, "handled")


def _killed_and_replaced(site: Site, name: str, failures: int, end: str) -> None:
    arm(site.store, ONCE, "a", {"failures": failures}, correlation_id="c")
    work = ("work", "--role", f"timer:{ONCE}")
    with site.running(*work, failpoint=f"{name}:kill:1") as victim:
        assert victim.wait(SOON_SECONDS) == -signal.SIGKILL, site.log()
    with site.running(*work):
        wait_until_empty(site.store, ONCE)
    assert site.store.counts(ONCE) == (0, int(end == "dead"))
    assert site.effects() == ([] if end == "dead" else ["a"])


@pytest.mark.long
def test_everything_runs_under_the_supervisor_and_ends_when_asked(site: Site) -> None:
    options = ("--timers", "--no-spare", "--log-level", "info")
    notes = site.folder / "notes"
    with site.running("run", *options, DRILL_CONCURRENT="2") as supervisor:
        for number in range(5):
            arm(site.store, PLAIN, f"p{number}", delay_seconds=0.1 * number)
            arm(site.store, ONCE, f"o{number}", delay_seconds=0.1 * number)
        wait_until(lambda: len(notes.read_text().splitlines()) == 5, what=site.log)
        wait_until(lambda: len(site.effects()) == 5, what=site.log)
        supervisor.terminate()
        assert supervisor.wait(SOON_SECONDS) == 0, site.log()
    assert site.store.counts(PLAIN) == (0, 0)
    assert site.store.counts(ONCE) == (0, 0)
