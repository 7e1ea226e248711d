"""Processes and actors that take turns: whoever calls a model may lose the processor there."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

NEVER = float("inf")
# How likely an actor is interrupted where it calls a model; otherwise it goes on at once.
SWITCH_SHARE = 0.3
TURN_SECONDS = 0.05
# Whoever calls models so often and never sleeps is busy for nothing: there is not that much to do.
RESTLESS_CALLS_MAX = 150


class Killed(BaseException):
    """Ends whatever an actor is doing, as SIGKILL would: nothing that it does counts any more."""


class Restless(BaseException):
    """Ends an actor that would never let anybody else go on."""


class Process:
    """A worker process: its actors live, pause and die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.paused_until = 0.0
        self.actors: list[Actor] = []
        self.at_end: list[Callable[[], None]] = []
        """What the operating system does when the process is gone."""


class Actor:
    """One thread of a process."""

    __slots__ = ("calls", "greenlet", "is_alive", "is_begun", "live", "name", "process", "wake_at")

    def __init__(
        self, name: str, process: Process, live: Callable[[], None], on: greenlet, wake_at: float
    ) -> None:
        self.name = name
        self.process = process
        self.live = live
        self.greenlet = on
        self.wake_at = wake_at
        self.calls = 0
        """Of models, since it slept."""
        self.is_begun = False
        self.is_alive = True


class Players:
    """Greenlets that play one actor after another: a new one costs memory from the system."""

    def __init__(self) -> None:
        self.hub: Any = getcurrent()
        self._free: list[greenlet] = []

    def take(self) -> greenlet:
        """One that plays nobody."""
        return self._free.pop() if self._free else greenlet(self._play, self.hub)

    def leave(self, actor: Actor) -> None:
        """It is over, or never began."""
        actor.is_alive = False
        self._free.append(actor.greenlet)

    def _play(self, actor: Actor) -> None:
        while True:
            actor.is_begun = True
            actor.live()
            self.leave(actor)
            actor = self.hub.switch()


_players: dict[Any, Players] = {}
"""By the greenlet that takes turns with theirs: one in each thread."""


class Machine:
    """One history: a clock, a dice, and actors of which one runs at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311 - a history is to be repeatable
        self.dice = self.random.random
        self.now = 1000.0
        self.switch_share = SWITCH_SHARE
        self.turn_seconds = TURN_SECONDS
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self.deaths = 0
        self.violations: list[str] = []
        self.tell: Callable[[str], None] | None = None
        """Where a trace goes."""
        self.looks = 0
        """At the clock, since somebody else went on."""
        self._players = _players.setdefault(getcurrent(), Players())
        self._hub = self._players.hub
        self._doomed: list[Process] = []
        self._tokens = 0

    def start(self, process: Process, name: str, work: Callable[[], None]) -> Actor:
        """Let an actor begin, in its next turn."""

        def live() -> None:
            try:
                work()
            except Killed:
                pass
            except BaseException as error:  # noqa: BLE001 - what ends an actor is a finding
                if not process.is_dead:
                    self.violate(f"{name} of {process.name} ended with {error!r}")

        actor = Actor(name, process, live, self._players.take(), self.now)
        process.actors.append(actor)
        self.actors.append(actor)
        return actor

    def turn(self) -> None:
        """Let somebody who is awake go on; where nobody is, time passes."""
        now = self.now
        awake = [a for a in self.actors if a.wake_at <= now and a.process.paused_until <= now]
        if not awake:
            self.now = min(max(a.wake_at, a.process.paused_until) for a in self.actors)
            return
        actor = awake[int(self.dice() * len(awake))]
        self.now = now + self.turn_seconds * self.dice()
        self._run(actor)

    def _run(self, actor: Actor) -> None:
        self.current = actor
        self.looks = 0
        actor.greenlet.switch(actor)
        self.current = None
        if not actor.is_alive:
            self._remove(actor)
        while self._doomed:
            self._end(self._doomed.pop())

    def _remove(self, actor: Actor) -> None:
        actor.process.actors.remove(actor)
        self.actors.remove(actor)

    def breathe(self) -> None:
        """Where an actor may be interrupted, and where a dead one ends."""
        actor = self.current
        if actor is None:
            return
        if actor.process.is_dead:
            raise Killed
        actor.calls += 1
        if actor.calls == RESTLESS_CALLS_MAX:
            self.violate(f"{actor.name} of {actor.process.name} does not rest")
        if self.dice() < self.switch_share:
            self._hub.switch()

    def sleep(self, seconds: float) -> None:
        """The actor that calls it wakes up later, or when somebody sees to it."""
        actor = self.current
        assert actor is not None, "only actors sleep"
        if actor.process.is_dead:
            raise Killed
        actor.calls = 0
        actor.wake_at = self.now + seconds
        self._hub.switch()

    def kill(self, process: Process) -> None:
        """End a process in the middle of whatever its actors are doing; one of them may ask."""
        process.is_dead = True
        self.deaths += 1
        if self.current is not None:
            # Greenlets end into the hub, so the others are ended from there.
            self._doomed.append(process)
            raise Killed
        self._end(process)

    def _end(self, process: Process) -> None:
        for actor in list(process.actors):
            self.current = actor
            if actor.is_begun:
                actor.greenlet.throw(Killed)
            else:
                self._players.leave(actor)
            self._remove(actor)
        self.current = None
        for end in process.at_end:
            end()

    def token(self) -> str:
        """Something that nobody else has."""
        self._tokens += 1
        return str(self._tokens)

    def violate(self, what: str) -> None:
        """Note that a promise was broken."""
        self.violations.append(what)
        self.note(f"VIOLATION: {what}")

    def note(self, what: str) -> None:
        """Tell a trace."""
        if self.tell is not None:
            actor = self.current
            who = "" if actor is None else f"{actor.process.name} {actor.name}: "
            self.tell(f"{self.now:9.3f}  {who}{what}")

    def end(self) -> None:
        """Leave no actor behind."""
        for process in {actor.process.name: actor.process for actor in self.actors}.values():
            self.kill(process)
