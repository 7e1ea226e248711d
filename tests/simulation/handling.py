"""The handlers of a line, one for each guarantee, and how they take what they are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.options import Guarantee
from penstock.core.wire import Entry
from penstock.pipeline.context import Context
from penstock.pipeline.signature import HandlerPlan, View
from tests.simulation.connections import ModelWorker
from tests.simulation.database import Database
from tests.simulation.machine import Machine, Process
from tests.simulation.rows import Effect, OutboxRow

# Of the events of a key, where handlers may settle them: the others reach outside.
COMPLETED_EVERY = 2
SLOW_SHARE, SLOW_SECONDS_MAX = 0.7, 0.6


@dataclass(slots=True)
class Conduct:
    """How a handler takes one event."""

    failures_left: int = 0
    """So many calls fail before one succeeds."""
    error: type[Exception] = ValueError
    is_deadly: bool = False
    """Whether its handler ends the process."""
    is_late: bool = False
    """Whether it fails behind its effect, where that is outside of the database."""


class Plan(HandlerPlan):
    """A handler that takes the entry as it is: nothing is decoded that nobody looks at."""

    def decode(self, entry: Entry) -> Any:
        return entry


class Scene(Protocol):
    """What handlers know of their world."""

    machine: Machine
    database: Database
    conduct: dict[str, Conduct]
    forgotten: dict[tuple[int, str], OutboxRow]
    on_attempt: Callable[[Effect, Process], None]
    on_call: Callable[[Effect], None]
    on_failure: Callable[[str, Process], None]

    def note_fault(self, kind: str) -> None: ...


class Handlers:
    """Those of one process."""

    def __init__(self, scene: Scene, process: Process) -> None:
        self._scene = scene
        self._process = process

    def plan(self, guarantee: Guarantee) -> Plan:
        """What is registered for it."""
        handlers: dict[Guarantee, Callable[..., None]] = {
            Guarantee.EXACTLY_ONCE: self._write,
            Guarantee.AT_LEAST_ONCE: self._reach_or_complete,
            Guarantee.AT_MOST_ONCE: self._reach_once,
        }
        view = View.CURSOR if guarantee is Guarantee.EXACTLY_ONCE else View.CONTEXT
        return Plan(handlers[guarantee], False, False, True, None, (None, view))

    def _write(self, entry: Entry, cursor: ModelWorker) -> None:
        """One effect, or a failure, as the event wants it."""
        effect = self._effect(entry)
        if effect is not None:
            self._fail(entry)
            cursor.write(effect)

    def _reach_or_complete(self, entry: Entry, context: Context) -> None:
        """An effect that nobody takes back, or one with which its event is settled."""
        effect = self._effect(entry)
        if effect is not None and effect.number % COMPLETED_EVERY:
            self._reach(entry, effect)
        elif effect is not None:
            self._fail(entry, is_early=True)
            machine = self._scene.machine
            if machine.dice() < SLOW_SHARE:
                machine.sleep(SLOW_SECONDS_MAX * machine.dice())
            with context.complete() as session:
                session.write(effect)
            self._fail(entry)

    def _reach_once(self, entry: Entry, _: Context) -> None:
        effect = self._effect(entry)
        if effect is not None:
            self._reach(entry, effect)

    def _reach(self, entry: Entry, effect: Effect) -> None:
        self._scene.machine.breathe()
        self._fail(entry, is_early=True)
        self._scene.on_call(effect)
        self._scene.machine.breathe()
        self._fail(entry)

    def _effect(self, entry: Entry) -> Effect | None:
        """What it is to do; nothing for what nobody has sent."""
        scene = self._scene
        row = scene.database.by_position.get(entry.position)
        if row is None or row.event_uuid != entry.event_uuid:
            row = scene.forgotten.get((entry.position, entry.event_uuid))
        if row is None and entry.fields[0] == b"0":
            row = scene.database.sent(entry.event_uuid)
        if row is None:
            scene.machine.violate(f"phantom: {entry.event_uuid} was handled at {entry.position}")
            return None
        effect = Effect(row.event_uuid, row.key, row.number, entry.position)
        scene.on_attempt(effect, self._process)
        return effect

    def _fail(self, entry: Entry, *, is_early: bool = False) -> None:
        scene = self._scene
        conduct = scene.conduct.get(entry.event_uuid)
        if conduct is None or (is_early and conduct.is_late):
            return
        if conduct.is_deadly:
            scene.note_fault("deadly event")
            scene.machine.kill(self._process)
        if conduct.failures_left > 0:
            conduct.failures_left -= 1
            scene.note_fault("failing handler")
            scene.on_failure(entry.event_uuid, self._process)
            raise conduct.error("as the history wants it")
