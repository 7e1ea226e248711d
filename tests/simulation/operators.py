"""Somebody who redrives, discards and releases while the line is at work."""

from __future__ import annotations

import psycopg

from penstock.stores.operations import Kind, Operation
from tests.simulation.connections import ModelConnection
from tests.simulation.machine import Process
from tests.simulation.world import World

LOOKS_MAX = 30
PAUSE_SECONDS_MAX = 0.5
KINDS: tuple[Kind, ...] = ("redrive", "redrive", "discard", "release")
TAKE_BACK_SHARE = 0.5
CHUNK = 100


def begin(world: World) -> None:
    """Let an operator come."""
    world.machine.start(Process("operator"), "operator", Operator(world).work)


class Operator:
    """A few operations on whatever is there, each on a connection of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._dice = world.machine.dice

    def work(self) -> None:
        """One look after the other, until it has had enough."""
        for _ in range(LOOKS_MAX):
            self._world.machine.sleep(PAUSE_SECONDS_MAX * self._dice())
            try:
                self._operate(KINDS[int(self._dice() * len(KINDS))])
            except psycopg.Error:
                # It says that nothing more is done, and is done again by hand.
                continue

    def _operate(self, kind: Kind) -> None:
        database = self._world.database
        letters = [row.position for row in database.dead.values() if self._dice() < 0.6]
        parked = [position for position in database.parked if self._dice() < 0.6]
        if not (parked if kind == "release" else letters):
            return
        self._world.note_fault(kind)
        operation = Operation(
            ModelConnection(self._world.wire),  # type: ignore[arg-type]
            kind,
            {},
            consumer=database.consumer,
            by="somebody",
            reason="",
        )
        if kind == "release":
            operation.release(database.consumer, parked)
        elif kind == "discard":
            operation.discard(letters)
        else:
            self._redrive(operation, letters)

    def _redrive(self, operation: Operation, letters: list[int]) -> None:
        database = self._world.database
        # Those come back behind events of their key that were handled without them.
        self._world.redriven.update(
            event_uuid
            for event_uuid, row in database.dead.items()
            if row.position in letters and row.position not in database.parked
        )
        operation.move(letters)
        if self._dice() < TAKE_BACK_SHARE:
            self._world.machine.sleep(self._dice())
            operation.take_back(CHUNK)
