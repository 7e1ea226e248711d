"""Publishers: numbered and appended by the batch, against appended and marked row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import redis

from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.per_event import STREAM_KEY
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import (
    drive,
    open_pipeline,
    opened_stage,
    send_numbers,
)
from benchmarks.workload import tame_garbage_collection
from penstock import Pipeline
from penstock.runtime.loop import Stage

CLAIM = Claim("publish", "publisher alone", 8)

SAVE = """
CREATE TABLE bench.saved AS SELECT * FROM events.outbox_event ORDER BY id
"""
# Ids go on growing as they do in life, and so do positions.
FILL = (
    "TRUNCATE events.outbox_event, bench.outbox_event",
    """
    INSERT INTO events.outbox_event
           (event_uuid, stream_name, event_type, version, key, payload, metadata, created_at)
    SELECT event_uuid, stream_name, event_type, version, key, payload, metadata, created_at
      FROM bench.saved ORDER BY id
    """,
    """
    INSERT INTO bench.outbox_event (event_uuid, event_type, payload, metadata)
    SELECT event_uuid, event_type, payload, metadata FROM bench.saved ORDER BY id
    """,
)
SETTLE_DOWN = ("ANALYZE events.outbox_event", "ANALYZE bench.outbox_event", "CHECKPOINT")
PUBLISHED = """
SELECT count(position), max(position) - min(position) + 1 FROM events.outbox_event
"""
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
        """One round: slices of both sides in turn, the first ones to warm up."""
        scale = self._scale
        self._client.delete(STREAM_KEY)
        for statement in (*FILL, *SETTLE_DOWN):
            self._connection.execute(statement)
        self._child.ask(what="open publisher")
        seconds = [0.0, 0.0]
        with opened_stage(self._pipeline, "publisher") as stage:
            self._slice(stage)
            tame_garbage_collection()
            for _ in range(scale.slices):
                for side, taken in enumerate(self._slice(stage)):
                    seconds[side] += taken
        self._child.ask(what="close")
        self._check()
        return Round(
            {"events/s": scale.published * scale.slices / seconds[0]},
            {"events/s": scale.published_per_event * scale.slices / seconds[1]},
        )

    def _slice(self, stage: Stage) -> tuple[float, float]:
        reply = self._child.ask(what="work", count=self._scale.published_per_event)
        return drive(stage, self._scale.published), reply["seconds"]

    def _check(self) -> None:
        """Both logs hold what was published, and nothing was left out."""
        count = (self._scale.slices + 1) * self._scale.published
        assert self._connection.execute(PUBLISHED).fetchone() == (count, count)
        count = (self._scale.slices + 1) * self._scale.published_per_event
        assert self._connection.execute(PUBLISHED_PER_EVENT).fetchone() == (count,)
        assert self._client.xlen(STREAM_KEY) == count


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
        send_numbers(pipeline, connection, (scale.slices + 1) * scale.published)
        connection.autocommit = True
        connection.execute(SAVE)
        yield [Publishing(scale, pipeline, connection, client, child)]
