"""Processes: one consumer in two of them, a lane each, against the same consumer in one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg

from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import STALL_SECONDS, drive, open_pipeline, opened_stage, send_numbers
from benchmarks.workload import STREAM, ledger_digest

HANDLER = "orm"
PREFIX = "bench-processes"
BATCH_SIZE = 100
RESET = """
TRUNCATE bench.ledger, events.processed_event, events.worker;
DELETE FROM events.consumer;
DELETE FROM events.stream_lease WHERE role LIKE 'consumer:%'
"""
# Paused, so that all begin together when all are there.
REGISTER_PAUSED = """
INSERT INTO events.consumer (name, stream_name, start_position, lanes, paused_at)
VALUES (%s, %s, 1, %s, now())
"""
RESUME = "UPDATE events.consumer SET paused_at = NULL"
WORKERS = "SELECT count(*) FROM events.worker"
SETTLED = "SELECT count(*) FROM events.processed_event"
# Between a fifth and four fifths all processes are at work: neither starting nor running dry.
MIDDLE = 0.6
SECONDS = """
SELECT extract(epoch FROM percentile_disc(0.8) WITHIN GROUP (ORDER BY processed_at)
                        - percentile_disc(0.2) WITHIN GROUP (ORDER BY processed_at))::float8
  FROM events.processed_event
"""


class Splitting:
    """Measures the same events handled by two processes and by one."""

    claim = Claim("processes-orm", "ORM handler, two processes by one", 1.4)

    def __init__(
        self, url: str, redis_url: str, connection: psycopg.Connection[Any], count: int
    ) -> None:
        self._urls = (url, redis_url)
        self._connection = connection
        self._count = count

    def measure(self) -> Round:
        """Both, one after the other, over the same events from the first on."""
        one, effects_of_one = self._handle(1)
        two, effects_of_two = self._handle(2)
        return Round({"events/s": two}, {"events/s": one}, (effects_of_two, effects_of_one))

    def _handle(self, processes: int) -> tuple[float, str]:
        self._connection.execute(RESET)
        self._connection.execute(REGISTER_PAUSED, (f"bench.{HANDLER}", STREAM, processes))
        shape = f"{processes}x{BATCH_SIZE}"
        arguments = ("worker", f"consumer:{HANDLER}", *self._urls, PREFIX, shape)
        with ExitStack() as stack:
            for _ in range(processes):
                stack.enter_context(Child("benchmarks.with_penstock", *arguments))
            self._wait_until(WORKERS, processes)
            self._connection.execute(RESUME)
            self._wait_until(SETTLED, self._count)
        row = self._connection.execute(SECONDS).fetchone()
        assert row is not None
        return MIDDLE * self._count / row[0], ledger_digest(self._connection, self._count)

    def _wait_until(self, query: str, count: int) -> None:
        deadline = time.perf_counter() + STALL_SECONDS
        while self._connection.execute(query.encode()).fetchone() != (count,):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{query} was not {count} within {STALL_SECONDS:g} s")
            time.sleep(0.1)


@contextmanager
def opened_processes(bed: Bed, scale: Scale) -> Iterator[Sequence[Splitting]]:
    """Publish the events, once."""
    url = bed.database("processes")
    pipeline = open_pipeline(url, bed.redis_url, redis_prefix=PREFIX)
    with psycopg.connect(url) as connection:
        send_numbers(pipeline, connection, scale.split)
        connection.autocommit = True
        with opened_stage(pipeline, "publisher") as publisher:
            drive(publisher, scale.split)
        yield [Splitting(url, bed.redis_url, connection, scale.split)]
