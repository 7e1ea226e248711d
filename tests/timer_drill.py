"""A hundred thousand timers within a minute, while those who fire them are killed and stopped.

`python -m tests.timer_drill [--timers N] [--seconds S] [--schedulers N] [--seed N] [--skew]` has
real processes fire, publish and handle. Every timer has to be fired exactly once, none early, a
key's timers in the order in which they were due; then it tells how late they were. With --skew
the schedulers' clocks are ten minutes ahead and behind.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg

from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from tests.chaos.clocks import Clocks, usable_library
from tests.failure_drill import say
from tests.line import Worker
from tests.timer_app import CONSUMER, STREAM, TABLES
from tests.waiting import wait_until

PENSTOCK = (sys.executable, "-m", "penstock", "--app", "tests.timer_app:pipeline", "work")
KEYS = 1000
SKEW_SECONDS = (600.0, -600.0, 0.0)
# Before the first is due, all have to be scheduled and everybody has to run.
LEAD_SECONDS = 12.0
SCHEDULED_PER_SECOND = 4000
BETWEEN_SECONDS = (0.5, 1.5)
STOPPED_SECONDS = (0.2, 3.0)
SETTLE_SECONDS = 120.0
P50_MS_MAX, P99_MS_MAX = 20.0, 150.0
RECURRING = 10
"""Timers that recur every second, beside the others."""

SCHEDULE = """
WITH moment AS MATERIALIZED (SELECT clock_timestamp() + %(lead)s * interval '1 s' AS start),
planned AS (
    INSERT INTO plan
    SELECT 't' || n, 'k' || floor(random() * %(keys)s)::int,
           moment.start + random() * %(seconds)s * interval '1 s'
      FROM moment, generate_series(1, %(timers)s) AS n
    RETURNING *
), scheduled AS (
    SELECT events.schedule(timer_id, %(stream)s, 'bells.rang',
                           jsonb_build_object('bell', bell), due_at => due_at, key => bell)
      FROM planned
), recurring AS (
    SELECT events.schedule('every' || n, %(stream)s, 'bells.rang', '{"bell": "every"}',
                           due_at => moment.start, key => 'every' || n,
                           recurrence => '{"every_seconds": 1, "catch_up": "all"}')
      FROM moment, generate_series(1, %(recurring)s) AS n
)
SELECT (SELECT count(*) FROM scheduled) + (SELECT count(*) FROM recurring)
"""
SEED = "SELECT setseed(%s)"
LEFT = "SELECT count(*) FROM events.timer WHERE schedule IS NULL"
UNHANDLED = """
SELECT (SELECT count(*) FROM events.outbox_event) - (SELECT count(*) FROM rung)
"""
ANOMALIES = {
    "not fired": """
        SELECT count(*) FROM plan LEFT JOIN fired f USING (timer_id) WHERE f.id IS NULL""",
    "fired more than once": """
        SELECT count(*) FROM (SELECT 1 FROM fired GROUP BY timer_id, due_ms
                              HAVING count(*) > 1) AS twice""",
    "fired early": """
        SELECT count(*) FROM lateness WHERE to_outbox < interval '0'""",
    "runs that are missing": """
        SELECT count(*) FROM (
            SELECT due_ms - lag(due_ms) OVER (PARTITION BY timer_id ORDER BY due_ms) AS gap
              FROM fired WHERE timer_id LIKE 'every%') AS gaps
         WHERE gap <> 1000""",
    "out of order within a key": """
        SELECT count(*) FROM (
            SELECT due_at < lag(due_at) OVER (PARTITION BY bell ORDER BY id) AS is_wrong
              FROM plan JOIN fired USING (timer_id)) AS pairs
         WHERE is_wrong""",
    "not handled, or more than once": """
        SELECT count(*) FROM (
            SELECT count(r.number) AS times FROM events.outbox_event o
              LEFT JOIN rung r USING (event_uuid) GROUP BY o.event_uuid) AS each
         WHERE times <> 1""",
    "handled out of order within a key": """
        SELECT count(*) FROM (
            SELECT due_at < lag(due_at) OVER (PARTITION BY bell ORDER BY number) AS is_wrong
              FROM plan JOIN rung USING (timer_id)) AS pairs
         WHERE is_wrong""",
}
RECURRED = "SELECT count(*) FROM fired WHERE timer_id LIKE 'every%'"
LATENESS = """
SELECT array_agg(extract(epoch FROM late)::float * 1000 ORDER BY late) FROM (
    SELECT percentile_disc(part) WITHIN GROUP (ORDER BY to_outbox) AS late
      FROM lateness, unnest(ARRAY[0.5, 0.99, 1]) AS part GROUP BY part) AS parts
