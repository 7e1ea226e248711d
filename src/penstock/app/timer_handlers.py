"""The part of a pipeline that registers handlers of Redis timers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import cached_property
from typing import Any, TypeVar

from penstock.app.resources import Resources
from penstock.app.timer_queue import timer_queue
from penstock.app.timer_registry import RegisteredTimer, TimerRegistry
from penstock.core.require import require
from penstock.core.retry import DEFAULT_RETRY, Retry, RetryFunction
from penstock.core.settings import Settings
from penstock.core.timer_options import TimerOptions, timer_role
from penstock.errors import RegistrationError
from penstock.pipeline.timer_signature import read_timer_signature
from penstock.stores.timer_queue import RedisTimers

Handler = TypeVar("Handler", bound=Callable[..., Any])


class TimerHandlers(Resources):
    """Registers functions as handlers of topics of Redis timers."""

    name: str

    @property
    def settings(self) -> Settings:
        """The settings of this pipeline."""
        raise NotImplementedError

    @cached_property
    def _timer_registry(self) -> TimerRegistry:
        return TimerRegistry(self.name)

    def _open_timer_store(self) -> RedisTimers:
        """A way to Redis of a worker's own; it outlives an absent server by itself."""
        return timer_queue(self.settings).store

    def check_timers(self, roles: Iterable[str]) -> None:
        """Raise ServerUnsuitable, ServerUnavailable or SettingsError if a topic cannot be served.

        Only topics whose role is among these are looked at.
        """
        wanted = set(roles)
        topics = [topic for topic in self.timer_handlers if timer_role(topic) in wanted]
        if topics:
            with closing(self._open_timer_store()) as store:
                for topic in topics:
                    store.counts(topic)

    @property
    def timer_handlers(self) -> Mapping[str, RegisteredTimer]:
        """The registered handlers of Redis timers, by topic."""
        return self._timer_registry.timers

    def timer(
        self,
        topic: str,
        *,
        max_concurrent: int = 5,
        lease_ttl: float = 30.0,
        polling_interval: float = 0.05,
        max_polling_interval: float = 5.0,
        retry: Retry | RetryFunction | None = None,
        timeout_seconds: float | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register a function as the handler of a topic of Redis timers; it stays as it is.

        At least once; exactly once where it takes a Session, or a psycopg connection, whose
        transaction the worker commits. At most `max_concurrent` run at a time in a process, and as
        many may be repeated when it dies, after `lease_ttl` seconds.
        """
        named: object = topic
        require(
            isinstance(named, str) and bool(named),
            f"A timer's handler names its topic; {getattr(topic, '__name__', topic)!r} is no name. "
            'Write @pipeline.timer("reminders").',
            RegistrationError,
        )
        options = TimerOptions(
            topic=topic,
            max_concurrent=max_concurrent,
            lease_ttl=lease_ttl,
            polling_interval=polling_interval,
            max_polling_interval=max_polling_interval,
            retry=_policy(retry),
            timeout_seconds=timeout_seconds,
        )

        def register(function: Handler) -> Handler:
            plan = read_timer_signature(function, topic, self._resources)
            self._timer_registry.add(options, plan)
            return function

        return register


def _policy(retry: Retry | RetryFunction | None) -> Retry:
    if retry is None:
        return DEFAULT_RETRY
    return retry if isinstance(retry, Retry) or not callable(retry) else Retry.by(retry)
