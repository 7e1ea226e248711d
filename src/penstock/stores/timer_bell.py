"""What wakes a worker of Redis timers: a message from the server, or somebody in its process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import redis

from penstock.errors import PenstockError

# How soon the listener notices that it is to end, and how long it leaves an absent server alone.
TURN_SECONDS = 0.25
END_SECONDS = 5.0


class TimerBell:
    """Listens on one topic's channel, in a thread of its own, from the first wait on.

    A message may be lost with its connection: it only ever makes a worker look earlier.
    """

    def __init__(self, subscriber: Callable[[], Any], channel: str) -> None:
        self._subscriber = subscriber
        self._channel = channel
        self._rung = threading.Event()
        self._stop = threading.Event()
        self._heard = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_listening(self) -> bool:
        """Whether the server would be heard now."""
        return self._heard.is_set()

    def wait(self, seconds: float) -> bool:
        """Return when rung, then True, or after the time. A ring since the last wait counts."""
        self._begin()
        is_rung = self._rung.wait(seconds)
        # Only then: a ring that comes right after the time is over counts at the next wait.
        if is_rung:
            self._rung.clear()
        return is_rung

    def ring(self) -> None:
        """Wake whoever waits, or will next."""
        self._rung.set()

    def close(self) -> None:
        """Listen no more."""
        self._stop.set()
        self._rung.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _begin(self) -> None:
        with self._lock:
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(
                    target=self._listen, name="penstock-timer-bell", daemon=True
                )
                self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            try:
                with contextlib.closing(self._subscriber()) as subscriber:
                    subscriber.subscribe(self._channel)
                    while not self._stop.is_set():
                        message = subscriber.get_message(timeout=TURN_SECONDS)
                        if message is not None:
                            # Being subscribed is a reason too: what came before was not heard.
                            self._heard.set()
                            self._rung.set()
            except (redis.RedisError, PenstockError, OSError):
                # Workers look by themselves after a while; they will say that the server is away.
                self._heard.clear()
                self._stop.wait(TURN_SECONDS)
        self._heard.clear()
