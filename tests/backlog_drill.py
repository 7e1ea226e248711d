"""One failing key with a great many events behind it, and what the other keys notice of them.

`python -m tests.backlog_drill [--behind N]` tells how long batches took with few and with many
waiting, and how much memory the worker has. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

from penstock.core.events import StreamEvent
from penstock.core.retry import Retry
from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from penstock.telemetry import signals
from tests.bench_of_one import Workbench
from tests.failing import heard, look_now
from tests.failure_drill import say

CHUNK = 5_000
BATCH_SIZE = 100
SLOWER_AT_MOST = 1.5
MEMORY_AT_MOST_BYTES = 64 * 1024 * 1024
SEND = """
SELECT events.send('orders', 'placed', jsonb_build_object('n', n),
                   key => CASE WHEN n %% 2 = 0 THEN 'bad' ELSE 'k' || n %% 97 END)
  FROM generate_series(1, %s) AS n
"""


class Drill:
    """Half of all events are of one key, whose first event fails until the end."""

    def __init__(self, bench: Workbench) -> None:
        self._bench = bench
        self._is_bad = True
        bench.connection.execute("CREATE TABLE effect (number bigint)")
        self._lane = bench.consumer(
            self._handle, batch_size=BATCH_SIZE, retry=Retry.fixed(seconds=3600)
        )

    def _handle(self, event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        if self._is_bad and event.key == "bad":
            raise RuntimeError("not today")
        cursor.execute("INSERT INTO effect VALUES (%s)", (event.position,))

    def chunk(self) -> float:
        """Half a chunk more waits, half a chunk is handled; the milliseconds of a usual batch."""
        self._bench.connection.execute(SEND, (CHUNK,))
        self._bench.publish()
        times: list[float] = []
        while True:
            started = time.perf_counter()
            if self._lane.step().is_idle:
                return median(times)
            times.append((time.perf_counter() - started) * 1000)

    def waiting(self) -> int:
        row = self._bench.connection.execute("SELECT count(*) FROM events.parked_event").fetchone()
        assert row is not None
        return int(row[0])

    def drain(self) -> float:
        """The key is well again; events a second."""
        self._is_bad = False
        self._bench.connection.execute(
            "UPDATE events.parked_event SET next_attempt_at = clock_timestamp()"
            " WHERE next_attempt_at IS NOT NULL"
        )
        count, started = self.waiting(), time.monotonic()
        while self.waiting():
            look_now(self._lane)
            for _ in range(100):
                self._lane.step()
        return count / (time.monotonic() - started)

    def are_in_order(self, events: int) -> bool:
        bad = "SELECT position FROM effect e JOIN events.outbox_event o ON o.position = e.number"
        rows = self._bench.rows(f"{bad} WHERE o.key = 'bad' ORDER BY e.ctid")
        total = self._bench.rows("SELECT count(*) FROM effect")
        return rows == sorted(rows) and total == [events]


def run(behind: int, database_url: str, redis_url: str) -> int:
    """The whole drill; 0 if every promise was kept."""
    migrate(database_url)
    bench = Workbench(database_url, redis_url)
    try:
        drill = Drill(bench)
        with heard(signals.KeyBacklogged) as told:
            first = drill.chunk()
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            chunks = 1
            while drill.waiting() < behind:
                last = drill.chunk()
                chunks += 1
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024
        say(f"{drill.waiting()} events wait; told at {[t.waiting for t in told]}")
        say(f"  a batch with {CHUNK // 2} waiting: {first:.1f} ms, with all: {last:.1f} ms,")
        say(f"  that is {last / first:.2f} of {SLOWER_AT_MOST:g}")
        say(f"  memory grown by {grown / 1024 / 1024:.1f} MiB of {MEMORY_AT_MOST_BYTES >> 20}")
        say(f"  drained at {drill.drain():,.0f} a second")
        in_order = drill.are_in_order(chunks * CHUNK)
        say("  in order, each once" if in_order else "  NOT IN ORDER, OR NOT EACH ONCE")
        is_kept = last / first <= SLOWER_AT_MOST and grown <= MEMORY_AT_MOST_BYTES
        return 0 if is_kept and in_order else 1
    finally:
        bench.close()


def main() -> int:
    """Run it on servers of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--behind", type=int, default=100_000)
    behind = parser.parse_args().behind
    with tempfile.TemporaryDirectory() as name, running_servers(Path(name)) as servers:
        return run(behind, servers.database_url, servers.redis_url)


if __name__ == "__main__":
    sys.exit(main())
