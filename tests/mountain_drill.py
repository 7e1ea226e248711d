"""Ten million events that wait: memory, the lag query, and the speed from the first to the last.

`python -m tests.mountain_drill [--events N] [--batch-size N] [--stale] [--quick]` heaps them up,
first before the publisher, then before the consumer, each a process of its own, and compares with
a small heap. The servers may forget what a failing machine would lose: durability is not what is
measured here. Ten million take about 25 GB of disk. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psycopg
import redis

from penstock.ops.consumers import Consumers
from penstock.ops.status import UNNUMBERED_COUNT_MAX, read_status
from penstock.stores.configuration import PREFIX
from penstock.stores.migrations import migrate
from penstock.stores.queries import Queries
from penstock.stores.servers import running_servers
from tests.failure_drill import say
from tests.line import Worker
from tests.machine import say_load
from tests.mountain_app import BATCH_SIZE, CONSUMER, EVENT_TYPE, FULL_NAME, STREAM, TABLES
from tests.waiting import wait_until

EVENTS = 10_000_000
QUICK_EVENTS = 200_000
SMALL_PART = 50
"""The small heap is so small a part of the large one."""
HOT_PART = 10
"""So is what the hot log keeps: with ten million events its default."""
KEYS = 1000
CHUNK = 100_000
BYTES_PER_EVENT = 2_500
TENTHS = 10
LOOKS = 51
MEBIBYTE = 1024 * 1024
MEMORY_AT_MOST_BYTES = 300 * MEBIBYTE
LAG_AT_MOST = 2.0
"""The lag query with a large heap by the same with a small one."""
SPEED_AT_LEAST = 0.8
"""The last tenth's speed by the first one's."""
SLOWEST_AT_LEAST = 0.5
"""The slowest tenth's speed by that with a small heap, which the hot log holds as a whole."""
HOT_LOG_AT_MOST = 1.01
"""Entries in the hot log by its limit: it is trimmed by whole nodes."""
CATCH_UP_SECONDS = 3600.0
LOG = f"penstock:{{{STREAM}}}:log"
# As events.send writes them, without asking for each whether it is there already.
FILL = """
INSERT INTO events.outbox_event
       (event_uuid, stream_name, event_type, version, key, payload, metadata, created_at)
SELECT events.uuid7(), %(stream)s, %(type)s, 1, path, jsonb_build_object('path', path, 'number', n),
       jsonb_build_object('__creation_timestamp_ms__',
                          floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint),
       clock_timestamp()
  FROM generate_series(%(first)s::bigint, %(last)s) AS n,
       LATERAL (SELECT 'path-' || n %% %(keys)s AS path) AS p
"""
PUBLISHED = "SELECT coalesce(max(published), 0) FROM events.stream"
CHECKPOINT = "SELECT coalesce(max(checkpoint), 0) FROM events.stream_lease WHERE role = %s"
# A few steps in indexes: counting ten million rows would take longer than what is measured.
PUBLISHED_AT = """
SELECT extract(epoch FROM published_at)::float8 FROM events.outbox_event
 WHERE stream_name = %s AND position = ANY(%s) ORDER BY position
"""
PROCESSED_AT = """
SELECT extract(epoch FROM p.processed_at)::float8
  FROM events.outbox_event o JOIN events.processed_event p USING (event_uuid)
 WHERE o.stream_name = %s AND o.position = ANY(%s) AND p.consumer = %s ORDER BY o.position
"""
# Vacuum goes on; the planner never learns what is in the columns.
NO_STATISTICS = """
ALTER TABLE events.outbox_event SET (autovacuum_analyze_threshold = 2147483647)
"""
TOTALS = "SELECT count(*), max(position), count(DISTINCT number) FROM effect"


