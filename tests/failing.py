"""For tests of consumers that fail: retries at once or never, and what became of the events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.core.retry import Retry
from penstock.pipeline.lane import Lane
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe, unsubscribe
from tests.bench_of_one import Workbench
from tests.waiting import wait_until

AT_ONCE = Retry.fixed(seconds=0.001, attempts_max=5)
LATER = Retry.fixed(seconds=3600, attempts_max=5)


@contextmanager
def heard(*signal_types: type[signals.Signal]) -> Iterator[list[Any]]:
    found: list[Any] = []
    for signal_type in signal_types:
        subscribe(signal_type, found.append)
    try:
        yield found
    finally:
        unsubscribe(found.append)


def effects(bench: Workbench) -> list[Any]:
    return bench.rows("SELECT n FROM effect ORDER BY serial")


def parked(bench: Workbench) -> list[Any]:
    return bench.rows("SELECT position FROM events.parked_event ORDER BY position")


def outcomes(bench: Workbench) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for position, outcome in bench.settled():
        found.setdefault(outcome, []).append(position)
    return found


def drive(lane: Lane, until: Callable[[], bool]) -> None:
    """Step, and wait as a worker would, until something is true."""
    never = threading.Event()

    def step() -> bool:
        if until():
            return True
        if lane.step().is_idle:
            lane.wait(never)
        return until()

    wait_until(step, what="the lane got there")


def look_now(lane: Lane) -> None:
    """Spare the lane the pause until it would look for itself."""
    lane._parking._look_at = 0.0


class Rests(threading.Event):
    """Somebody is to wait for it, and does not have to."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout)
        return False
