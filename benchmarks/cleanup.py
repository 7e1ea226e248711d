"""Cleanup at volume: what it costs the line, and DELETE beside the dropping of partitions.

`python -m benchmarks.cleanup --rows 10000000` (or `make bench-cleanup`) fills both tables, half of
the rows past their retention, and measures the way of one event, from the sender's commit to the
commit of its effect, with the janitor at work and at rest, in turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import psycopg

from benchmarks.bed import Bed, made_bed
from benchmarks.children import Child, serve
from benchmarks.cleanup_ways import compare_ways
from benchmarks.latency import ANNOUNCE_EFFECTS, Line
from benchmarks.with_penstock import open_pipeline, user_created
from benchmarks.workload import METADATA, STREAM
from penstock.core.settings import Settings
from penstock.pipeline.janitor import Janitor
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop
from penstock.telemetry import bus, signals

CONSUMER = "psycopg"
PREFIX = "bench-cleanup"
# Of settled rows and of the outbox: one table in every other slice, so that both have their share.
RETENTIONS = ((7.0, 1000.0), (1000.0, 7.0))
SLICES = 8
"""Of each side in a round, alternating."""
EVENTS_PER_SLICE = 50
WARM_UP_EVENTS = 100
# Ids that grow with their number, as those of real events grow with time.
UUID = """
(lpad(to_hex(1700000000000 + n), 12, '0') || '7' || substr(md5(n::text), 1, 3)
 || '8' || substr(md5(n::text), 4, 15))::uuid
"""
FILL_SETTLED = f"""
INSERT INTO events.processed_event (consumer, event_uuid, position, outcome, processed_at)
SELECT 'bench.{CONSUMER}', {UUID}, n, 'handled',
       now() - interval '14 days' + n * (interval '14 days' / %(rows)s)
  FROM generate_series(%(first)s::bigint, %(last)s) AS n
"""  # noqa: S608 - nothing in it comes from outside
FILL_OUTBOX = f"""
INSERT INTO events.outbox_event
       (event_uuid, stream_name, event_type, payload, created_at, position, term, published_at)
SELECT {UUID}, '{STREAM}', 'users.created', jsonb_build_object('user_id', n), t.at, n, 1, t.at
  FROM generate_series(%(first)s::bigint, %(last)s) AS n,
       LATERAL (SELECT now() - interval '14 days' + n * (interval '14 days' / %(rows)s) AS at) AS t
"""  # noqa: S608
FILL_CHUNK = 250_000
ENTER = f"""
INSERT INTO events.stream (name, origin, head, published)
SELECT '{STREAM}', id, %(rows)s, %(rows)s FROM events.origin;
INSERT INTO events.consumer (name, stream_name, start_position)
VALUES ('bench.{CONSUMER}', '{STREAM}', 1);
INSERT INTO events.stream_lease (stream_name, role, checkpoint)
VALUES ('{STREAM}', 'consumer:bench.{CONSUMER}', %(rows)s)
"""  # noqa: S608
LEFT = """
SELECT (SELECT count(*) FROM events.processed_event), (SELECT count(*) FROM events.outbox_event)
"""


# ── the janitor's process ──────────────────────────────────────────────────────────────────────


class JanitorOnCall:
    """A janitor that works between `on` and `off`, in rounds that follow each other at once."""

    def __init__(self, database_url: str) -> None:
        self._settings = Settings(database_url=database_url, cleanup_every_seconds=0.001)
        self._pruned = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def answer(self, days: tuple[float, float] | None) -> dict[str, Any]:
        """Begin to work with these retentions, or end."""
        if days is not None:
            self._stop = threading.Event()
            settings = replace(
                self._settings, settled_retention_days=days[0], outbox_retention_days=days[1]
            )
            self._thread = threading.Thread(target=self._work, args=(settings,))
            self._thread.start()
        else:
            self._stop.set()
            assert self._thread is not None
            self._thread.join()
        return {"pruned": self._pruned}

    def _work(self, settings: Settings) -> None:
        keeper = LeaseKeeper(settings)
        Loop("janitor", lambda: Counting(self, settings, keeper), self._stop).run()
        keeper.close()

    def count(self, rows: int) -> None:
        self._pruned += rows


class Counting(Janitor):
    """Tells how many rows went."""

    def __init__(self, call: JanitorOnCall, settings: Settings, keeper: LeaseKeeper) -> None:
        super().__init__(settings, keeper)
        self._call = call

    def step(self) -> Any:
        progress = super().step()
        self._call.count(progress.moved)
        return progress


# ── the measuring process ──────────────────────────────────────────────────────────────────────


def fill(url: str, rows: int) -> None:
    """Fourteen days of events, all of them published and settled."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        with connection.transaction():
            for statement in ENTER.split(";"):
                connection.execute(statement.encode(), {"rows": rows})
        for name, statement in (("settled rows", FILL_SETTLED), ("outbox rows", FILL_OUTBOX)):
            started = time.perf_counter()
            for first in range(1, rows + 1, FILL_CHUNK):
                last = min(first + FILL_CHUNK - 1, rows)
                connection.execute(statement.encode(), {"first": first, "last": last, "rows": rows})
            report(f"{rows:,} {name} in {time.perf_counter() - started:.0f} s")
        connection.execute("VACUUM ANALYZE events.processed_event, events.outbox_event")
        connection.execute("CHECKPOINT")


