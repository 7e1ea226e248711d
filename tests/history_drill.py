"""A new consumer over a long history: archived, warm and live events, each once and in order.

`python -m tests.history_drill [--archived N] [--warm N] [--live N]` archives events, prunes them
from the outbox, adds warm ones, and lets a consumer with several lanes start at position 1 while
live events come in. Then it compares what was handled with what was sent.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from penstock import Pipeline, StreamEvent
from penstock.core.settings import Settings
from penstock.stores.migrations import migrate
from penstock.stores.servers import Servers, running_servers
from penstock.telemetry import signals
from tests.archiving import archiver
from tests.bench_of_one import Workbench
from tests.failing import heard
from tests.failure_drill import say
from tests.waiting import wait_until

STREAM = "orders"
CHUNK = 20_000
HOT = 5_000
"""So few are in the hot log that the warm events are read from the outbox."""
LANES = 2
HANDLED_SECONDS_MAX = 3600.0
SEND = """
SELECT events.send('orders', 'placed', jsonb_build_object('n', n), key => 'k' || n %% 997)
  FROM generate_series(1, %s) AS n
"""
EFFECTS = """
CREATE TABLE effect (serial bigint GENERATED ALWAYS AS IDENTITY, position bigint, key text)
"""
REPEATED = """
SELECT count(*) - count(DISTINCT position), count(DISTINCT position), min(position), max(position)
  FROM effect
"""
DISORDER = """
SELECT count(*) FROM (SELECT position < lag(position) OVER (PARTITION BY key ORDER BY serial)
                        FROM effect) AS step(is_back) WHERE is_back
"""


class Drill:
    """One stream whose beginning is in the archive alone."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self._settings = Settings(
            database_url=servers.database_url,
            redis_url=servers.redis_url,
            archive_url=str(folder / "archive"),
            archive_age_seconds=0.001,
            hot_log_length_max=HOT,
        )
        self._bench = Workbench(
            servers.database_url,
            servers.redis_url,
            archive_url=self._settings.archive_url,
            hot_log_length_max=HOT,
        )
        self._bench.connection.execute(EFFECTS)

    def close(self) -> None:
        self._bench.close()

    def send(self, count: int) -> None:
        """Send and publish, a chunk at a time."""
        for first in range(0, count, CHUNK):
            self._bench.connection.execute(SEND, (min(CHUNK, count - first),))
            self._bench.publish()

    def archive(self) -> int:
        """Archive everything that there is, and delete it from the outbox."""
        with archiver(self._settings) as working:
            working.archive_all()
        head = self._bench.head()
        row = self._bench.connection.execute(
            "SELECT min(first), max(last), count(*) FROM events.archive_object"
            " WHERE archived_at IS NOT NULL"
        ).fetchone()
        assert row is not None
        assert row[:2] == (1, head), f"{row[:2]} is archived, not up to {head}"
        self._bench.connection.execute("TRUNCATE events.outbox_event")
        return int(row[2])

    @contextmanager
    def working(self) -> Iterator[None]:
        """A worker with the new consumer and a publisher, in threads of this process."""
        pipeline = Pipeline(
            "drill",
            database_url=self._settings.database_url,
            redis_url=self._settings.redis_url,
            archive_url=self._settings.archive_url,
            hot_log_length_max=HOT,
        )
        pipeline.consumer(STREAM, name="new", lanes=LANES, batch_size=500)(note)
        stop = threading.Event()
        thread = threading.Thread(
            target=pipeline.run_worker, args=(["publisher", "consumer:new"], stop)
        )
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def feed(self, count: int) -> None:
        """Live events, one commit at a time."""
        for _ in range(count):
            self._bench.connection.execute(SEND, (1,))

    def wait_until_handled(self, total: int) -> None:
        """Every lane's checkpoint is at the end."""
        query = "SELECT min(checkpoint) FROM events.stream_lease WHERE role LIKE 'consumer:%'"
        wait_until(
            lambda: self._bench.rows(query)[0] >= total,
            what=lambda: f"{total} are handled, not {self._bench.rows(query)[0]}",
            seconds=HANDLED_SECONDS_MAX,
        )

    def faults(self, total: int) -> list[str]:
        """What differs from each event once, and each key in order."""
        row = self._bench.connection.execute(REPEATED).fetchone()
        assert row is not None
        repeated, distinct, first, last = row
        disorder = self._bench.rows(DISORDER)[0]
        faults = []
        if repeated:
            faults.append(f"{repeated} handled twice")
        if (distinct, first, last) != (total, 1, total):
            faults.append(f"{distinct} handled of {total}: {first}..{last}")
        if disorder:
            faults.append(f"{disorder} steps back within a key")
        return faults


def note(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
    """The effect that is counted."""
    cursor.execute(
        "INSERT INTO effect (position, key) VALUES (%s, %s)", (event.position, event.key)
    )


def run(archived: int, warm: int, live: int) -> list[str]:
    """The whole drill; returns what went wrong."""
    total = archived + warm + live
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name), durable=False) as pair:
        migrate(pair.database_url)
        drill = Drill(pair, Path(name))
        try:
            started = time.monotonic()
            drill.send(archived)
            say(f"{archived:,} sent in {time.monotonic() - started:.1f} s")
            started = time.monotonic()
            objects = drill.archive()
            say(f"archived as {objects} objects in {time.monotonic() - started:.1f} s, and pruned")
            drill.send(warm)
            started = time.monotonic()
            tiers = (signals.ColdTierRead, signals.WarmTierRead, signals.ConsumerBlocked)
            with heard(*tiers) as told, drill.working():
                drill.feed(live)
                drill.wait_until_handled(total)
            seconds = time.monotonic() - started
            cold = max((t.last for t in told if isinstance(t, signals.ColdTierRead)), default=0)
            say(f"{total:,} handled in {seconds:.1f} s, {total / seconds:,.0f} a second")
            say(f"the archive was read up to {cold:,}")
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
            say(f"at most {peak:,} MiB of memory")
            faults = drill.faults(total)
            faults += [f"blocked: {t}" for t in told if isinstance(t, signals.ConsumerBlocked)]
            if cold < archived:
                faults.append(f"the archive was read up to {cold} only")
            return faults
        finally:
            drill.close()


def main() -> None:
    """Read the arguments, run, and say whether it is right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--archived", type=int, default=1_000_000)
    parser.add_argument("--warm", type=int, default=100_000)
    parser.add_argument("--live", type=int, default=1_000)
    given = parser.parse_args()
    faults = run(given.archived, given.warm, given.live)
    for fault in faults:
        say(f"WRONG: {fault}")
    say("wrong" if faults else "each event once, each key in order")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
