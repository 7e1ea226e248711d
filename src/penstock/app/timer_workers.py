"""Opens the stages that handle Redis timers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import psycopg

from penstock.app.handler_sends import HandlerSends
from penstock.app.time_limits import limited
from penstock.app.timer_registry import RegisteredTimer
from penstock.app.worker_connections import SessionFactory, open_worker_connection
from penstock.core.settings import Settings
from penstock.errors import RegistrationError
from penstock.pipeline.timer_attempt import TimerHand
from penstock.pipeline.timer_calling import (
    Calls,
    ExactlyOnceCalls,
    PlainCalls,
    TimerSeams,
)
from penstock.pipeline.timer_worker import TimerWorker
from penstock.runtime.loop import Stage
from penstock.runtime.stopping import seconds_to_end
from penstock.stores.outage import Outage
from penstock.stores.timer_queue import RedisTimers

Control = Callable[[], psycopg.Connection[Any]]


class TimerWorkers:
    """Builds the stage of a topic, for whoever runs it."""

    def __init__(
        self,
        settings: Settings,
        handlers: Mapping[str, RegisteredTimer],
        *,
        open_store: Callable[[], RedisTimers],
        session_factory: SessionFactory,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._settings = settings
        self._handlers = handlers
        self._open_store = open_store
        self._session_factory = session_factory
        self._around = around

    def named(self, topic: str) -> RegisteredTimer:
        """The handler of a topic. Raises RegistrationError where the application has none."""
        if topic not in self._handlers:
            known = ", ".join(self._handlers) or "none"
            raise RegistrationError(
                f"There is no handler of timers {topic!r}; topics that have one: {known}."
            )
        return self._handlers[topic]

    def open(self, timer: RegisteredTimer, control: Control) -> Stage:
        """The stage of one topic, in this process."""
        store = self._open_store()
        seams = self._seams(timer, control)

        def open_hand(postgres: Outage) -> TimerHand:
            return TimerHand(
                timer.name,
                timer.options,
                calls=self._calls(timer, seams),
                store=store,
                is_exactly_once=timer.plan.is_exactly_once,
                postgres=postgres,
            )

        return TimerWorker(
            timer.name,
            timer.options,
            store,
            open_hand=open_hand,
            seconds_to_end=lambda: seconds_to_end() or self._settings.shutdown_seconds,
        )

    def _calls(self, timer: RegisteredTimer, seams: TimerSeams) -> Calls:
        if timer.plan.is_exactly_once:
            return ExactlyOnceCalls(timer.name, timer.plan, seams, self._settings.schema)
        return PlainCalls(timer.plan, seams)

    def _seams(self, timer: RegisteredTimer, control: Control) -> TimerSeams:
        sends = HandlerSends(self._settings, control)
        return TimerSeams(
            open_worker=lambda: open_worker_connection(
                self._settings.database_url,
                timer.name,
                is_async=timer.plan.is_async,
                factory=self._session_factory,
            ),
            insert_sends=sends.insert,
            limited=partial(
                limited,
                name=timer.name,
                seconds=timer.options.timeout_seconds,
                is_async=timer.plan.is_async,
            ),
            around=self._around,
        )