def measure_line(bed: Bed, rows: int, rounds: int) -> None:
    """Print the latency of the line with cleanup on and off, and their ratio."""
    url = bed.database("cleanup_line")
    with psycopg.connect(url) as connection:
        connection.execute(ANNOUNCE_EFFECTS)
    fill(url, rows)
    with running_line(bed, url) as line, Child("benchmarks.cleanup", "janitor", url) as janitor:
        numbers = iter(range(1, sys.maxsize))
        _time(line, numbers, WARM_UP_EVENTS)
        measured: list[tuple[list[float], list[float], float]] = []
        for number in range(1, rounds + 1):
            measured.append(_round(line, numbers, janitor))
            off, on, speed = measured[-1]
            report(
                f"round {number}: p50 {_at(off, 0.5):.2f} ms without, {_at(on, 0.5):.2f} ms with "
                f"cleanup; p99 {_at(off, 0.99):.2f} and {_at(on, 0.99):.2f} ms; "
                f"{speed:,.0f} rows/s pruned"
            )
        with psycopg.connect(url) as connection:
            left = connection.execute(LEFT).fetchone()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        ratios = [_at(on, share) / _at(off, share) for off, on, _ in measured]
        off_ms = median(_at(off, share) for off, _, _ in measured)
        on_ms = median(_at(on, share) for _, on, _ in measured)
        print(
            f"line {name}, cleanup on / off: {median(ratios):.2f} "
            f"({min(ratios):.2f}..{max(ratios):.2f}); {on_ms:.2f} / {off_ms:.2f} ms"
        )
    print(f"rows pruned per second meanwhile: {median(speed for _, _, speed in measured):,.0f}")
    print(f"rows left (settled, outbox): {left}")


def _round(
    line: Line, numbers: Iterator[int], janitor: Child
) -> tuple[list[float], list[float], float]:
    off: list[float] = []
    on: list[float] = []
    seconds, rows = 0.0, 0
    for number in range(SLICES):
        off += _time(line, numbers, EVENTS_PER_SLICE)
        before = janitor.ask(days=RETENTIONS[number % 2])["pruned"]
        started = time.perf_counter()
        on += _time(line, numbers, EVENTS_PER_SLICE)
        seconds += time.perf_counter() - started
        rows += janitor.ask(days=None)["pruned"] - before
    return off, on, rows / seconds


def _time(line: Line, numbers: Iterator[int], count: int) -> list[float]:
    return [line.time_one(next(numbers)) for _ in range(count)]


def _at(times: Sequence[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)]


@contextmanager
def running_line(bed: Bed, url: str) -> Iterator[Line]:
    """A publisher and a consumer at work."""
    pipeline = open_pipeline(url, bed.redis_url)

    def send(connection: psycopg.Connection[Any], number: int) -> None:
        pipeline.send(connection, STREAM, user_created(number), metadata=METADATA)

    worker = ("benchmarks.with_penstock", "worker")
    with ExitStack() as stack:
        for role in ("publisher", f"consumer:{CONSUMER}"):
            stack.enter_context(Child(*worker, role, url, bed.redis_url, PREFIX))
        line = Line(url, send)
        stack.callback(line.close)
        yield line


def report(text: str) -> None:
    """What goes on, for whoever waits."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, or be the janitor of a measurement."""
    if sys.argv[1:2] == ["janitor"]:
        bus.subscribe(signals.PruningFailed, lambda signal: report(str(signal)))
        serve(JanitorOnCall(sys.argv[2]).answer)
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cleanup", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="in each table (1000000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("line", "ways"))
    options = parser.parse_args()
    with made_bed(durable=True) as bed:
        if options.only != "ways":
            measure_line(bed, options.rows, options.rounds)
        if options.only != "line":
            compare_ways(bed, options.rows, report)
    print(f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")


if __name__ == "__main__":
    main()
