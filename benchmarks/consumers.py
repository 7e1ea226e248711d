"""Consumers: a batch in one transaction against a transaction per event, four handlers."""

from __future__ import annotations

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
    drive,
    open_pipeline,
    opened_stage,
    send_numbers,
)
from benchmarks.workload import ledger_digest, tame_garbage_collection
from penstock import Pipeline
from penstock.runtime.loop import Stage

RESET = """
TRUNCATE bench.ledger, bench.processed_event, bench.checkpoint, events.processed_event;
UPDATE events.stream_lease SET checkpoint = 0 WHERE role LIKE 'consumer:%'
"""
SETTLED = "SELECT count(*) FROM events.processed_event"
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


@dataclass(frozen=True, slots=True)
class Ground:
    """What all variants share: a database for each side, and the same events in both logs."""

    scale: Scale
    pipeline: Pipeline
    penstock: psycopg.Connection[Any]
    per_event: psycopg.Connection[Any]
    child: Child


class Consuming:
    """Measures one handler on both sides over the same events."""

    def __init__(self, variant: Variant, ground: Ground) -> None:
        self.claim = variant.claim
        self._variant = variant
        self._ground = ground

    def measure(self) -> Round:
        """One round: slices of both sides in turn, the first ones to warm up."""
        ground, scale = self._ground, self._ground.scale
        for connection in (ground.penstock, ground.per_event):
            connection.execute(RESET)
        ground.child.ask(what="open consumer", handler=self._variant.handler_per_event)
        seconds = [0.0, 0.0]
        with opened_stage(ground.pipeline, f"consumer:{self._variant.handler}") as stage:
            self._slice(stage)
            tame_garbage_collection()
            for _ in range(scale.slices):
                for side, taken in enumerate(self._slice(stage)):
                    seconds[side] += taken
        ground.child.ask(what="close")
        return Round(
            {"events/s": scale.consumed * scale.slices / seconds[0]},
            {"events/s": scale.consumed_per_event * scale.slices / seconds[1]},
            self._effects(),
        )

    def _slice(self, stage: Stage) -> tuple[float, float]:
        scale = self._ground.scale
        reply = self._ground.child.ask(what="work", count=scale.consumed_per_event)
        return drive(stage, scale.consumed), reply["seconds"]

    def _effects(self) -> tuple[str, str]:
        """Digests of the events that both have handled, having checked that those are all."""
        ground, scale = self._ground, self._ground.scale
        handled = [(scale.slices + 1) * n for n in (scale.consumed, scale.consumed_per_event)]
        assert ground.penstock.execute(SETTLED).fetchone() == (handled[0],)
        assert ground.per_event.execute(SETTLED_PER_EVENT).fetchone() == (handled[1],)
        effects = (
            ledger_digest(ground.penstock, min(handled)),
            ledger_digest(ground.per_event, min(handled)),
        )
        if effects[0] != effects[1]:
            raise RuntimeError(f"{self.claim.name}: the sides differ in their effects")
        return effects


@contextmanager
def opened_consumers(bed: Bed, scale: Scale) -> Iterator[Sequence[Consuming]]:
    """Publish the events, once, to both logs."""
    url, url_per_event = bed.database("consumers"), bed.database("consumers_per_event")
    pipeline = open_pipeline(url, bed.redis_url, redis_prefix="bench-consumers")
    count = (scale.slices + 1) * scale.consumed
    with ExitStack() as stack:
        connection = stack.enter_context(psycopg.connect(url))
        send_numbers(pipeline, connection, count)
        connection.autocommit = True
        with opened_stage(pipeline, "publisher") as publisher:
            drive(publisher, count)
        _copy_to_the_other_log(connection, bed.redis_url)
        per_event = stack.enter_context(psycopg.connect(url_per_event, autocommit=True))
        arguments = ("serve", url_per_event, bed.redis_url, STREAM_KEY)
        child = stack.enter_context(Child("benchmarks.per_event", *arguments))
        ground = Ground(scale, pipeline, connection, per_event, child)
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
