"""The hands of a timer worker: threads that handle one timer each, and the timers in them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from penstock.errors import ServerUnavailable, ServerUnsuitable
from penstock.stores.outage import Outage
from penstock.stores.timer_queue import ClaimedTimer, Outcome

RENEWALS_PER_LEASE = 3
PAUSE_SECONDS = 0.1


class Held:
    """A timer in hand: one thread renews its lease, another settles it, never both at once."""

    def __init__(self, timer: ClaimedTimer, claimed_at: float, lease_seconds: float) -> None:
        self.lock = threading.Lock()
        self.timer = timer
        self.outcome: Outcome | None = None
        """What became of it, once that is known; it is nobody's to settle any more."""
        self._lease_seconds = lease_seconds
        self.renew_at = self.ends_at = 0.0
        self.extend(timer, claimed_at)

    def extend(self, timer: ClaimedTimer, asked_at: float) -> None:
        """The lease runs again from when it was asked for, which is no later than it began."""
        self.timer = timer
        self.renew_at = asked_at + self._lease_seconds / RENEWALS_PER_LEASE
        self.ends_at = asked_at + self._lease_seconds

    def settle(self, act: Callable[[ClaimedTimer], Outcome]) -> Outcome | None:
        """Settle it, unless it is lost; None: Redis refused or was away until it was over."""
        while True:
            with self.lock:
                if self.outcome is not None:
                    return self.outcome
                try:
                    self.outcome = act(self.timer)
                except (ServerUnavailable, ServerUnsuitable):
                    if time.monotonic() > self.ends_at:
                        return None
                else:
                    return self.outcome
            threading.Event().wait(PAUSE_SECONDS)

    def answer(self, publish: Callable[[], None]) -> None:
        """Publish an answer, unless Redis refuses or is away until the lease is over."""
        while True:
            try:
                publish()
            except (ServerUnavailable, ServerUnsuitable):
                if time.monotonic() > self.ends_at:
                    return
            else:
                return
            threading.Event().wait(PAUSE_SECONDS)


class SharedOutage(Outage):
    """An outage that several hands notice at once, and that is told once all the same."""

    def __init__(self, worker: str, server: str) -> None:
        super().__init__(worker, server)
        self._lock = threading.Lock()

    def begin(self, error: Exception) -> None:
        """The server did not answer."""
        with self._lock:
            super().begin(error)

    def end(self) -> None:
        """The server answered."""
        if self.is_going_on:
            with self._lock:
                super().end()


class Hand(Protocol):
    """Handles one timer at a time, in a thread of its own."""

    def handle(self, held: Held) -> None:
        """Call the handler and settle the timer. Raises only what no waiting can cure."""

    def interrupt(self) -> None:
        """Cut the transaction that the handler works in, if any, from another thread."""

    def close(self) -> None:
        """Give up connections; must not raise."""


class Hands:
    """At most so many threads, made as they are needed."""

    def __init__(
        self, name: str, count_max: int, open_hand: Callable[[], Hand], on_free: Callable[[], None]
    ) -> None:
        self._name = name
        self._count_max = count_max
        self._open_hand = open_hand
        self._on_free = on_free
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Held | None] = queue.SimpleQueue()
        self._held: dict[Held, Hand | None] = {}
        self._threads = 0
        self.failure: BaseException | None = None
        """What ended a thread and is not to be survived."""

    @property
    def free(self) -> int:
        """How many more timers can be taken."""
        return self._count_max - len(self._held)

    def held(self) -> list[Held]:
        """The timers in hand."""
        with self._lock:
            return list(self._held)

    def take(self, held: Held) -> None:
        """Have a timer handled; there must be a free hand."""
        with self._lock:
            self._held[held] = None
            if len(self._held) > self._threads:
                self._threads += 1
                threading.Thread(
                    target=self._work, name=f"penstock-{self._name}-{self._threads}", daemon=True
                ).start()
        self._jobs.put(held)

    def interrupt(self, held: Held) -> None:
        """Cut the transaction of a timer's handler."""
        with self._lock:
            hand = self._held.get(held)
        if hand is not None:
            hand.interrupt()

    def close(self) -> None:
        """Let all threads end as soon as they are free."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        hand: Hand | None = None
        while (held := self._jobs.get()) is not None:
            try:
                hand = hand or self._open_hand()
                with self._lock:
                    self._held[held] = hand
                hand.handle(held)
            except BaseException as error:  # noqa: BLE001 - carried to the stage, raised there
                self.failure = error
            finally:
                with self._lock:
                    del self._held[held]
                self._on_free()
        if hand is not None:
            hand.close()
