"""What a fault is, and what it finds where it is injected."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import psycopg
import redis

from penstock.errors import PenstockError
from tests.chaos.servers import World
from tests.waiting import wait_until

Thing = TypeVar("Thing")
Injection = Callable[["Scene", random.Random], str | None]

GONE = (psycopg.Error, redis.RedisError, PenstockError, OSError)
"""What a fault meets where another one was faster: it has not happened, and that is all."""

LEASE_SECONDS = 2.0
"""How long the hosts' leases last; some faults are shorter, some longer."""


class Process(Protocol):
    """A process that may be hurt."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def role(self) -> str:
        """supervisor, sender, publisher, or what consumers' workers are called."""

    @property
    def host(self) -> str:
        """Where it runs."""


class Hosts(Protocol):
    """The processes, and what is done to them by people."""

    def processes(self) -> Sequence[Process]:
        """Everything that runs now."""

    def host_names(self) -> list[str]:
        """The hosts that run now."""

    def lose(self, name: str) -> None:
        """A host is gone at once; a new one takes its place."""

    def restart(self, name: str) -> None:
        """A host stops in order and is started again."""

    def freeze(self, name: str) -> list[int]:
        """A host stands still; returns the processes to be continued."""

    def set_slow(self, seconds: float) -> None:
        """Every handler takes so long from now on."""

    @property
    def has_added_consumer(self) -> bool:
        """Whether the consumer that comes later has come."""

    def add_consumer(self) -> str:
        """It comes."""

    def change_lanes(self, count: int) -> None:
        """Another number of lanes is deployed."""

    def pause(self) -> None:
        """A consumer handles nothing until it is resumed."""

    def resume(self) -> None:
        """It goes on."""

    def redrive(self, seconds: float) -> object:
        """Every dead letter gets one more attempt, for so long."""


class Chaos(Protocol):
    """The whole of a run, as far as the nemesis sees it."""

    @property
    def world(self) -> World:
        """The servers."""

    @property
    def hosts(self) -> Hosts:
        """The processes."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Where faults are injected, until somebody calls for calm."""

    world: World
    hosts: Hosts
    calm: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float) -> None:
        """Let a fault last; calm ends it early."""
        self.calm.wait(seconds)


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of trouble. It heals itself: when `inject` returns, it is over."""

    name: str
    takes: str | None
    """What it needs for itself, so that it does not overlap with its like."""
    weight: float
    inject: Injection
    """Says in one line what it did; None: its target was gone, and nothing happened.

    It may raise one of GONE as well, for the same reason. Chance decides everything that the
    state of the world leaves open, before that state is looked at.
    """
    why_not: Callable[[Scene], str | None] = lambda _scene: None
    """The reason why this kind cannot be had on this machine, if there is one."""


def fault(
    name: str,
    *,
    takes: str | None = None,
    weight: float = 1.0,
    why_not: Callable[[Scene], str | None] = lambda _scene: None,
) -> Callable[[Injection], Fault]:
    """Make a fault of a function."""

    def made(inject: Injection) -> Fault:
        return Fault(name, takes, weight, inject, why_not)

    return made


def some(chance: random.Random, things: Sequence[Thing]) -> Thing | None:
    """One of them; None where there are none. One draw, however many there are."""
    place = chance.random()
    return things[int(place * len(things))] if things else None


def mend(undo: Callable[[], object], *, what: str) -> None:
    """Undo a fault, however many tries that takes while servers come and go."""

    def is_undone() -> bool:
        try:
            undo()
        except GONE:
            return False
        return True

    wait_until(is_undone, what=what)
