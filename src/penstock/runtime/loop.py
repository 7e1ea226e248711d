"""The one loop: steps a stage, waits when it is idle, outlives servers that go away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import psycopg
from sqlalchemy.exc import DBAPIError

from penstock.core.failures import is_nobodys_fault
from penstock.core.progress import Progress
from penstock.errors import LeaseLost, ServerUnavailable
from penstock.runtime.heartbeat import LoopPulse
from penstock.stores.outage import Outage
from penstock.stores.postgres import is_outage

_PASSING = (psycopg.errors.QueryCanceled, psycopg.errors.InsufficientPrivilege)


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

    def __init__(
        self,
        worker: str,
        open_stage: Callable[[], Stage],
        stop: threading.Event,
        pulse: LoopPulse | None = None,
    ) -> None:
        self._pulse = pulse or LoopPulse(worker)
        self._open_stage = open_stage
        self._stop = stop
        self._outage = Outage(worker, "PostgreSQL")

    def run(self) -> None:
        """Step until stopped. Only errors that no waiting can cure come out."""
        stage: Stage | None = None
        try:
            while not self._stop.is_set():
                self._pulse.turned()
                try:
                    if stage is None:
                        stage = self._open_stage()
                    self._turn(stage)
                except LeaseLost:
                    stage = _closed(stage)
                except (ServerUnavailable, psycopg.Error, DBAPIError) as error:
                    stage = _closed(stage)
                    self._outlive(error)
        finally:
            _closed(stage)

    def _turn(self, stage: Stage) -> None:
        progress = stage.step()
        self._outage.end()
        if progress.pause_seconds:
            self._pause(progress.pause_seconds)
        elif progress.is_idle:
            stage.wait(self._stop)

    def _outlive(self, error: Exception) -> None:
        """Wait for a server that is away or not well; anything else is not ours to swallow."""
        if not isinstance(error, ServerUnavailable) and not is_outage(error) and not _passes(error):
            raise error
        self._outage.begin(error)
        self._pause(self._outage.pause_seconds)

    def _pause(self, seconds: float) -> None:
        # A retry may be minutes away; a loop that rests until then is not hung.
        with self._pulse.excused:
            self._stop.wait(seconds)


def _passes(error: Exception) -> bool:
    """Whether a statement of our own met a lock, a deadlock or its time limit, or lacks a right.

    Rights that were taken come back; whoever ended for want of them would be set aside for good.
    """
    return is_nobodys_fault(error) or isinstance(error, _PASSING)


def _closed(stage: Stage | None) -> Stage | None:
    if stage is not None:
        stage.close()
    return None