@dataclass(frozen=True, slots=True)
class Heap:
    """Positions after `after` up to `last`."""

    after: int
    last: int

    def marks(self) -> list[int]:
        """Where each tenth begins, and the end."""
        size = self.last - self.after
        return [self.after + max(1, size * n // TENTHS) for n in range(TENTHS + 1)]


@dataclass(frozen=True, slots=True)
class Lag:
    """How long the questions for the lag took, and how many pages they touched."""

    status_ms: float
    query_ms: float
    pages: int
    status_pages: int
    """Of the question for the streams, which is the rest of `penstock status`."""


class Memory:
    """The largest resident size that each process ever had, asked for every second."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._watched: list[tuple[str, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory")

    def watch(self, name: str, pid: int) -> None:
        self._watched.append((name, pid))

    def look(self) -> None:
        for name, pid in list(self._watched):
            self.peaks[name] = max(self.peaks.get(name, 0), peak_bytes(pid))

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.look()

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def peak_bytes(pid: int) -> int:
    """What the kernel says; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    sizes = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(sizes[0]) * 1024 if sizes else 0


class Mountain:
    """One line with a publisher and a consumer that can be halted, and heaps before them."""

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        client: redis.Redis,
        environment: Mapping[str, str],
        folder: Path,
        memory: Memory,
    ) -> None:
        self._connection = connection
        self._client = client
        self._environment = environment
        self._folder = folder
        self._memory = memory
        self._operator = Consumers(connection)
        self._workers: dict[str, Worker] = {}
        self._filled = 0
        self.hot_entries_max = 0

    def start(self, role: str) -> None:
        argv = [sys.executable, "-m", "penstock", "--app", "tests.mountain_app:pipeline", "work"]
        argv += ["--parent", str(os.getpid()), "--role", role]
        name = role.partition(":")[0]
        worker = Worker(argv, self._environment, self._folder / f"{name}.log")
        self._workers[role] = worker
        self._memory.watch(name, worker.process.pid)

    def halt(self, role: str) -> None:
        """Stop a process in order."""
        worker = self._workers.pop(role)
        self._memory.look()
        worker.send(signal.SIGTERM)
        worker.wait_until_dead()

    def close(self) -> None:
        for worker in self._workers.values():
            worker.end()

    def pause(self) -> None:
        wait_until(lambda: self._held() == 1, what=self._tails)
        self._operator.pause([FULL_NAME], by="drill")
        wait_until(lambda: self._held() == 0, what=self._tails)

    def _held(self) -> int:
        return self._operator.lanes_held([FULL_NAME])

    # ── one heap ──────────────────────────────────────────────────────────────────────────────

    def fill(self, count: int) -> Heap:
        """Heap up events while nobody publishes."""
        heap, started = Heap(self._filled, self._filled + count), time.monotonic()
        for first in range(heap.after + 1, heap.last + 1, CHUNK):
            last = min(first + CHUNK - 1, heap.last)
            values = {"stream": STREAM, "type": EVENT_TYPE, "keys": KEYS}
            self._connection.execute(FILL.encode(), {**values, "first": first, "last": last})
        self._filled = heap.last
        say(f"{count:,} events sent in {time.monotonic() - started:.0f} s")
        return heap

    def publish(self, heap: Heap) -> list[float]:
        """Events/s of the publisher, for every tenth."""
        self.start("publisher")
        self._follow("published", PUBLISHED, heap)
        return rates(heap, self._ask(PUBLISHED_AT, STREAM, heap.marks()))

    def consume(self, heap: Heap) -> list[float]:
        """Events/s of the consumer, for every tenth."""
        self._operator.resume([FULL_NAME])
        self._follow("handled", CHECKPOINT, heap, f"consumer:{FULL_NAME}")
        return rates(heap, self._ask(PROCESSED_AT, STREAM, heap.marks(), FULL_NAME))

    def _follow(self, what: str, query: str, heap: Heap, *parameters: str) -> None:
        started = time.monotonic()

        def reached() -> int:
            return int(self._ask(query, *parameters)[0][0])

        for mark in heap.marks()[1:]:
            wait_until(
                functools.partial(_is_at, reached, mark),
                seconds=CATCH_UP_SECONDS,
                what=self._tails,
            )
            length: Any = self._client.xlen(LOG)
            self.hot_entries_max = max(self.hot_entries_max, length)
            say(f"  {mark:,} {what} after {time.monotonic() - started:.0f} s")

    # ── looking ───────────────────────────────────────────────────────────────────────────────

    def lag(self) -> Lag:
        """Ask for the lag as `penstock status` does, a few times."""
        times = []
        for _ in range(LOOKS):
            started = time.perf_counter()
            read_status(self._connection)
            times.append((time.perf_counter() - started) * 1000)
        query_ms, pages = self._explain("consumers")
        _, status_pages = self._explain("streams", count_max=UNNUMBERED_COUNT_MAX)
        return Lag(median(times), query_ms, pages, status_pages)

    def _explain(self, name: str, **parameters: int) -> tuple[float, int]:
        """The usual time of one of its queries, and the pages that it touches."""
        queries, plans = Queries("status.sql"), []
        explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {queries[name]}".encode()
        for _ in range(LOOKS):
            with self._connection.transaction():
                self._connection.execute(queries["use_indexes"].encode())
                row = self._connection.execute(explain, parameters or None).fetchone()
                assert row is not None
                plans.append(row[0][0])
        top = plans[-1]["Plan"]
        pages = top["Shared Hit Blocks"] + top["Shared Read Blocks"]
        return median(plan["Execution Time"] for plan in plans), pages

    def redis_bytes_max(self) -> int:
        state: Any = self._client.info("memory")
        return int(state["used_memory_peak"])

    def size_bytes(self) -> int:
        ((size_bytes,),) = self._ask("SELECT pg_database_size(current_database())")
        return int(size_bytes)

    def has_handled_all_once(self) -> bool:
        return self._ask(TOTALS) == [(self._filled,) * 3]

    def _tails(self) -> str:
        return "\n".join(worker.tail() for worker in self._workers.values())

    def _ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query.encode(), parameters or None).fetchall()


