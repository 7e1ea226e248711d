"""A small installation that is watched: supervisors with their metrics, and what may befall it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg

from penstock.stores.configuration import PREFIX
from tests.alert_app import BILL, PIPELINE, SHIP, STREAM, Placed, build_pipeline
from tests.line import Worker
from tests.promql import NAME, Vector, parse_exposition
from tests.proxy import Proxy
from tests.waiting import SOON_SECONDS, wait_until

CRASHES_MAX = 2
QUICK_STATE_SECONDS = 0.1
# State is read every five seconds only, which a test that runs each time cannot wait for.
QUICK = f"""
from penstock.cli import main
from penstock.runtime import state_cache
state_cache.STATE_SECONDS = {QUICK_STATE_SECONDS}
main()
"""
BORN = "UPDATE events.outbox_event SET created_at = created_at - %s::interval"


class Supervisor(Worker):
    """`penstock run --metrics-port`, and what it says there."""

    def get(self, address: str) -> str | None:
        """What it answers; None where it does not."""
        port = self._port("Health" if address != "metrics" else "Metrics")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{address}", timeout=20) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as refusal:
            with refusal:
                return None
        except OSError:
            return None

    def scrape(self) -> str | None:
        """What Prometheus would get."""
        return self.get("metrics")

    def told(self, name: str, **labels: str) -> float | None:
        """One series as it is now; None where it is not."""
        return self.all_told().get(frozenset({(NAME, name), *labels.items()}))

    def all_told(self) -> Vector:
        """Every series as it is now. Raises LookupError where it does not answer."""
        said = self.scrape()
        if said is None:
            raise LookupError(f"no metrics:\n{self.tail()}")
        return parse_exposition(said)

    def pid_of(self, worker: str) -> int | None:
        """The process of one of its workers; None while there is none."""
        workers = json.loads(self.get("healthz") or "")["workers"]
        (found,) = [each for each in workers if each["name"] == worker]
        pid: int | None = found["pid"]
        return pid

    def _port(self, what: str) -> int:
        found = re.search(rf"{what} on http://127\.0\.0\.1:(\d+)/", self.log.read_text())
        if found is None:
            raise LookupError(f"{what} is not served yet")
        return int(found[1])


class Site:
    """One database and one hot log with supervisors."""

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        folder: Path,
        *,
        supervisors: int = 1,
        is_archived: bool = True,
        is_quick: bool = False,
    ) -> None:
        self.redis_url = redis_url
        self._database_url = database_url
        self.proxy = Proxy.to(database_url)
        self.connection: psycopg.Connection[Any] = psycopg.connect(database_url, autocommit=True)
        self._pipeline = build_pipeline(database_url=database_url, redis_url=redis_url)
        settings = {
            "database_url": self.proxy.url(database_url),
            "redis_url": redis_url,
            "poll_seconds": 1,
            "crashes_max": CRASHES_MAX,
            **({"archive_url": folder / "archive"} if is_archived else {}),
        }
        self._world = {f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()}
        start = ["-c", QUICK] if is_quick else ["-m", "penstock"]
        argv = [sys.executable, *start, "--app", "tests.alert_app:pipeline", "run"]
        argv += ["--no-spare", "--health-port", "0", "--metrics-port", "0"]
        # Who is stopped here is to be missed by Prometheus, and not by the supervisor before.
        argv += ["--heartbeat-timeout", "600"]
        self.supervisors = [
            Supervisor(argv, self._world, folder / f"supervisor-{number}.log")
            for number in range(supervisors)
        ]

    @property
    def first(self) -> Supervisor:
        return self.supervisors[0]

    def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.end()
        self._pipeline.engine.dispose()
        self.connection.close()
        self.proxy.close()

    # ── doing ─────────────────────────────────────────────────────────────────────────────────

    def send(self, count: int = 1, *, customer: str = "anna", trouble: str = "") -> None:
        """Orders, in a transaction of their own."""
        orders = [Placed(customer=customer, trouble=trouble)] * count
        with psycopg.connect(self._database_url) as connection:
            self._pipeline.send_many(connection, STREAM, orders)

    @contextmanager
    def feeding(self) -> Iterator[None]:
        """Customers go on ordering meanwhile."""
        stop = threading.Event()

        def feed() -> None:
            while not stop.wait(0.05):
                self.send()

        thread = threading.Thread(target=feed, name="feeding")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SOON_SECONDS)

    def schedule(self, timer_id: str, customer: str = "anna") -> None:
        """A timer that is due at once."""
        order, at_once = Placed(customer=customer), timedelta(0)
        with psycopg.connect(self._database_url) as connection:
            self._pipeline.schedule(connection, STREAM, order, timer_id=timer_id, delay=at_once)

    def age(self, minutes: float) -> None:
        """Everything was sent so much earlier, as if that time had passed."""
        self.connection.execute(BORN, [f"{minutes} minutes"])

    def command(self, *arguments: str) -> None:
        """What an operator does about it, as docs/OPERATIONS.md says; nothing if all are dead."""
        if any(supervisor.is_alive for supervisor in self.supervisors):
            argv = [sys.executable, "-m", "penstock", *arguments]
            subprocess.run(argv, env=os.environ | self._world, check=True, capture_output=True)

    @contextmanager
    def stopped(self, worker: str) -> Iterator[None]:
        """A worker of the first supervisor stands still."""
        pid = self.first.pid_of(worker)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill_again_and_again(self, worker: str) -> None:
        """A worker dies whenever it is started, until the supervisor has had enough."""
        for _ in range(CRASHES_MAX):
            wait_until(lambda: self.first.pid_of(worker) is not None, what=f"{worker} is started")
            pid = self.first.pid_of(worker)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self._wait_until_gone(worker, pid)

    def _wait_until_gone(self, worker: str, pid: int) -> None:
        wait_until(lambda: self.first.pid_of(worker) != pid, what=f"{worker} dies")

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def wait_until_well(self) -> None:
        """Everybody works, and nobody has anything left to do."""

        def is_well(supervisor: Supervisor) -> bool:
            told = {dict(labels)[NAME]: value for labels, value in supervisor.all_told().items()}
            are_running = told["supervisor_workers_running"] == told["supervisor_workers_wanted"]
            # What is not numbered yet is nobody's lag.
            head = supervisor.told("events_pipeline_stream_head", stream=STREAM)
            is_published = (head or 0) == self._sent()
            is_done = self.lag(BILL, supervisor) == self.lag(SHIP, supervisor) == 0
            return are_running and is_published and is_done

        def is_all_well() -> bool:
            return all(is_well(each) for each in self.supervisors if each.is_alive)

        wait_until(
            is_all_well, seconds=2 * SOON_SECONDS, what=lambda: f"all is well:\n{self.tails()}"
        )

    def _sent(self) -> int:
        with psycopg.connect(self._database_url) as connection:
            row = connection.execute(
                "SELECT s.head + (SELECT count(*) FROM events.outbox_event o"
                "  WHERE o.stream_name = s.name AND o.position IS NULL)"
                " FROM events.stream s WHERE s.name = %s",
                (STREAM,),
            ).fetchone()
        return 0 if row is None else int(row[0])

    def wait_until_told(self, name: str, at_least: float = 1, **labels: str) -> None:
        """A series has reached a value."""
        wait_until(
            lambda: (self.first.told(name, **labels) or 0) >= at_least,
            what=lambda: f"{name} is {at_least}, not {self.first.told(name, **labels)}",
        )

    def lag(self, consumer: str, supervisor: Supervisor | None = None) -> float | None:
        """How many events a consumer is behind."""
        return (supervisor or self.first).told(
            "events_pipeline_consumer_lag_events_count", **consumer_labels(consumer)
        )

    def tails(self) -> str:
        return "\n".join(supervisor.tail() for supervisor in self.supervisors)


def consumer_labels(consumer: str) -> dict[str, str]:
    return {"consumer": f"{PIPELINE}.{consumer}", "stream": STREAM}
