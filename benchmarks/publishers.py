"""Publishers: numbered and appended by the batch, against appended and marked row by row."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import redis

from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.per_event import SELECT_COUNT, STREAM_KEY
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import (
    BATCH_SIZE,
    drive,
    open_pipeline,
    opened_stage,
    send_numbers,
)
from benchmarks.workload import tame_garbage_collection
from penstock import Pipeline

CLAIM = Claim("publish", "publisher alone", 8)

SAVE = """
CREATE TABLE bench.saved AS SELECT * FROM events.outbox_event ORDER BY id
"""
# Ids go on growing as they do in life, and so do positions.
FILL = """
TRUNCATE events.outbox_event;
INSERT INTO events.outbox_event
       (event_uuid, stream_name, event_type, version, key, payload, metadata, created_at)
SELECT event_uuid, stream_name, event_type, version, key, payload, metadata, created_at
  FROM bench.saved ORDER BY id
"""
FILL_PER_EVENT = """
TRUNCATE bench.outbox_event;
INSERT INTO bench.outbox_event (event_uuid, event_type, payload, metadata)
SELECT event_uuid, event_type, payload, metadata FROM bench.saved ORDER BY id LIMIT {count}
"""
SETTLE_DOWN = ("ANALYZE events.outbox_event", "ANALYZE bench.outbox_event", "CHECKPOINT")
PUBLISHED = "SELECT count(*), max(position) - min(position) + 1 FROM events.outbox_event"
PUBLISHED_PER_EVENT = "SELECT count(*) FROM bench.outbox_event WHERE published_at IS NOT NULL"


class Publishing:
    """Measures both publishers over the same rows."""

    claim = CLAIM

    def __init__(
        self,
        scale: Scale,
        pipeline: Pipeline,
        connection: psycopg.Connection[Any],
        client: redis.Redis,
        child: Child,
    ) -> None:
        self._scale = scale
        self._pipeline = pipeline
        self._connection = connection
        self._client = client
        self._child = child

    def measure(self) -> Round:
        """One round of each side."""
        per_event = self._scale.published_per_event / self._measure_per_event()
        penstock = self._scale.published / self._measure_penstock()
        return Round({"events/s": penstock}, {"events/s": per_event})

    def _measure_penstock(self) -> float:
        count = self._scale.published
        self._prepare(FILL)
        with opened_stage(self._pipeline, "publisher") as stage:
            drive(stage, BATCH_SIZE)
            tame_garbage_collection()
            started = time.perf_counter()
            drive(stage, count)
            seconds = time.perf_counter() - started
        published = self._connection.execute(PUBLISHED).fetchone()
        assert published == (BATCH_SIZE + count, BATCH_SIZE + count), published
        return seconds

    def _measure_per_event(self) -> float:
        count = self._scale.published_per_event
        self._client.delete(STREAM_KEY)
        self._prepare(FILL_PER_EVENT.format(count=SELECT_COUNT + count))
        seconds: float = self._child.ask(what="publish", count=count)["seconds"]
        published = self._connection.execute(PUBLISHED_PER_EVENT).fetchone()
        assert published == (SELECT_COUNT + count,), published
        assert self._client.xlen(STREAM_KEY) == SELECT_COUNT + count
        return seconds

    def _prepare(self, fill: str) -> None:
        self._connection.execute(fill.encode())
        for statement in SETTLE_DOWN:
            self._connection.execute(statement)


@contextmanager
def opened_publishers(bed: Bed, scale: Scale) -> Iterator[Sequence[Publishing]]:
    """Send the events once; every round publishes copies of them."""
    url = bed.database("publishers")
    pipeline = open_pipeline(url, bed.redis_url, redis_prefix="bench-publishers")
    with (
        psycopg.connect(url) as connection,
        redis.Redis.from_url(bed.redis_url) as client,
        Child("benchmarks.per_event", "serve", url, bed.redis_url, STREAM_KEY) as child,
    ):
        send_numbers(pipeline, connection, BATCH_SIZE + scale.published)
        connection.autocommit = True
        connection.execute(SAVE)
        yield [Publishing(scale, pipeline, connection, client, child)]