def _is_at(reached: Callable[[], int], mark: int) -> bool:
    return reached() >= mark


def rates(heap: Heap, moments: list[tuple[Any, ...]]) -> list[float]:
    """Events/s between the marks."""
    marks, times = heap.marks(), [moment for (moment,) in moments]
    assert len(times) == len(marks)
    return [(marks[n + 1] - marks[n]) / max(times[n + 1] - times[n], 0.001) for n in range(TENTHS)]


class Report:
    """Lines of figures, and whether every promise was kept."""

    def __init__(self) -> None:
        self.is_kept = True

    def figure(self, what: str, text: str, *, is_kept: bool = True) -> None:
        self.is_kept = self.is_kept and is_kept
        say(f"  {what:<48} {text}{'' if is_kept else '   NOT KEPT'}")

    def speed(self, who: str, small: list[float], large: list[float]) -> None:
        """The large heap's tenths, and whether the last is as fast as the first."""
        say(f"  {who}, events/s by tenths: {' '.join(f'{rate:,.0f}' for rate in large)}")
        ratio = large[-1] / large[0]
        self.figure(
            f"{who}, last tenth by first",
            f"{ratio:.2f} of at least {SPEED_AT_LEAST:g}",
            is_kept=ratio >= SPEED_AT_LEAST,
        )
        # A speed that rises while the heap shrinks was too low before.
        slowest, usual = min(large), median(small)
        self.figure(
            f"{who}, slowest tenth by a small heap",
            f"{slowest / usual:.2f} of at least {SLOWEST_AT_LEAST:g};"
            f" {slowest:,.0f} and {usual:,.0f} events/s",
            is_kept=slowest / usual >= SLOWEST_AT_LEAST,
        )

    def lag(self, small: Lag, large: Lag) -> None:
        for what, one, other in (
            ("lag query, large heap by small", small.query_ms, large.query_ms),
            ("penstock status, large heap by small", small.status_ms, large.status_ms),
        ):
            self.figure(
                what,
                f"{other / one:.2f} of {LAG_AT_MOST:g}; {other:.2f} and {one:.2f} ms",
                is_kept=other / one <= LAG_AT_MOST,
            )
        for what, before, now in (
            ("pages that the lag query touches", small.pages, large.pages),
            ("pages that the rest of status touches", small.status_pages, large.status_pages),
        ):
            self.figure(what, f"{now} and {before}", is_kept=now <= LAG_AT_MOST * before)


