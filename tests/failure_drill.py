"""Keys that fail for a while, workers that are killed, and what the other keys notice of it.

`python -m tests.failure_drill [--runs N] [--keys N] [--each N] [--seed N]` runs with and without
failures in turn, and tells how long the events of healthy keys took. The machine should have
nothing else to do.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psycopg

from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from tests.databases import new_database
from tests.failing_app import CONSUMER, FAILING_FILE, STREAM, TABLES
from tests.fleet import Host, send
from tests.waiting import wait_until

FAILING_KEYS = 10
KILLS = 3
EVENTS_PER_SECOND = 1_000
EVENTS_PER_TRANSACTION = 10
FAILS_SECONDS = (0.5, 3.0)
P50_AT_MOST = 1.5
P99_AT_MOST = 3.0
CATCH_UP_SECONDS = 120.0
ENVIRONMENT = {
    "PENSTOCK_LEASE_SECONDS": "10",
    "PENSTOCK_LEASE_RENEW_SECONDS": "3",
}
SEND = """
SELECT events.send(%s, 'moved', jsonb_build_object('key', k, 'number', n), key => k)
  FROM unnest(%s::text[], %s::int[]) AS e(k, n)
"""
WRONG = """
SELECT key FROM effect GROUP BY key
HAVING array_agg(of_key ORDER BY number) <> ARRAY(SELECT generate_series(1, %s)::bigint)
"""
LATENCIES = """
SELECT extract(epoch FROM e.handled_at - o.created_at)::float * 1000
  FROM effect e JOIN events.outbox_event o USING (event_uuid)
 WHERE e.key <> ALL (%s)
 ORDER BY 1
"""
WORKERS = "SELECT pid FROM events.worker WHERE consumer = %s AND alive_until > clock_timestamp()"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: how long the events of healthy keys took, in milliseconds."""

    p50: float
    p99: float
    failed: int
    """How many attempts failed."""


