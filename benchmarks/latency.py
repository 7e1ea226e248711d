"""Latency: from the sender's commit to the commit of the effect, one event at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import redis

from benchmarks import per_event
from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.per_event import STREAM_KEY
from benchmarks.report import Claim, Figures, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import open_pipeline, user_created
from benchmarks.workload import METADATA, STREAM, ledger_digest, tame_garbage_collection

STALL_SECONDS = 30.0
ANNOUNCE_EFFECTS = """
CREATE TRIGGER announce_effect AFTER INSERT ON bench.ledger
    FOR EACH ROW EXECUTE FUNCTION bench.announce_effect()
"""
LISTEN = "LISTEN bench_effect"


class Line:
    """One side's publisher and consumer at work, and the clock that both sides share."""

    def __init__(self, url: str, send: Callable[[psycopg.Connection[Any], int], Any]) -> None:
        self.url = url
        self._send = send
        self._sender = psycopg.connect(url)
        self._listener = psycopg.connect(url, autocommit=True)
        self._listener.execute(LISTEN)

    def time_one(self, number: int) -> float:
        """Milliseconds from the commit of one event to the commit of its effect."""
        self._send(self._sender, number)
        self._sender.commit()
        sent_at = time.perf_counter()
        if not list(self._listener.notifies(timeout=STALL_SECONDS, stop_after=1)):
            raise RuntimeError(f"event {number} had no effect within {STALL_SECONDS:g} s")
        return (time.perf_counter() - sent_at) * 1000

    def effects(self, through: int) -> str:
        """A digest of everything that was handled."""
        return ledger_digest(self._listener, through)

    def close(self) -> None:
        """Give the connections back."""
        self._sender.close()
        self._listener.close()


class Delay:
    """Measures both lines in turn, event by event."""

    def __init__(self, claim: Claim, scale: Scale, penstock: Line, other: Line) -> None:
        self.claim = claim
        self._scale = scale
        self._lines = (penstock, other)
        self._number = 0

    def measure(self) -> Round:
        """One round of each side, interleaved."""
        self._measure(self._scale.latencies_warm_up)
        tame_garbage_collection()
        times = self._measure(self._scale.slices * self._scale.latencies)
        penstock, other = (line.effects(self._number) for line in self._lines)
        assert penstock == other, "the sides differ in their effects"
        return Round(_percentiles(times[0]), _percentiles(times[1]), (penstock, other))

    def _measure(self, count: int) -> tuple[list[float], list[float]]:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(count):
            self._number += 1
            for line, collected in zip(self._lines, times, strict=True):
                collected.append(line.time_one(self._number))
        return times


@contextmanager
def opened_latencies(bed: Bed, scale: Scale) -> Iterator[Sequence[Delay]]:
    """Two lines per handler. Idle ones sleep, and disturb nobody."""
    with ExitStack() as stack:
        yield [
            Delay(
                Claim(f"latency-{handler}", f"unloaded p50, {handler} handler", 1.0, True),
                scale,
                stack.enter_context(_penstock_line(bed, handler)),
                stack.enter_context(_per_event_line(bed, handler)),
            )
            for handler in scale.latency_handlers
        ]


@contextmanager
def _penstock_line(bed: Bed, handler: str) -> Iterator[Line]:
    url = _database(bed, f"latency_penstock_{handler}")
    prefix = f"bench-latency-{handler}"
    pipeline = open_pipeline(url, bed.redis_url)

    def send(connection: psycopg.Connection[Any], number: int) -> None:
        pipeline.send(connection, STREAM, user_created(number), metadata=METADATA)

    worker = ("benchmarks.with_penstock", "worker")
    with (
        Child(*worker, "publisher", url, bed.redis_url, prefix),
        Child(*worker, f"consumer:{handler}", url, bed.redis_url, prefix),
    ):
        line = Line(url, send)
        try:
            yield line
        finally:
            line.close()


@contextmanager
def _per_event_line(bed: Bed, handler: str) -> Iterator[Line]:
    url = _database(bed, f"latency_per_event_{handler}")
    key = f"{STREAM_KEY}:{handler}"
    with redis.Redis.from_url(bed.redis_url) as client:
        client.delete(key)
    module = "benchmarks.per_event"
    with (
        Child(module, "publisher", url, bed.redis_url, key),
        Child(module, "consumer", url, bed.redis_url, key, handler),
    ):
        line = Line(url, per_event.send)
        try:
            yield line
        finally:
            line.close()


def _database(bed: Bed, name: str) -> str:
    url = bed.database(name)
    with psycopg.connect(url) as connection:
        connection.execute(ANNOUNCE_EFFECTS)
    return url


def _percentiles(times: Sequence[float]) -> Figures:
    ordered = sorted(times)
    return {
        "ms p50": ordered[len(ordered) // 2],
        "ms p99": ordered[int(len(ordered) * 0.99)],
    }
