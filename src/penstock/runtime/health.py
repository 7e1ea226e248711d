"""What a supervisor says about its workers: alive, ready, and in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from penstock.telemetry import metrics
from penstock.telemetry.metrics import Reading

COUNTER_QUARANTINED = metrics.WORKER_QUARANTINED.name
"""How often this supervisor has set a worker aside."""
GAUGE_QUARANTINED = metrics.WORKERS_QUARANTINED.name
"""How many of its workers are set aside now."""

TURNING_SECONDS = 10.0
ANSWERED_SECONDS = 15.0


class WorkerState(StrEnum):
    """Where a worker stands."""

    STARTING = "starting"
    RUNNING = "running"
    WAITING = "waiting to be started"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker at one moment."""

    name: str
    pid: int | None
    state: WorkerState
    restarts: int
    heartbeat_age_seconds: float | None


@dataclass(frozen=True, slots=True)
class GroupReport:
    """All workers of a supervisor at one moment."""

    made_at: float
    """In monotonic time; a report that grows old means that the supervisor stands still."""
    workers: tuple[WorkerReport, ...]
    quarantined: tuple[str, ...]
    quarantines: int
    database_answered_at: float | None
    """In monotonic time; None where it never has."""
    is_stopping: bool = False

    def is_alive(self, now: float) -> bool:
        """Whether the supervisor's loop turns."""
        return now - self.made_at < TURNING_SECONDS

    def obstacles(self, now: float) -> list[str]:
        """Why this supervisor is not ready; empty when it is."""
        found = [
            f"{worker.name} is {worker.state}"
            for worker in self.workers
            if worker.state is not WorkerState.RUNNING
        ]
        if not self.is_alive(now):
            found.append("the supervisor stands still")
        if self.is_stopping:
            found.append("the supervisor is stopping")
        answered_at = self.database_answered_at
        if answered_at is None or now - answered_at > ANSWERED_SECONDS:
            found.append("the database does not answer")
        return found

    def as_json(self, now: float) -> dict[str, Any]:
        """For people and programs."""
        return {
            "alive": self.is_alive(now),
            "workers": [asdict(worker) for worker in self.workers],
            "quarantined": list(self.quarantined),
            COUNTER_QUARANTINED: self.quarantines,
            GAUGE_QUARANTINED: len(self.quarantined),
        }

    def as_readings(self) -> list[Reading]:
        """For whoever collects metrics."""
        running = sum(worker.state is WorkerState.RUNNING for worker in self.workers)
        restarts = (
            Reading(metrics.WORKER_RESTARTS, (worker.name,), worker.restarts)
            for worker in self.workers
        )
        return [
            Reading(metrics.WORKER_QUARANTINED, (), self.quarantines),
            Reading(metrics.WORKERS_QUARANTINED, (), len(self.quarantined)),
            Reading(metrics.WORKERS_RUNNING, (), running),
            Reading(metrics.WORKERS_WANTED, (), len(self.workers)),
            *restarts,
        ]