"""


class Drill:
    """One database, a publisher, a consumer, and schedulers that are hurt."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        environment: Mapping[str, str],
        folder: Path,
        clocks: Clocks | None,
    ) -> None:
        self._connection = connection
        self._environment = {"PENSTOCK_LOG_LEVEL": "info", **environment}
        self._folder = folder
        self._clocks = clocks
        self._workers: list[Worker] = []
        self._schedulers: list[Worker] = []
        self.hurt: Counter[str] = Counter()

    def start(self, schedulers: int) -> None:
        for role in ("publisher", f"consumer:{CONSUMER}"):
            self._workers.append(self._worker(role, {}))
        self._schedulers = [self._scheduler(number) for number in range(schedulers)]

    def schedule(self, timers: int, seconds: float, seed: int) -> float:
        """Returns in how many seconds the first is due."""
        lead = LEAD_SECONDS + timers / SCHEDULED_PER_SECOND
        started_at = time.monotonic()
        self._connection.execute(SEED, (seed % 1000 / 1000,))
        parameters = {
            "lead": lead,
            "keys": KEYS,
            "seconds": seconds,
            "timers": timers,
            "stream": STREAM,
            "recurring": RECURRING,
        }
        self._connection.execute(SCHEDULE, parameters)
        left = lead - (time.monotonic() - started_at)
        assert left > 0, "scheduling took longer than there was time for"
        return left

    def strike(self, seconds: float, chance: random.Random) -> None:
        """Kill and stop schedulers, one at a time, but never the last one that works."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            threading.Event().wait(chance.uniform(*BETWEEN_SECONDS))
            ready = [n for n, each in enumerate(self._schedulers) if is_ready(each)]
            if len(ready) < min(2, len(self._schedulers)):
                continue
            number = chance.choice(ready)
            if chance.random() < 0.5:
                self._schedulers[number].send(signal.SIGKILL)
                self._schedulers[number].wait_until_dead()
                self._schedulers[number] = self._scheduler(number)
                self.hurt["killed"] += 1
            else:
                self._schedulers[number].send(signal.SIGSTOP)
                threading.Event().wait(chance.uniform(*STOPPED_SECONDS))
                self._schedulers[number].send(signal.SIGCONT)
                self.hurt["stopped"] += 1

    def clocks_seen(self) -> list[int]:
        """By how many seconds each scheduler's own clock is wrong, as its log shows."""
        seen: list[int] = []
        for each in self._schedulers:
            told = json.loads(each.log.read_text().splitlines()[-1])["time"]
            wrong = datetime.fromisoformat(told).timestamp() - each.log.stat().st_mtime
            seen.append(round(wrong))
        return seen

    def settle(self) -> None:
        """Wait until every timer is fired and every event handled."""
        wait_until(lambda: self.ask(LEFT) == (0,), what=self._tails, seconds=SETTLE_SECONDS)
        for each in self._schedulers:
            each.send(signal.SIGTERM)
        for each in self._schedulers:
            each.wait_until_dead()
        wait_until(lambda: self.ask(UNHANDLED) == (0,), what=self._tails, seconds=SETTLE_SECONDS)

    def end(self) -> None:
        for worker in (*self._workers, *self._schedulers):
            worker.end()

    def ask(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row

    def _scheduler(self, number: int) -> Worker:
        if self._clocks is None:
            return self._worker("timers", {})
        name = f"scheduler-{number}"
        environment = self._clocks.environment(name)
        self._clocks.set(name, SKEW_SECONDS[number % len(SKEW_SECONDS)])
        return self._worker("timers", environment)

    def _worker(self, role: str, environment: Mapping[str, str]) -> Worker:
        number = len(list(self._folder.glob("worker-*")))
        log = self._folder / f"worker-{number}.log"
        return Worker((*PENSTOCK, "--role", role), {**self._environment, **environment}, log)

    def _tails(self) -> str:
        return "\n".join(each.tail() for each in (*self._workers, *self._schedulers))


def is_ready(worker: Worker) -> bool:
    return worker.is_alive and worker.has_said("WorkerStarted")


def run(options: argparse.Namespace, drill: Drill) -> int:
    """The whole drill; 0 if every promise was kept."""
    chance = random.Random(options.seed)  # noqa: S311
    drill.start(options.schedulers)
    threading.Event().wait(drill.schedule(options.timers, options.seconds, options.seed))
    if not options.unhurt:
        drill.strike(options.seconds, chance)
    drill.settle()
    if options.skew:
        say(f"  the schedulers' clocks are wrong by {drill.clocks_seen()} s")
    anomalies = {name: drill.ask(query)[0] for name, query in ANOMALIES.items()}
    say(f"  schedulers {dict(drill.hurt)}")
    for name, count in anomalies.items():
        say(f"  {name}: {count}")
    say(f"  runs of {RECURRING} timers that recur every second: {drill.ask(RECURRED)[0]}")
    late: dict[str, tuple[float, ...]] = {}
    for name, query in (("outbox", LATENESS), ("handler", LATENESS.replace("outbox", "handler"))):
        late[name] = p50, p99, longest = drill.ask(query)[0]
        say(f"  lateness to the {name}: p50 {p50:.1f} ms, p99 {p99:.1f} ms, max {longest:.0f} ms")
    is_late = late["outbox"][0] > P50_MS_MAX or late["outbox"][1] > P99_MS_MAX
    if is_late:
        say(f"  NOT KEPT: to the outbox p50 {P50_MS_MAX:g} ms, p99 {P99_MS_MAX:g} ms")
    return 1 if is_late or any(anomalies.values()) else 0


def main() -> int:
    """Run it on servers of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timers", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--schedulers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))  # noqa: S311
    parser.add_argument("--skew", action="store_true")
    parser.add_argument("--unhurt", action="store_true", help="kill and stop nobody")
    options = parser.parse_args()
    if options.skew and (reason := usable_library()[1]):
        say(f"--skew: {reason}")
        return 2
    say(f"{options.timers} timers in {options.seconds:g} s, seed {options.seed}")
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name)) as servers:
        folder = Path(name)
        migrate(servers.database_url)
        environment = {
            "PENSTOCK_DATABASE_URL": servers.database_url,
            "PENSTOCK_REDIS_URL": servers.redis_url,
        }
        with psycopg.connect(servers.database_url, autocommit=True) as connection:
            connection.execute(TABLES)
            clocks = Clocks(folder / "clocks") if options.skew else None
            drill = Drill(connection, environment, folder, clocks)
            try:
                return run(options, drill)
            finally:
                drill.end()


if __name__ == "__main__":
    sys.exit(main())
