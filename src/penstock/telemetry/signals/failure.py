"""What happens to events that fail: parked, held, buried, and effects on the outside."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal

# ── failing and parking ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EventFailed(Signal, level=Level.ERROR):
    """A handler failed on an event and nothing of it happened; what comes next is decided."""

    consumer: str
    position: int
    event_uuid: str
    attempt: int
    error: str


@dataclass(frozen=True, slots=True)
class EventParked(Signal, level=Level.WARNING):
    """A failed event waits for its next attempt, and its key's later events behind it."""

    consumer: str
    position: int
    event_uuid: str
    attempt: int
    retry_after_seconds: float


@dataclass(frozen=True, slots=True)
class SuccessorsParked(Signal):
    """Later events of parked keys queue up behind them."""

    consumer: str
    count: int


@dataclass(frozen=True, slots=True)
class KeyBacklogged(Signal, level=Level.ERROR):
    """More events wait behind one failing event than parked_per_key_max; others go on."""

    consumer: str
    position: int
    waiting: int


@dataclass(frozen=True, slots=True)
class KeyHeld(Signal, level=Level.ERROR):
    """A key waits until somebody redrives or discards its first event."""

    consumer: str
    position: int
    event_uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class EventBuried(Signal, level=Level.ERROR):
    """An event is a dead letter now; the consumer goes on without it."""

    consumer: str
    position: int
    event_uuid: str
    reason: str


@dataclass(frozen=True, slots=True)
class ParkedHandled(Signal, level=Level.INFO):
    """Events that were parked are handled, in order; effects and books committed together."""

    consumer: str
    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class CompletedThenFailed(Signal, level=Level.WARNING):
    """A handler failed after it had completed its event, which stays handled."""

    consumer: str
    position: int
    event_uuid: str
    error: str


# ── effects ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EffectStarted(Signal):
    """It is recorded that a call to the outside begins; the call comes next."""

    consumer: str
    event_uuid: str
    effect: str


@dataclass(frozen=True, slots=True)
class EffectCalled(Signal):
    """The call to the outside has returned; its result is not recorded yet."""

    consumer: str
    event_uuid: str
    effect: str


@dataclass(frozen=True, slots=True)
class EffectRecorded(Signal):
    """The result of a call to the outside is recorded; no retry calls again."""

    consumer: str
    event_uuid: str
    effect: str


@dataclass(frozen=True, slots=True)
class EffectInterrupted(Signal, level=Level.WARNING):
    """An earlier attempt ended in the middle of a call: nobody knows whether it happened."""

    consumer: str
    event_uuid: str
    effect: str
    calls: int
