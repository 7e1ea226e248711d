"""What happens to timers when they are due."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class TimersFired(Signal):
    """Timers were due and are events now; `late_ms` is how late the latest of them was."""

    count: int
    late_ms: int


@dataclass(frozen=True, slots=True)
class TimersLate(Signal, level=Level.WARNING):
    """Firing is behind: nobody did it for a while, or there is more than it can keep up with."""

    late_seconds: int


@dataclass(frozen=True, slots=True)
class TimerHeld(Signal, level=Level.ERROR):
    """A timer cannot be fired as it is. It stays where it is until somebody reschedules it."""

    timer_id: str
    stream_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimerShredded(Signal, level=Level.INFO):
    """A timer's key was destroyed on purpose, so it was due and is gone without an event."""

    timer_id: str
    stream_name: str
    key_id: str


@dataclass(frozen=True, slots=True)
class TimersBlocked(Signal, level=Level.ERROR):
    """A stream's timers are due and wait for a data key; those of other streams go on."""

    stream_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class TimersUnblocked(Signal, level=Level.INFO):
    """The data key is there again, and the stream's timers are fired."""

    stream_name: str


@dataclass(frozen=True, slots=True)
class FiringFailed(Signal, level=Level.ERROR):
    """Timers are due and PostgreSQL refuses to fire them; they wait, and are tried again."""

    reason: str


@dataclass(frozen=True, slots=True)
class TimekeeperSlept(Signal):
    """Nothing is due; whoever schedules something sooner wakes it."""

    seconds: float
