"""How long attempts and their handlers take; where nobody wants to know, nothing is timed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter
from typing import Any

from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.pipeline.attempt import Attempt, Settled
from penstock.pipeline.calling import Caller
from penstock.telemetry import signals
from penstock.telemetry.bus import emit
from penstock.telemetry.metrics import SECONDS_BUCKETS


class Stopwatch:
    """Times the calls of one lane's handler; in buckets, so that a batch of them stays small."""

    def __init__(self) -> None:
        self._calls = [0] * (len(SECONDS_BUCKETS) + 1)
        self._seconds = 0.0

    def timing(self, call: Caller) -> Caller:
        """The same, timed."""

        def timed(function: Callable[..., Any], arguments: list[Any]) -> Any:
            began_at = perf_counter()
            try:
                return call(function, arguments)
            finally:
                seconds = perf_counter() - began_at
                self._calls[bisect_left(SECONDS_BUCKETS, seconds)] += 1
                self._seconds += seconds

        return timed

    def take(self) -> tuple[tuple[int, ...], float]:
        """How many calls fell into each bucket since the last time, and how long all took."""
        taken = tuple(self._calls), self._seconds
        self._calls = [0] * len(self._calls)
        self._seconds = 0.0
        return taken


class TimedAttempt:
    """An attempt that says how long it took, whether it succeeds or fails."""

    def __init__(self, consumer: str, attempt: Attempt, stopwatch: Stopwatch) -> None:
        self._consumer = consumer
        self._attempt = attempt
        self._stopwatch = stopwatch

    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""
        began_at = perf_counter()
        events = 0
        try:
            settled = self._attempt.run(batch, lease)
            events = settled.handled if batch.is_early else len(batch.entries)
            if settled.last < batch.last:
                events = sum(entry.position <= settled.last for entry in batch.entries)
            return settled
        finally:
            seconds = perf_counter() - began_at
            calls, handler_seconds = self._stopwatch.take()
            emit(signals.AttemptEnded(self._consumer, events, seconds, calls, handler_seconds))