class Drill:
    """Sends events at a pace, makes keys fail, kills workers, and looks at what came out."""

    def __init__(self, keys: int, each: int, kills: int, chance: random.Random) -> None:
        self._keys = [f"k{n}" for n in range(keys)]
        self._each = each
        self._kills = kills
        self._chance = chance

    def run(self, database_url: str, redis_url: str, folder: Path, *, with_failures: bool) -> Run:
        migrate(database_url)
        failing_file = folder / "failing"
        failing_file.touch()
        environment = {
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_REDIS_URL": redis_url,
            FAILING_FILE: str(failing_file),
            **ENVIRONMENT,
        }
        command = [sys.executable, "-m", "penstock", "--app", "tests.failing_app:pipeline", "run"]
        unlucky = self._chance.sample(self._keys, FAILING_KEYS) if with_failures else []
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(TABLES)
            host = Host(command, environment, folder / "log")
            try:
                wait_until(lambda: bool(self._workers(connection)), what=host.tail)
                with self._failing(failing_file, unlucky), self._killing(connection):
                    self._send(connection)
                self._catch_up(connection, host)
            finally:
                host.end()
            return self._judge(connection, unlucky)

    def _workers(self, connection: psycopg.Connection) -> list[int]:
        rows = connection.execute(WORKERS, (f"failing.{CONSUMER}",)).fetchall()
        return [pid for (pid,) in rows]

    def _send(self, connection: psycopg.Connection) -> None:
        """Events of all keys in turn, each key's in order, at a pace."""
        events = [(key, n) for n in range(1, self._each + 1) for key in self._keys]
        started = time.monotonic()
        never = threading.Event()
        for first in range(0, len(events), EVENTS_PER_TRANSACTION):
            never.wait(max(0.0, started + first / EVENTS_PER_SECOND - time.monotonic()))
            part = events[first : first + EVENTS_PER_TRANSACTION]
            connection.execute(SEND, (STREAM, [key for key, _ in part], [n for _, n in part]))

    @contextmanager
    def _failing(self, file: Path, keys: list[str]) -> Iterator[None]:
        """Meanwhile some of these keys fail, now these and now those."""
        done = threading.Event()

        def change() -> None:
            while True:
                chosen = [key for key in keys if self._chance.random() < 0.7]
                replacement = file.with_suffix(".new")
                replacement.write_text(" ".join(chosen))
                replacement.replace(file)
                if done.wait(self._chance.uniform(*FAILS_SECONDS)):
                    file.write_text("")
                    return

        with _thread(change, done):
            yield

    @contextmanager
    def _killing(self, connection: psycopg.Connection) -> Iterator[None]:
        """Meanwhile workers are killed, evenly over the run."""
        done = threading.Event()
        seconds = len(self._keys) * self._each / EVENTS_PER_SECOND / (self._kills + 1)
        with psycopg.connect(connection.info.dsn, autocommit=True) as own:

            def kill() -> None:
                for _ in range(self._kills):
                    if done.wait(seconds):
                        return
                    for pid in self._workers(own)[:1]:
                        send(pid, signal.SIGKILL)

            with _thread(kill, done):
                yield

    def _catch_up(self, connection: psycopg.Connection, host: Host) -> None:
        total = len(self._keys) * self._each

        def count() -> int:
            row = connection.execute("SELECT count(*) FROM effect").fetchone()
            assert row is not None
            return int(row[0])

        wait_until(
            lambda: count() >= total,
            seconds=CATCH_UP_SECONDS,
            what=lambda: f"{count()} of {total}\n{host.tail()}",
        )

    def _judge(self, connection: psycopg.Connection, unlucky: list[str]) -> Run:
        wrong = connection.execute(WRONG, (self._each,)).fetchall()
        assert wrong == [], f"out of order, lost or repeated: {wrong[:5]}"
        left = connection.execute(
            "SELECT (SELECT count(*) FROM events.parked_event),"
            " (SELECT count(*) FROM events.dead_letter),"
            " (SELECT count(*) FROM events.processed_event WHERE outcome <> 'handled')"
        ).fetchone()
        assert left == (0, 0, 0), f"parked, dead, not handled: {left}"
        times = [ms for (ms,) in connection.execute(LATENCIES, (unlucky,))]
        return Run(times[len(times) // 2], times[len(times) * 99 // 100], len(unlucky))


@contextmanager
def _thread(work: object, done: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _own(redis_url: str, number: int) -> str:
    """Another database of the same server: a stream belongs to one database of PostgreSQL."""
    return urlsplit(redis_url)._replace(path=f"/{number}").geturl()


def main() -> int:
    """Run, and say whether healthy keys noticed more than they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--each", type=int, default=500)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311
    arguments = parser.parse_args()
    drill = Drill(arguments.keys, arguments.each, arguments.kills, random.Random(arguments.seed))  # noqa: S311
    say(f"seed {arguments.seed}, {arguments.keys} keys of {arguments.each} events")
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name)) as servers:
        for number in range(arguments.runs):
            runs = {}
            for with_failures in (False, True):
                folder = Path(name) / f"{number}-{with_failures}"
                folder.mkdir()
                with new_database(servers.database_url) as database_url:
                    redis_url = _own(servers.redis_url, 2 * number + with_failures)
                    runs[with_failures] = drill.run(
                        database_url, redis_url, folder, with_failures=with_failures
                    )
            plain, failing = runs[False], runs[True]
            ratios.append((failing.p50 / plain.p50, failing.p99 / plain.p99))
            say(
                f"run {number + 1}: p50 {plain.p50:.1f} and {failing.p50:.1f} ms,"
                f" p99 {plain.p99:.0f} and {failing.p99:.0f} ms"
            )
    return report(ratios)


def report(ratios: list[tuple[float, float]]) -> int:
    """The middle of all runs against the promise; every key was in order, or we were not here."""
    is_kept = True
    for name, values, limit in (
        ("p50", [p50 for p50, _ in ratios], P50_AT_MOST),
        ("p99", [p99 for _, p99 in ratios], P99_AT_MOST),
    ):
        middle = statistics.median(values)
        is_kept = is_kept and middle <= limit
        verdict = "" if middle <= limit else "   NOT KEPT"
        say(
            f"  {name} of healthy keys, with failures by without: {middle:.2f}"
            f" ({min(values):.2f}..{max(values):.2f}) of {limit:g}{verdict}"
        )
    say("every key's effects are in order; nothing lost, repeated, parked or dead")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