def drill(mountain: Mountain, memory: Memory, events: int) -> bool:
    """A small heap, then the large one; whether every promise was kept."""
    mountain.start(f"consumer:{CONSUMER}")
    mountain.pause()
    heap = mountain.fill(events // SMALL_PART)
    published_small = mountain.publish(heap)
    lag_small = mountain.lag()
    handled_small = mountain.consume(heap)
    mountain.pause()
    mountain.halt("publisher")
    heap = mountain.fill(events)
    unnumbered = mountain.lag()
    published = mountain.publish(heap)
    lag = mountain.lag()
    handled = mountain.consume(heap)
    memory.look()
    say("")
    report = Report()
    for name, peak in sorted(memory.peaks.items()):
        report.figure(
            f"memory of the {name}, at most",
            f"{peak / MEBIBYTE:.0f} MiB of {MEMORY_AT_MOST_BYTES / MEBIBYTE:.0f}",
            is_kept=0 < peak <= MEMORY_AT_MOST_BYTES,
        )
    report.lag(lag_small, lag)
    report.figure("penstock status, large heap without numbers", f"{unnumbered.status_ms:.2f} ms")
    report.speed("publisher", published_small, published)
    report.speed("consumer", handled_small, handled)
    limit = events // HOT_PART
    report.figure(
        "entries in the hot log, at most",
        f"{mountain.hot_entries_max:,} of {limit:,}",
        is_kept=mountain.hot_entries_max <= limit * HOT_LOG_AT_MOST,
    )
    report.figure("memory of Redis, at most", f"{mountain.redis_bytes_max() / MEBIBYTE:.0f} MiB")
    is_whole = mountain.has_handled_all_once()
    report.figure("every event has its effect, once", "yes" if is_whole else "no", is_kept=is_whole)
    return report.is_kept


@contextmanager
def opened_mountain(
    folder: Path, memory: Memory, options: argparse.Namespace
) -> Iterator[Mountain]:
    """Servers and a database, empty as yet."""
    with ExitStack() as stack:
        servers = stack.enter_context(running_servers(folder, durable=False))
        migrate(servers.database_url)
        connection = stack.enter_context(psycopg.connect(servers.database_url, autocommit=True))
        connection.execute(TABLES)
        if options.stale:
            connection.execute(NO_STATISTICS)
        client = stack.enter_context(redis.Redis.from_url(servers.redis_url, protocol=2))
        environment = {
            f"{PREFIX}DATABASE_URL": servers.database_url,
            f"{PREFIX}REDIS_URL": servers.redis_url,
            f"{PREFIX}HOT_LOG_LENGTH_MAX": str(options.events // HOT_PART),
            BATCH_SIZE: str(options.batch_size),
        }
        mountain = Mountain(connection, client, environment, folder, memory)
        stack.callback(mountain.close)
        yield mountain


def main() -> int:
    """Heap up, clear away, and say what it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--stale", action="store_true", help="the planner knows nothing, ever")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_EVENTS:,} events")
    parser.add_argument("--folder", type=Path, help="where there is room for it")
    options = parser.parse_args()
    options.events = events = QUICK_EVENTS if options.quick else options.events
    with tempfile.TemporaryDirectory(prefix="mountain-", dir=options.folder) as name:
        free, needed = shutil.disk_usage(name).free, events * BYTES_PER_EVENT
        if free < needed:
            say(f"{name} has {free >> 30} GiB of the {needed >> 30} that this takes: --folder")
            return 2
        with (
            Memory() as memory,
            opened_mountain(Path(name), memory, options) as mountain,
        ):
            is_kept = drill(mountain, memory, events)
            say_load()
            say(f"The database has {mountain.size_bytes() / events:,.0f} bytes an event.")
    return 0 if is_kept else 1


if __name__ == "__main__":
    sys.exit(main())
