"""The one loop: steps a stage, waits when it is idle, outlives servers that go away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import psycopg
import redis
from sqlalchemy.exc import DBAPIError

from penstock.core.progress import Progress
from penstock.errors import LeaseLost, ServerUnavailable, ServerUnsuitable
from penstock.stores.postgres import is_lost
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

RECONNECT_FIRST_SECONDS = 0.05
RECONNECT_LONGEST_SECONDS = 2.0


class Stage(Protocol):
    """A part of the pipeline that works in bounded steps."""

    def step(self) -> Progress:
        """Do one bounded piece of work."""

    def wait(self, stop: threading.Event) -> None:
        """Wait for work, for `stop`, or for a moment, whichever comes first."""

    def close(self) -> None:
        """Give back leases and connections; must not raise."""


class Loop:
    """Runs one stage until it is told to stop."""

    def __init__(self, worker: str, open_stage: Callable[[], Stage], stop: threading.Event) -> None:
        self._worker = worker
        self._open_stage = open_stage
        self._stop = stop
        self._lost_at: float | None = None
        self._failures = 0

    def run(self) -> None:
        """Step until stopped. Only errors that no waiting can cure come out."""
        stage: Stage | None = None
        try:
            while not self._stop.is_set():
                try:
                    if stage is None:
                        stage = self._open_stage()
                    self._turn(stage)
                except LeaseLost:
                    stage = _closed(stage)
                except (ServerUnavailable, psycopg.Error, redis.RedisError, DBAPIError) as error:
                    stage = _closed(stage)
                    self._outlive(error)
        finally:
            _closed(stage)

    def _turn(self, stage: Stage) -> None:
        progress = stage.step()
        self._server_is_back()
        if progress.pause_seconds:
            self._stop.wait(progress.pause_seconds)
        elif progress.is_idle:
            stage.wait(self._stop)

    def _outlive(self, error: Exception) -> None:
        """Wait for a server that went away; anything else is not ours to swallow."""
        if isinstance(error, ServerUnsuitable) or not _is_about_a_server(error):
            raise error
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            emit(signals.ServerLost(self._worker, _server_of(error), str(error).strip()))
        delay = min(RECONNECT_FIRST_SECONDS * 2**self._failures, RECONNECT_LONGEST_SECONDS)
        self._failures += 1
        self._stop.wait(delay)

    def _server_is_back(self) -> None:
        if self._lost_at is not None:
            outage = time.monotonic() - self._lost_at
            emit(signals.ServerFound(self._worker, "server", round(outage, 3)))
        self._lost_at = None
        self._failures = 0


def _closed(stage: Stage | None) -> Stage | None:
    if stage is not None:
        stage.close()
    return None


def _is_about_a_server(error: Exception) -> bool:
    if isinstance(error, ServerUnavailable | redis.RedisError):
        return True
    return is_lost(error)


def _server_of(error: Exception) -> str:
    return "Redis" if isinstance(error, redis.RedisError) else "PostgreSQL"
