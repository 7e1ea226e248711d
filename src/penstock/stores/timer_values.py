"""Timers in Redis as values: claimed, queued, dead, and what became of an order."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Literal


class Outcome(StrEnum):
    """What became of a claimed timer when its worker wanted to settle or keep it."""

    DONE = "done"
    """It was still the worker's, and is what the worker asked for."""
    REARMED = "rearmed"
    """Somebody has published it anew, so it stays for its new time; nothing was changed."""
    TAKEN = "taken"
    """The lease was over and another worker has it; nothing was changed."""
    GONE = "gone"
    """It was cancelled, or settled by somebody else; nothing was changed."""


class Redriven(StrEnum):
    """What became of an order to redrive a dead timer."""

    REDRIVEN = "redriven"
    UNKNOWN = "unknown"
    """There is no dead timer of that id; nothing was changed."""
    PENDING = "pending"
    """A timer of that id has been armed since, and would be replaced; nothing was changed."""


@dataclass(frozen=True, slots=True)
class ClaimedTimer:
    """A timer that a worker has under lease."""

    topic: str
    timer_id: str
    payload: bytes
    due_score: float
    """When this arming was due, in seconds since 1970: the same for each of its attempts."""
    lease_score: float
    """When the lease ends, by the server's clock; together with the payload, what proves it."""
    attempt: int
    """1 for the first attempt of this arming."""

    @property
    def due_at(self) -> datetime:
        """When this arming was due, in UTC."""
        return moment_of(self.due_score)


@dataclass(frozen=True, slots=True)
class Claims:
    """What one look at a topic brought."""

    timers: tuple[ClaimedTimer, ...]
    wait_seconds: float | None
    """Until the next timer is due or a lease ends, by the server's clock; 0.0: one is due now;
    None: there is no other."""
    orphans: tuple[str, ...]
    """Timers without a payload, which were removed: there was nothing to handle."""
    now_score: float
    """The server's time at the claim, in seconds since 1970."""
    unreadable: tuple[str, ...] = ()
    """Timers whose id is no text: buried, under a name that is."""


@dataclass(frozen=True, slots=True)
class QueuedTimer:
    """A timer as operators see it."""

    topic: str
    timer_id: str
    score: float
    """Due at; for a leased one the end of its lease; for a failed one its next attempt."""
    due_score: float
    """When this arming was due at first."""
    attempts: int
    """How many attempts have begun; 0 before the first."""
    state: Literal["pending", "leased", "retrying"]
    """Leased: being handled, or its worker died. Retrying: it waits after a failed attempt."""


@dataclass(frozen=True, slots=True)
class DeadTimer:
    """A timer that was buried."""

    topic: str
    timer_id: str
    due_score: float
    attempts: int
    buried_score: float
    error_type: str
    error_message: str


def moment_of(score: float) -> datetime:
    """A score as a time in UTC; the nearest that can be expressed for one far out of range."""
    try:
        return datetime.fromtimestamp(score, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=UTC) if score > 0 else datetime.min.replace(tzinfo=UTC)
