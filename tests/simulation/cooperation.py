"""The clock, and what threads wait with, for actors: what production modules see instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.machine import NEVER, Actor, Machine, Restless

# Whoever looks at the clock so often without calling any model goes round in circles.
LOOKS_MAX = 5_000


class Present:
    """The machine whose history is going on; production code asks for it by module names."""

    machine: Machine
    wire: Any
    """Where new connections of its processes lead."""


present = Present()


class Clock:
    """Stands in for the module `time`."""

    @staticmethod
    def monotonic() -> float:
        """Ends an actor that does nothing but look."""
        machine = present.machine
        machine.looks += 1
        if machine.looks > LOOKS_MAX and machine.current is not None:
            raise Restless
        return machine.now


class Dice:
    """Stands in for the module `random`."""

    @staticmethod
    def random() -> float:
        return present.machine.dice()


class _Waiting:
    """Actors that wait for something."""

    def __init__(self) -> None:
        self._waiting: list[Actor] = []

    def _wait(self, seconds: float | None) -> None:
        machine = present.machine
        actor = machine.current
        assert actor is not None, "only actors wait"
        self._waiting.append(actor)
        machine.sleep(NEVER if seconds is None else seconds)
        if actor in self._waiting:
            self._waiting.remove(actor)

    def _wake(self) -> None:
        for actor in self._waiting:
            actor.wake_at = present.machine.now
        self._waiting.clear()


class Event(_Waiting):
    """Like threading.Event."""

    def __init__(self) -> None:
        super().__init__()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._wait(timeout)
        return self._is_set


class Lock(_Waiting):
    """Like threading.Lock."""

    def __init__(self) -> None:
        super().__init__()
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._wait(None)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False
        self._wake()


class Condition(_Waiting):
    """Like threading.Condition. Its lock is free: nobody calls a model while he holds it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        self._wait(timeout)

    def wait_for(self, predicate: Callable[[], Any]) -> None:
        while not predicate():
            self._wait(None)

    def notify_all(self) -> None:
        self._wake()


class Threading:
    """Stands in for the module `threading`."""

    Event = Event
    Lock = Lock
    Condition = Condition
