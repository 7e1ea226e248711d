"""How many crashes a worker may have before something else than a restart is called for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from penstock.core.require import require

SLOW_CRASHES_MAX = 15
SLOW_WINDOW_SECONDS = 3600.0
HEALTHY_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Crash:
    """One death that nobody asked for."""

    worker_id: str
    at_seconds: float
    """In the supervisor's monotonic time: a clock that is set right must not change the count."""
    ran_seconds: float
    exit_code: int
    died_at: datetime
    """For people."""
    was_silent: bool = False
    """The supervisor killed it, because its heartbeat had stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashLimits:
    """How many crashes are too many: quickly one after the other, or again and again."""

    crashes_max: int = 5
    window_seconds: float = 60.0
    slow_crashes_max: int = SLOW_CRASHES_MAX
    slow_window_seconds: float = SLOW_WINDOW_SECONDS
    healthy_seconds: float = HEALTHY_SECONDS

    def __post_init__(self) -> None:
        require(self.crashes_max >= 1, "crashes_max must be at least 1")
        require(self.window_seconds > 0, "crash_window_seconds must be positive")

    def exceeded_by(self, crashes: Sequence[Crash]) -> str | None:
        """Why these crashes, oldest first, are too many; None where they are not."""
        quick = len(self._in_a_row(crashes))
        if quick >= self.crashes_max:
            return f"{quick} crashes within {self.window_seconds:g} s"
        # A healthy run forgives nothing here: a crash every 61 s is a loop too.
        slow = len(_since_last(crashes, self.slow_window_seconds))
        if slow >= self.slow_crashes_max:
            return f"{slow} crashes within {self.slow_window_seconds:g} s"
        return None

    def _in_a_row(self, crashes: Sequence[Crash]) -> Sequence[Crash]:
        """The latest crashes that lie in the window, without a healthy run between them."""
        recent = _since_last(crashes, self.window_seconds)
        healthy = [n for n, crash in enumerate(recent) if crash.ran_seconds >= self.healthy_seconds]
        return recent[healthy[-1] :] if healthy else recent


class CrashBudget:
    """The crashes of one worker that still count."""

    def __init__(self, limits: CrashLimits) -> None:
        self._limits = limits
        self.crashes: tuple[Crash, ...] = ()

    @property
    def excess(self) -> str | None:
        """Why the budget is exhausted; None while it is not."""
        return self._limits.exceeded_by(self.crashes)

    def record(self, crash: Crash) -> None:
        """Count a crash; those too old to matter are forgotten."""
        longest = max(self._limits.slow_window_seconds, self._limits.window_seconds)
        self.crashes = tuple(_since_last([*self.crashes, crash], longest))

    def excuse(self, worker_id: str) -> None:
        """Something else than the worker is to blame for the crash of this process."""
        self.crashes = tuple(crash for crash in self.crashes if crash.worker_id != worker_id)

    def forgive(self) -> None:
        """Start with a clean sheet."""
        self.crashes = ()


def _since_last(crashes: Sequence[Crash], seconds: float) -> Sequence[Crash]:
    if not crashes:
        return ()
    return [crash for crash in crashes if crashes[-1].at_seconds - crash.at_seconds <= seconds]
