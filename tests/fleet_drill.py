"""Three hosts, a hundred thousand keyed events, and everything that can happen to a host.

`python -m tests.fleet_drill [--events N] [--seed N]` keeps the promises to the second, and tells
what it measured. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.stores.servers import running_servers
from tests.fleet import Fleet, prepare, send
from tests.waiting import wait_until

FAULTS = ("kill host", "kill worker", "freeze host", "restart host", "add host")
FAIR_SECONDS = 10.0
ROLLING_WAIT_SECONDS = 2.0
WORKER_WAIT_SECONDS = 1.0
CATCH_UP_SECONDS = 300.0
HOSTS = 3
HOSTS_MAX = 5
FAULTS_MIN = 8
# Nearer to what people choose than the tests' own, and still over soon.
SETTINGS = {"lease_seconds": 10.0, "lease_renew_seconds": 3.0}


def disturb(fleet: Fleet, fault: str, chance: random.Random | None = None) -> None:
    """Do something to a host; another takes the place of one that is gone."""
    host = (chance or random.Random(1)).choice(fleet.hosts)  # noqa: S311 - reproducible
    match fault:
        case "kill host":
            host.die()
            fleet.remove(host)
            fleet.wait_until_working(fleet.add_host())
        case "kill worker":
            fleet.wait_until_working(host)
            killed = fleet.worker_of(host)
            send(killed, signal.SIGKILL)
            wait_until(lambda: fleet.worker_of(host) != killed, what="another takes its place")
        case "freeze host":
            host.freeze()
            wait_until(lambda: fleet.held()[host] == 0, what="its leases are over")
            host.thaw()
        case "restart host":
            fleet.replace(host)
        case "add host":
            fleet.wait_until_working(fleet.add_host())
        case _:
            raise ValueError(fault)


@dataclass(frozen=True, slots=True)
class Measured:
    """One promise and what became of it."""

    what: str
    seconds: float
    at_most: float

    @property
    def is_kept(self) -> bool:
        return self.seconds <= self.at_most

    def __str__(self) -> str:
        verdict = "" if self.is_kept else "   NOT KEPT"
        return f"  {self.what:<52} {self.seconds:6.2f} s of {self.at_most:g} s{verdict}"


class Drill:
    """Runs the fleet and collects what it measures."""

    def __init__(self, fleet: Fleet, events: int, seed: int) -> None:
        self.fleet = fleet
        self.events = events
        self.chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self.measured: list[Measured] = []

    def run(self) -> None:
        """Everything in order; the books come last."""
        for _ in range(HOSTS):
            self.fleet.add_host()
        self.fleet.wait_until_fair()
        say(f"{HOSTS} hosts share the lanes: {sorted(self.fleet.held().values())}")
        with self.fleet.feeding(0.01):
            self.fleet.wait_until_handled_more()
            self._wait("kill -9 of a worker: longest wait", self._kill_worker, WORKER_WAIT_SECONDS)
            self._wait("rolling restart: longest wait", self._roll, ROLLING_WAIT_SECONDS)
            self._wait("loss of a host: longest wait", self._lose_host, self.fleet.lease_seconds)
        self._disturb_at_random()

    def _wait(self, what: str, action: Callable[[], None], at_most: float) -> None:
        since = self.fleet.now()
        action()
        self.fleet.wait_until_fair()
        self.fleet.wait_until_handled_more()
        self._note(what, self.fleet.longest_wait_seconds(since), at_most)

    def _kill_worker(self) -> None:
        send(self.fleet.worker_of(self.fleet.hosts[0]), signal.SIGKILL)
        self.fleet.wait_until_handled_more(1000)

    def _roll(self) -> None:
        for host in list(self.fleet.hosts):
            self.fleet.replace(host)

    def _lose_host(self) -> None:
        disturb(self.fleet, "kill host", self.chance)

    def _disturb_at_random(self) -> None:
        faults = 0
        with self.fleet.feeding(0.002):
            while faults < FAULTS_MIN or self.fleet.sent < self.events:
                is_full = len(self.fleet.hosts) >= HOSTS_MAX
                fault = self.chance.choice(FAULTS[:-1] if is_full else FAULTS)
                say(f"{fault:<14} at {self.fleet.handled():,} of {self.fleet.sent:,}")
                disturb(self.fleet, fault, self.chance)
                faults += 1
        started_at = time.monotonic()
        self.fleet.wait_until_fair()
        seconds = time.monotonic() - started_at
        self._note("fair shares after the last change", seconds, FAIR_SECONDS)

    def _note(self, what: str, seconds: float, at_most: float) -> None:
        self.measured.append(Measured(what, seconds, at_most))
        say(str(self.measured[-1]))


def say(line: str) -> None:
    """Tell whoever watches."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="fleet-") as folder,
        running_servers(Path(folder), durable=False) as servers,
    ):
        prepare(servers.database_url)
        fleet = Fleet(
            servers.database_url,
            servers.redis_url,
            Path(folder),
            keys=5000,
            with_spares=True,
            **SETTINGS,
        )
        try:
            drill = Drill(fleet, options.events, options.seed)
            drill.run()
            books = fleet.close_books(CATCH_UP_SECONDS)
        finally:
            fleet.close()
    say("\n".join(["", str(books), *map(str, drill.measured)]))
    return 0 if all(measured.is_kept for measured in drill.measured) else 1


if __name__ == "__main__":
    sys.exit(main())
