"""Fifty thousand dead letters: looked at, redriven with two interruptions, and accounted for.

`python -m tests.redrive_drill [--letters N]` tells how long the commands took and how many letters
a second were handled. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg

from penstock.core.lanes import key_hash
from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from tests.failure_drill import say
from tests.fleet import Host
from tests.line import ROOT
from tests.redrive_app import CONSUMER, STREAM
from tests.waiting import wait_until

KEYS = 1000
LOOK_SECONDS = 1.0
PER_SECOND = 5_000
INTERRUPTED = 130
FULL_NAME = f"redrive.{CONSUMER}"
PENSTOCK = (sys.executable, "-m", "penstock", "--app", "tests.redrive_app:pipeline")
SEND = """
SELECT events.send(%s, 'placed', jsonb_build_object('n', n), key => 'k' || n %% %s)
  FROM generate_series(1, %s) AS n
"""
BURY = """
INSERT INTO events.dead_letter (consumer, stream_name, position, event_uuid, event_type, version,
                                key_hash, entry, reason, error_type, error_message, traceback,
                                fingerprint, handler, attempts, host)
SELECT %s, o.stream_name, o.position, o.event_uuid, o.event_type, o.version, k.hash,
       events.entry(o, s.origin), 'exhausted', 'ValueError', 'not today',
       repeat('File "app.py", line 7, in handler' || E'\\n', 20), md5((o.position %% 20)::text),
       'app.handler', '[{"error": "ValueError: not today"}]', 'host'
  FROM events.outbox_event o JOIN events.stream s ON s.name = o.stream_name
  JOIN unnest(%s::text[], %s::bigint[]) AS k(key, hash) USING (key)
"""
SETTLE = """
INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
SELECT %s, event_uuid, position, 'dead' FROM events.outbox_event
"""
OUTCOMES = "SELECT outcome, count(*) FROM events.processed_event GROUP BY 1"
REST = """
SELECT (SELECT count(*) FROM events.dead_letter), (SELECT count(*) FROM events.parked_event),
       (SELECT count(*) FROM events.operation WHERE ended_at IS NULL)
"""


class Drill:
    """One database full of letters, and a host that handles them."""

    def __init__(self, connection: psycopg.Connection[Any], environment: Mapping[str, str]) -> None:
        self._connection = connection
        self._environment = {**os.environ, **environment}

    def bury(self, letters: int, folder: Path) -> None:
        """Have so many letters, as if every event of the stream had failed."""
        host = self.host(folder / "publisher")
        registered = "SELECT count(*) FROM events.consumer"
        wait_until(lambda: self._ask(registered) == (1,), what=host.tail)
        host.leave()
        host = Host((*PENSTOCK, "run", "--publisher"), self._environment, folder / "publishing")
        self._connection.execute(SEND, (STREAM, KEYS, letters))
        published = "SELECT coalesce(max(published), 0) FROM events.stream"
        wait_until(lambda: self._ask(published) == (letters,), what=host.tail)
        host.leave()
        keys = [f"k{n}" for n in range(KEYS)]
        hashes = [key_hash(key, "") for key in keys]
        self._connection.execute(BURY, (FULL_NAME, keys, hashes))
        self._connection.execute(SETTLE, (FULL_NAME,))
        self._connection.execute(
            "UPDATE events.stream_lease SET checkpoint = %s WHERE role = %s",
            (letters, f"consumer:{FULL_NAME}"),
        )

    def host(self, log: Path) -> Host:
        return Host((*PENSTOCK, "run"), self._environment, log)

    def time(self, *arguments: str) -> float:
        """How long a command takes, in seconds, its own start included."""
        started = time.monotonic()
        subprocess.run(
            (*PENSTOCK, *arguments),
            cwd=ROOT,
            env=self._environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return time.monotonic() - started

    def redrive(self, *, interrupt_at: int | None) -> tuple[float, int]:
        """Redrive all; returns for how long by the database's clock, and how many were handled."""
        before = self._handled()
        process = subprocess.Popen(
            (*PENSTOCK, "dlq", "redrive", "--all", "--yes", "--json"),
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
        )
        if interrupt_at is not None:
            wait_until(lambda: self._handled() >= interrupt_at, what="enough are handled")
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
        assert process.returncode == (0 if interrupt_at is None else INTERRUPTED), output
        json.loads(output)
        seconds = self._ask(
            "SELECT extract(epoch FROM ended_at - started_at)::float FROM events.operation"
            " ORDER BY id DESC LIMIT 1"
        )
        return float(seconds[0]), self._handled() - before

    def _handled(self) -> int:
        rows = dict(self._connection.execute(OUTCOMES).fetchall())
        return int(rows.get("handled", 0))

    def outcomes(self) -> dict[str, int]:
        return dict(self._connection.execute(OUTCOMES).fetchall())

    def rest(self) -> tuple[Any, ...]:
        return self._ask(REST)

    def _ask(self, query: str) -> tuple[Any, ...]:
        row: tuple[Any, ...] | None = self._connection.execute(query.encode()).fetchone()
        assert row is not None
        return row


def run(letters: int, folder: Path, database_url: str, redis_url: str) -> int:
    """The whole drill; 0 if every promise was kept."""
    migrate(database_url)
    environment = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    with psycopg.connect(database_url, autocommit=True) as connection:
        drill = Drill(connection, environment)
        drill.bury(letters, folder)
        empty = drill.time("dlq", "list", "--position", "0", "--json")
        looks = {
            "list": drill.time("dlq", "list", "--json") - empty,
            "groups": drill.time("dlq", "list", "--groups", "--json") - empty,
        }
        host = drill.host(folder / "host")
        try:
            for part in (4, 2):
                seconds, handled = drill.redrive(interrupt_at=letters // part)
                say(f"interrupted after {handled} letters in {seconds:.1f} s")
            seconds, handled = drill.redrive(interrupt_at=None)
            wait_until(lambda: drill.outcomes() == {"handled": letters}, what=host.tail)
            host.leave()
        finally:
            host.end()
        return report(looks, handled / seconds, handled, drill.rest())


def report(looks: dict[str, float], rate: float, handled: int, rest: Sequence[int]) -> int:
    """What was promised beside what was measured."""
    kept = [
        *((f"dlq {name}", seconds <= LOOK_SECONDS) for name, seconds in looks.items()),
        ("letters a second", rate >= PER_SECOND),
        ("the books", tuple(rest) == (0, 0, 0)),
    ]
    for name, seconds in looks.items():
        say(f"  dlq {name}: {seconds:.2f} s longer than without letters, of {LOOK_SECONDS:g} s")
    say(f"  redriven without a break: {handled} letters, {rate:,.0f} a second, of {PER_SECOND:,}")
    say(f"  letters, parked events and operations without an end that are left: {tuple(rest)}")
    for name, is_kept in kept:
        if not is_kept:
            say(f"  NOT KEPT: {name}")
    return 0 if all(is_kept for _, is_kept in kept) else 1


def main() -> int:
    """Run it on servers of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=50_000)
    letters = parser.parse_args().letters
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name)) as servers:
        return run(letters, Path(name), servers.database_url, servers.redis_url)


if __name__ == "__main__":
    sys.exit(main())
