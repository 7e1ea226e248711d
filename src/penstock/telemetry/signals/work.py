"""What happens to those who do the work: leases, cleanup, processes, servers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal

# ── leases ────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LeaseAcquired(Signal, level=Level.INFO):
    """This process may work on a stream in a role."""

    stream_name: str
    role: str
    owner_id: str
    term: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Signal):
    """The leases of this process run on."""

    count: int


@dataclass(frozen=True, slots=True)
class LeaseLost(Signal, level=Level.WARNING):
    """Another worker holds the lease, or it is of no use; nothing was lost or repeated."""

    stream_name: str
    role: str
    owner_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased(Signal, level=Level.INFO):
    """A lease was given back on a clean stop."""

    stream_name: str
    role: str


@dataclass(frozen=True, slots=True)
class PredecessorEnded(Signal, level=Level.WARNING):
    """The open transaction of a lease's former holder was ended."""

    stream_name: str
    role: str
    count: int


# ── cleanup ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RowsPruned(Signal, level=Level.INFO):
    """A round of cleanup has removed rows that nobody needs any more."""

    table: str
    count: int


@dataclass(frozen=True, slots=True)
class PruningHeld(Signal, level=Level.WARNING):
    """Published events are kept for twice their retention, because a reader still needs them."""

    stream_name: str
    by: str
    position: int
    oldest_seconds: int


@dataclass(frozen=True, slots=True)
class PruningFailed(Signal, level=Level.WARNING):
    """A batch of cleanup could not be done; nothing depends on it, and the next round tries."""

    table: str
    reason: str


# ── processes ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WorkerStarted(Signal, level=Level.INFO):
    """A worker process is ready."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStopped(Signal, level=Level.INFO):
    """A worker process has finished what it had in hand."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied(Signal, level=Level.ERROR):
    """A worker process ended without being asked to; it is started again."""

    worker: str
    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class WorkerSilent(Signal, level=Level.ERROR):
    """A worker process gave no sign of life for too long; it is killed and replaced."""

    worker: str
    pid: int
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class HandlerStuck(Signal, level=Level.ERROR):
    """A handler did not end when its time was up; its process ends itself instead."""

    consumer: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class WorkerQuarantined(Signal, level=Level.ERROR):
    """A consumer crashed too often; it is not started again until somebody releases it."""

    name: str
    crashes: int
    reason: str


@dataclass(frozen=True, slots=True)
class QuarantineReleased(Signal, level=Level.INFO):
    """Somebody released a consumer; it is started again."""

    name: str


@dataclass(frozen=True, slots=True)
class ServerLost(Signal, level=Level.WARNING):
    """PostgreSQL, Redis or a resource of the application went away; said once, then waited for."""

    worker: str
    server: str
    error: str


@dataclass(frozen=True, slots=True)
class ServerFound(Signal, level=Level.INFO):
    """The server is back; work goes on where it stopped."""

    worker: str
    server: str
    after_seconds: float
