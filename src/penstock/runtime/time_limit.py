"""A time limit for one call in its own thread: asked to end first, then the process ends.

It wraps the call instead of being a context manager. An asynchronous exception may arrive at the
very entry of `__exit__`, before any of its lines can catch it; between `try` and `except` of one
and the same function there is no such gap.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from penstock.errors import HandlerTimeout
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

T = TypeVar("T")

GRACE_SECONDS = (1.0, 5.0)
"""At least and at most; in between, as long as the limit itself."""
EXIT_STUCK = 70
"""EX_SOFTWARE: nothing but the end of the process could stop the handler."""
IDLE_ROUNDS_MAX = 100
LAST_WORDS_SECONDS = 1.0

_logger = logging.getLogger("penstock")


class _TimeIsUp(BaseException):
    """Raised inside the call. Not an Exception: a handler's `except Exception` must not eat it."""


class TimeLimit:
    """Calls functions that must end within a time; one serves all calls of one handler."""

    def __init__(
        self, seconds: float, *, consumer: str, on_overdue: Callable[[], object] = lambda: None
    ) -> None:
        self.seconds = seconds
        self.consumer = consumer
        self.on_overdue = on_overdue
        """Called from another thread when the time is up, to end what Python cannot interrupt,
        such as a query; it has to return within the grace."""

    @property
    def grace_seconds(self) -> float:
        """How long after its time a call may take to end."""
        shortest, longest = GRACE_SECONDS
        return min(longest, max(shortest, self.seconds))

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it in this thread. Raises HandlerTimeout if it was not done in time.

        Whatever happens, no exception of ours is pending or comes later once this has returned.
        """
        armed = _Armed(self)
        try:
            try:
                _watchdog.arm(armed)
                result = function(*arguments)
            finally:
                # The exception may arrive even in here; there is only one, so a second try ends.
                _watchdog.disarm(armed)
        except BaseException as error:
            _watchdog.disarm(armed)
            if not armed.is_overdue:
                raise
            # Whatever it is, a cancelled query perhaps: this is why, and there it was.
            raise self._timeout() from error
        if armed.is_overdue:
            raise self._timeout()
        return result

    def awaited(self, function: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        """The same for `async def`: it is cancelled at the await where it is."""

        async def within(*arguments: Any) -> T:
            try:
                async with asyncio.timeout(self.seconds) as scope:
                    return await function(*arguments)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise self._timeout() from error

        return within

    def _timeout(self) -> HandlerTimeout:
        return HandlerTimeout(
            f"The handler of {self.consumer} exceeded its timeout_seconds={self.seconds:g}. "
            "Its transaction is rolled back, so nothing of it happened, and its retry policy says "
            "what follows. Make the handler faster, or raise timeout_seconds."
        )


class _Armed:
    """One call under a limit."""

    __slots__ = ("deadline", "is_ending", "is_overdue", "is_raised", "limit", "settled", "thread")

    def __init__(self, limit: TimeLimit) -> None:
        self.limit = limit
        self.thread = threading.get_ident()
        self.deadline = time.monotonic() + limit.seconds
        self.is_overdue = False
        self.is_ending = False
        self.is_raised = False
        self.settled: threading.Event | None = None


class _Watchdog:
    """One thread for all calls of the process. Arming does not wake it.

    It never sleeps longer than the shortest limit it knows, so it is awake before any deadline
    that was set meanwhile. After a while without calls it sleeps until it is woken.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[_Armed] = set()
        self._shortest_seconds = float("inf")
        self._is_awake = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def arm(self, armed: _Armed) -> None:
        with self._lock:
            self._calls.add(armed)
            if self._is_awake and armed.limit.seconds >= self._shortest_seconds:
                return
        self._rouse(armed.limit.seconds)

    def disarm(self, armed: _Armed) -> None:
        with self._lock:
            armed.is_ending = True
            if not armed.is_overdue:
                self._calls.discard(armed)
                return
            if armed.is_raised:
                _clear_exception(armed.thread)
        # What ends the query must be over, or it would end the next one's.
        assert armed.settled is not None
        armed.settled.wait()
        with self._lock:
            self._calls.discard(armed)

    def _rouse(self, seconds: float) -> None:
        with self._lock:
            self._shortest_seconds = min(self._shortest_seconds, seconds)
            self._is_awake = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch, name="penstock-time-limit", daemon=True
                )
                self._thread.start()
        self._wake.set()

    def _watch(self) -> None:
        idle_rounds = 0
        while True:
            with self._lock:
                idle_rounds = 0 if self._calls else idle_rounds + 1
                self._is_awake = idle_rounds < IDLE_ROUNDS_MAX
                pause_seconds = self._judge() if self._is_awake else None
            self._wake.wait(pause_seconds)
            self._wake.clear()

    def _judge(self) -> float:
        """Act on what is overdue; returns when to look again, in seconds."""
        now = time.monotonic()
        next_at = now + self._shortest_seconds
        for armed in self._calls:
            if now < armed.deadline:
                next_at = min(next_at, armed.deadline)
            elif not armed.is_overdue:
                armed.is_overdue = True
                armed.settled = threading.Event()
                armed.deadline = now + armed.limit.grace_seconds
                next_at = min(next_at, armed.deadline)
                # On a thread of its own: it speaks to a server, and others have limits too.
                threading.Thread(target=self._end, args=(armed,), daemon=True).start()
            else:
                _end_process(armed.limit)
        return max(0.0, next_at - now)

    def _end(self, armed: _Armed) -> None:
        assert armed.settled is not None
        try:
            armed.limit.on_overdue()
        except Exception:
            _logger.exception("ending what a handler of %s waits for failed", armed.limit.consumer)
        with self._lock:
            if not armed.is_ending:
                armed.is_raised = True
                _raise_in(armed.thread)
        armed.settled.set()


def _end_process(limit: TimeLimit) -> None:
    stuck = signals.HandlerStuck(limit.consumer, limit.seconds)
    # The handler may hold the very lock that a log line needs.
    telling = threading.Thread(target=emit, args=(stuck,), daemon=True)
    telling.start()
    telling.join(LAST_WORDS_SECONDS)
    os._exit(EXIT_STUCK)


_watchdog = _Watchdog()
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc


def _raise_in(thread: int) -> None:
    _set_exception(ctypes.c_ulong(thread), ctypes.py_object(_TimeIsUp))


def _clear_exception(thread: int) -> None:
    _set_exception(ctypes.c_ulong(thread), None)
