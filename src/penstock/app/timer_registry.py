"""Which functions handle which topics of Redis timers, checked as they come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.require import require
from penstock.core.timer_options import TimerOptions
from penstock.errors import RegistrationError
from penstock.pipeline.timer_signature import TimerPlan


@dataclass(frozen=True, slots=True)
class RegisteredTimer:
    """The handler of a topic as the application wrote it."""

    name: str
    """The full name, `{pipeline}.timer:{topic}`: what the inbox knows it by, for ever."""
    options: TimerOptions
    plan: TimerPlan


class TimerRegistry:
    """The timer handlers of one pipeline."""

    def __init__(self, pipeline_name: str) -> None:
        self._pipeline_name = pipeline_name
        self._timers: dict[str, RegisteredTimer] = {}

    @property
    def timers(self) -> Mapping[str, RegisteredTimer]:
        """By topic."""
        return self._timers

    def add(self, options: TimerOptions, plan: TimerPlan) -> RegisteredTimer:
        """Register a handler. Raises RegistrationError where its topic has one."""
        require(
            options.topic not in self._timers,
            f"Timers {options.topic!r} have two handlers. A timer is handled by one function: "
            "keep one of them, or give the other a topic of its own.",
            RegistrationError,
        )
        timer = RegisteredTimer(options.name(self._pipeline_name), options, plan)
        self._timers[options.topic] = timer
        return timer
