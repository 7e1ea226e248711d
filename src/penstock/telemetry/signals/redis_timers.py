"""What happens to Redis timers: claimed, handled, failed, buried, lost to somebody else."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class TimersClaimed(Signal):
    """A worker has taken due timers of a topic under lease; their handler is called next."""

    consumer: str
    count: int
    late_ms: float
    """How long ago the one that was due first was due."""


@dataclass(frozen=True, slots=True)
class TimerOrphaned(Signal, level=Level.WARNING):
    """A timer had no payload, so there was nothing to handle; it is removed."""

    consumer: str
    timer_id: str


@dataclass(frozen=True, slots=True)
class TimerWritten(Signal):
    """What a timer's handler wrote is committed, with its inbox row; Redis is told next."""

    consumer: str
    timer_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerHandled(Signal):
    """A timer is handled and removed."""

    consumer: str
    timer_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerRepeated(Signal, level=Level.INFO):
    """A timer came again whose effects are committed; it is removed, and nothing was repeated."""

    consumer: str
    timer_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerFailed(Signal, level=Level.ERROR):
    """A handler failed on a timer; what comes next is decided."""

    consumer: str
    timer_id: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class TimerRetried(Signal, level=Level.WARNING):
    """A failed timer waits for its next attempt."""

    consumer: str
    timer_id: str
    attempt: int
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class TimerBuried(Signal, level=Level.ERROR):
    """A timer is a dead letter now, until somebody redrives it."""

    consumer: str
    timer_id: str
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class TimerRejected(Signal, level=Level.WARNING):
    """A handler has rejected a timer, which is removed for good and is no dead letter."""

    consumer: str
    timer_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerReplaced(Signal):
    """A timer was armed anew or cancelled while its handler ran; it stays as it was left."""

    consumer: str
    timer_id: str


@dataclass(frozen=True, slots=True)
class TimerOvertaken(Signal, level=Level.WARNING):
    """A lease was over before its handler: another worker has the timer, and may repeat it."""

    consumer: str
    timer_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TimerDeferred(Signal):
    """A timer could not be tried just now, through no fault of its own; no attempt is counted."""

    consumer: str
    timer_id: str
    retry_after_seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class TimersGivenBack(Signal, level=Level.INFO):
    """A worker that ends gave back timers whose handlers had not ended; they are due at once."""

    consumer: str
    count: int
