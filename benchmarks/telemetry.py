"""Telemetry: a consumer whose signals are counted against the same consumer without meters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from statistics import median
from typing import Any

import psycopg

from benchmarks.bed import Bed
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import BATCH_SIZE, drive, open_pipeline, opened_stage, send_numbers
from benchmarks.workload import ledger_digest, tame_garbage_collection
from penstock import Pipeline
from penstock.runtime.loop import Stage
from penstock.telemetry.meters import Meters

RESET = """
TRUNCATE bench.ledger, events.processed_event;
UPDATE events.stream_lease SET checkpoint = 0 WHERE role LIKE 'consumer:%'
"""
HANDLERS = {
    "nothing": Claim("telemetry-nothing", "no-op handler, counted by uncounted", 0.97),
    "orm": Claim("telemetry-orm", "ORM handler, counted by uncounted", 0.97),
}


class Counting:
    """Measures one handler with meters and without, slice by slice, over the same events."""

    def __init__(
        self,
        handler: str,
        scale: Scale,
        pipelines: tuple[Pipeline, Pipeline],
        connections: tuple[psycopg.Connection[Any], psycopg.Connection[Any]],
    ) -> None:
        self.claim = HANDLERS[handler]
        self._role = f"consumer:{handler}"
        self._scale = scale
        self._pipelines = pipelines
        self._connections = connections

    def measure(self) -> Round:
        """One round: slices of both in turn, each first as often as second."""
        # What lies in one database and not in the other must not count for the same side always.
        self._pipelines = self._pipelines[::-1]
        for connection in self._connections:
            connection.execute(RESET)
        scale, meters = self._scale, Meters()
        taken: tuple[list[float], list[float]] = ([], [])
        with ExitStack() as stack:
            # A stage is timed if somebody wants that when it is opened, as in a worker.
            meters.start()
            stack.callback(meters.stop)
            counted = stack.enter_context(opened_stage(self._pipelines[0], self._role))
            self._slice(counted, meters)
            meters.stop()
            uncounted = stack.enter_context(opened_stage(self._pipelines[1], self._role))
            self._slice(uncounted, None)
            tame_garbage_collection()
            for number in range(_slices(scale)):
                sides = [(0, counted, meters), (1, uncounted, None)]
                for side, stage, counting in sides if number % 2 else reversed(sides):
                    taken[side].append(self._slice(stage, counting))
        count = (_slices(scale) + 1) * BATCH_SIZE
        effects = [ledger_digest(c, count) for c in self._connections]
        # The difference is smaller than what else happens on a machine in a second: each slice is
        # compared with its neighbour, and what most of the pairs say is the result.
        per_second = BATCH_SIZE / median(taken[1])
        share = median(plain / counted for counted, plain in zip(*taken, strict=True))
        return Round(
            {"events/s": per_second * share}, {"events/s": per_second}, (effects[0], effects[1])
        )

    def _slice(self, stage: Stage, meters: Meters | None) -> float:
        if meters is None:
            return drive(stage, BATCH_SIZE)
        meters.start()
        try:
            return drive(stage, BATCH_SIZE)
        finally:
            meters.stop()


def _slices(scale: Scale) -> int:
    """So many batches of each side in a round."""
    return scale.slices * scale.consumed // BATCH_SIZE * 2


@contextmanager
def opened_telemetry(bed: Bed, scale: Scale) -> Iterator[Sequence[Counting]]:
    """Publish the events to two logs, one for each side."""
    count = (_slices(scale) + 1) * BATCH_SIZE
    pipelines: list[Pipeline] = []
    connections: list[psycopg.Connection[Any]] = []
    with ExitStack() as stack:
        for side in ("counted", "plain"):
            url = bed.database(f"telemetry_{side}")
            pipeline = open_pipeline(url, bed.redis_url, redis_prefix=f"bench-telemetry-{side}")
            connection = stack.enter_context(closing(psycopg.connect(url)))
            send_numbers(pipeline, connection, count)
            connection.autocommit = True
            with opened_stage(pipeline, "publisher") as publisher:
                drive(publisher, count)
            pipelines.append(pipeline)
            connections.append(connection)
        sides = (pipelines[0], pipelines[1]), (connections[0], connections[1])
        yield [Counting(handler, scale, *sides) for handler in HANDLERS]
