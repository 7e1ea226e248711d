"""Consumers: a batch in one transaction against a transaction per event, four handlers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
import redis

from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.per_event import STREAM_KEY
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import (
    BATCH_SIZE,
    drive,
    open_pipeline,
    opened_stage,
    send_numbers,
)
from benchmarks.workload import ledger_digest, tame_garbage_collection
from penstock import Pipeline

PER_EVENT_WARM_UP = 20

RESET = """
TRUNCATE bench.ledger, bench.processed_event, bench.checkpoint, events.processed_event;
UPDATE events.stream_lease SET checkpoint = 0 WHERE role LIKE 'consumer:%'
"""
SETTLED = """
SELECT count(*), max(checkpoint)
  FROM events.processed_event, events.stream_lease WHERE role = %s
"""
SETTLED_PER_EVENT = "SELECT count(*) FROM bench.processed_event"
SENT = """
SELECT id, event_uuid::text, event_type, payload::text, metadata::text
  FROM events.outbox_event ORDER BY position
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """A handler, and what the other side does for the same effect."""

    claim: Claim
    handler: str
    handler_per_event: str


VARIANTS = (
    Variant(Claim("consume-nothing", "no-op handler", 45), "nothing", "nothing"),
    Variant(Claim("consume-orm", "ORM handler, one row", 15), "orm", "orm"),
    Variant(Claim("consume-psycopg", "psycopg handler, one row", 25), "psycopg", "psycopg"),
    Variant(Claim("consume-copy", "batch handler, COPY", 45), "copy", "psycopg"),
)


class Consuming:
    """Measures one handler on both sides over the same events."""

    def __init__(self, variant: Variant, ground: Ground) -> None:
        self.claim = variant.claim
        self._variant = variant
        self._ground = ground

    def measure(self) -> Round:
        """One round of each side."""
        ground, scale = self._ground, self._ground.scale
        compared = min(BATCH_SIZE + scale.consumed, PER_EVENT_WARM_UP + scale.consumed_per_event)
        seconds_per_event = self._measure_per_event()
        effects_per_event = ledger_digest(ground.connection, compared)
        seconds = self._measure_penstock()
        effects = ledger_digest(ground.connection, compared)
        if effects != effects_per_event:
            raise RuntimeError(f"{self.claim.name}: the sides differ in their effects")
        return Round(
            {"events/s": scale.consumed / seconds},
            {"events/s": scale.consumed_per_event / seconds_per_event},
            (effects, effects_per_event),
        )

    def _measure_penstock(self) -> float:
        ground, count = self._ground, self._ground.scale.consumed
        ground.reset()
        with opened_stage(ground.pipeline, f"consumer:{self._variant.handler}") as stage:
            drive(stage, BATCH_SIZE)
            tame_garbage_collection()
            started = time.perf_counter()
            drive(stage, count)
            seconds = time.perf_counter() - started
        role = f"consumer:bench.{self._variant.handler}"
        settled = ground.connection.execute(SETTLED, (role,)).fetchone()
        assert settled == (BATCH_SIZE + count, BATCH_SIZE + count), settled
        return seconds

    def _measure_per_event(self) -> float:
        ground, count = self._ground, self._ground.scale.consumed_per_event
        ground.reset()
        reply = ground.child.ask(
            what="consume",
            handler=self._variant.handler_per_event,
            warm_up=PER_EVENT_WARM_UP,
            count=count,
        )
        settled = ground.connection.execute(SETTLED_PER_EVENT).fetchone()
        assert settled == (PER_EVENT_WARM_UP + count,), settled
        seconds: float = reply["seconds"]
        return seconds


@dataclass(frozen=True, slots=True)
class Ground:
    """What all variants share: one database and the same events in both logs."""

    scale: Scale
    pipeline: Pipeline
    connection: psycopg.Connection[Any]
    child: Child

    def reset(self) -> None:
        """Forget what was handled."""
        self.connection.execute(RESET)


@contextmanager
def opened_consumers(bed: Bed, scale: Scale) -> Iterator[Sequence[Consuming]]:
    """Publish the events, once, to both logs."""
    url = bed.database("consumers")
    pipeline = open_pipeline(url, bed.redis_url, redis_prefix="bench-consumers")
    count = BATCH_SIZE + max(scale.consumed, scale.consumed_per_event)
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url))
        send_numbers(pipeline, connection, count)
        connection.autocommit = True
        with opened_stage(pipeline, "publisher") as publisher:
            drive(publisher, count)
        _copy_to_the_other_log(connection, bed.redis_url)
        child = Child("benchmarks.per_event", "serve", url, bed.redis_url, STREAM_KEY)
        ground = Ground(scale, pipeline, connection, stack.enter_context(child))
        yield [Consuming(variant, ground) for variant in VARIANTS]


def _copy_to_the_other_log(connection: psycopg.Connection[Any], redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, client.pipeline(transaction=False) as pipe:
        pipe.delete(STREAM_KEY)
        for outbox_id, event_uuid, event_type, payload, metadata in connection.execute(SENT):
            pipe.xadd(
                STREAM_KEY,
                {
                    "outbox_id": outbox_id,
                    "event_uuid": event_uuid,
                    "event_type": event_type,
                    "payload": payload,
                    "metadata": metadata,
                },
            )
        pipe.execute()
