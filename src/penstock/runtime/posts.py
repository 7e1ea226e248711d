"""A post is filled by one child process at a time; after a death it decides what comes next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.core.crash_budget import Crash, CrashBudget, CrashLimits
from penstock.runtime.children import Child, ProcessSpec, Spare
from penstock.runtime.health import WorkerReport, WorkerState

RESTART_FIRST_SECONDS = 0.1
RESTART_LONGEST_SECONDS = 5.0
RESTART_LOOPING_SECONDS = 30.0
HEALTHY_SECONDS = 10.0
EXIT_SURROUNDINGS = 75
"""EX_TEMPFAIL: a worker ends with it where a server, not the worker, is to blame."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start the next one after a pause."""

    seconds: float
    excess: str | None = None
    """Why the pause is a long one."""


@dataclass(frozen=True, slots=True)
class AwaitInquiry:
    """Too many crashes, unless one of them turns out to be somebody else's doing."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Start it no more."""

    reason: str


class Post:
    """One process that shall run, and what became of those that did."""

    def __init__(self, spec: ProcessSpec, limits: CrashLimits | None) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.due_at: float | None = None
        """When the next one is started; None while one runs, or while none shall."""
        self.is_quarantined = False
        self.is_waiting_for_inquiry = False
        self._budget = CrashBudget(limits) if limits is not None else None
        self._inquiries: set[str] = set()
        self._failures_in_a_row = 0
        self._starts = 0

    @property
    def is_starting(self) -> bool:
        """Whether its process has not given a sign of life yet."""
        return self._state() is WorkerState.STARTING

    @property
    def was_filled(self) -> bool:
        """Whether there has ever been a process here."""
        return self._starts > 0

    @property
    def is_filled(self) -> bool:
        """Whether nothing is under way here."""
        return self._state() in {WorkerState.RUNNING, WorkerState.QUARANTINED}

    @property
    def crashes(self) -> tuple[Crash, ...]:
        """Those that still count."""
        return self._budget.crashes if self._budget is not None else ()

    def fill(self, spare: Spare | None = None) -> Child:
        """Start a child, or make the spare one. Raises OSError where that fails."""
        self.due_at = None
        self.child = Child(self.spec, spare)
        self._starts += 1
        return self.child

    def record_death(self, child: Child) -> None:
        """Remember a death; whether it counts is known when its inquiry ends."""
        now = time.monotonic()
        ran_seconds = now - child.started_at
        if ran_seconds >= HEALTHY_SECONDS:
            self._failures_in_a_row = 0
        self._inquiries.add(child.worker_id)
        exit_code = child.process.returncode
        if self._budget is not None and exit_code != EXIT_SURROUNDINGS:
            self._budget.record(
                Crash(
                    child.worker_id,
                    now,
                    round(ran_seconds, 3),
                    exit_code,
                    datetime.now(UTC),
                    child.was_silent,
                )
            )

    def end_inquiry(self, worker_id: str, *, is_explained: bool) -> None:
        """It is known now whether an event killed the process."""
        self._inquiries.discard(worker_id)
        if is_explained and self._budget is not None:
            self._budget.excuse(worker_id)

    def decide(self) -> RestartAfter | AwaitInquiry | SetAside:
        """What to do about an empty post."""
        excess = self._budget.excess if self._budget is not None else None
        if excess is not None and self.spec.quarantine_as is not None:
            return AwaitInquiry() if self._inquiries else SetAside(excess)
        delay_seconds = restart_delay_seconds(self._failures_in_a_row)
        self._failures_in_a_row += 1
        if excess is not None:
            return RestartAfter(max(delay_seconds, RESTART_LOOPING_SECONDS), excess)
        return RestartAfter(delay_seconds)

    def release(self) -> None:
        """Somebody has looked after it: start it at once, with a clean sheet."""
        self.is_quarantined = False
        self._failures_in_a_row = 0
        if self._budget is not None:
            self._budget.forgive()
        if self.child is None:
            self.due_at = time.monotonic()

    def report(self, now: float) -> WorkerReport:
        """How it stands."""
        child = self.child
        beat_at = child.beat_at if child is not None else None
        return WorkerReport(
            name=self.spec.name,
            pid=child.process.pid if child is not None else None,
            state=self._state(),
            restarts=max(0, self._starts - 1),
            heartbeat_age_seconds=None if beat_at is None else round(now - beat_at, 3),
        )

    def _state(self) -> WorkerState:
        if self.child is None:
            return WorkerState.QUARANTINED if self.is_quarantined else WorkerState.WAITING
        if self.child.listener is not None and self.child.beat_at is None:
            return WorkerState.STARTING
        return WorkerState.RUNNING


def restart_delay_seconds(failures: int) -> float:
    """How long to wait after so many deaths in a row before this one."""
    return float(min(RESTART_FIRST_SECONDS * 2 ** min(failures, 10), RESTART_LONGEST_SECONDS))
