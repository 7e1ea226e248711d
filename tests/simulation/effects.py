"""What a line promises of effects: how often, and in which order; looked at as they happen."""

from __future__ import annotations

from penstock.core.lanes import lane_of
from penstock.core.leases import consumer_role
from penstock.core.options import Guarantee
from tests.simulation.machine import Process
from tests.simulation.rows import Effect, ParkedRow
from tests.simulation.world import World

GIVEN_UP = frozenset(("dead", "discarded"))


class Effects:
    """As often as the guarantee says, and none before one that it has to wait for."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._shape = world.shape
        self.seen: dict[str, Effect] = {}
        """The first of each event."""
        self._committed: set[str] = set()
        self._outside: dict[str, Effect] = {}
        self._last: dict[str | None, int] = {}
        self._failed: list[tuple[str, Process]] = []
        self.has_lost = False
        """Whether PostgreSQL has lost commits."""
        world.database.on_effects = self.check_commit
        world.on_attempt = self.check_attempt
        world.on_call = self.check_call
        world.on_failure = self._note_failure
        world.at_fail_over.append(self._forget)

    def _forget(self) -> None:
        """PostgreSQL has lost commits: what is left of its effects counts, and those outside."""
        self.has_lost = True
        self.seen = dict(self._outside)
        self._committed.clear()
        self._last.clear()
        self.check_commit(self._world.database.effects)

    def check_commit(self, effects: list[Effect]) -> None:
        """Those of a transaction: each once, and settled with it, whatever the guarantee."""
        database = self._world.database
        processed, places = database.processed, database.by_position
        for effect in effects:
            row = places.get(effect.position)
            is_lost = (effect.position, effect.event_uuid) in self._world.forgotten
            if (row is None or row.event_uuid != effect.event_uuid) and not is_lost:
                self._world.machine.violate(f"written at a place that is not its own: {effect}")
            _, outcome = processed.get(effect.event_uuid, (0, "unsettled"))
            if outcome != "handled":
                self._world.machine.violate(f"written though it is {outcome}: {effect}")
            if effect.event_uuid in self._committed:
                self._world.machine.violate(f"repeated: {effect}")
            self._committed.add(effect.event_uuid)
            self._check_first(effect)

    def check_attempt(self, effect: Effect, process: Process) -> None:
        """Where handlers are called first, whoever has the lease calls for nothing settled."""
        database = self._world.database
        _, outcome = database.processed.get(effect.event_uuid, (0, "parked"))
        if (
            self._shape.guarantee is not Guarantee.AT_LEAST_ONCE
            # An operator may have come while it was called for others of its batch.
            or outcome in {"parked", "discarded"}
            or self.has_lost
        ):
            return
        lane = lane_of(effect.key, effect.event_uuid, database.lanes)
        role = consumer_role(database.consumer, database.epoch, lane, database.lanes)
        machine, lease = self._world.machine, database.leases.get(role)
        # A lane of an earlier epoch may be at work beside one of the present.
        is_at_work = machine.current is not None and machine.current.name == role
        is_held = lease and lease.worker_id == process.name and lease.until > machine.now
        if is_at_work and is_held:
            machine.violate(f"called for though it is {outcome}: {effect}")

    def check_call(self, effect: Effect) -> None:
        """One that is outside of the database: nobody takes it back."""
        is_repeated = effect.event_uuid in self.seen and not self.has_lost
        if is_repeated and self._shape.guarantee is Guarantee.AT_MOST_ONCE:
            self._world.machine.violate(f"called twice: {effect}")
        self._outside[effect.event_uuid] = effect
        self._check_first(effect)

    def _note_failure(self, event_uuid: str, process: Process) -> None:
        if self._shape.guarantee is Guarantee.AT_MOST_ONCE:
            self._failed.append((event_uuid, process))

    def unburied(self) -> list[str]:
        """Events whose only attempt has failed in a process that is there and has not said so."""
        processed = self._world.database.processed
        return [
            event_uuid
            for event_uuid, process in self._failed
            # With commits PostgreSQL loses that they were settled, and they are called again.
            if not (process.is_dead or self.has_lost)
            and processed.get(event_uuid, (0, "dead"))[1] != "dead"
        ]

    def _check_first(self, effect: Effect) -> None:
        """Where an effect is the first of its event, it has a place behind others."""
        if effect.event_uuid in self.seen:
            return
        self.seen[effect.event_uuid] = effect
        _, outcome = self._world.database.processed.get(effect.event_uuid, (0, ""))
        is_late = outcome in GIVEN_UP or effect.event_uuid in self._world.redriven
        # A handler that reaches outside before what PostgreSQL has lost is handled again.
        is_loose = self.has_lost and self._shape.guarantee is Guarantee.AT_LEAST_ONCE
        if self._shape.guarantee is Guarantee.AT_MOST_ONCE or is_late or is_loose:
            # Handlers that nobody waits for: of events that are settled, or that were given up
            # while a worker that has lost its lease still had them in hand.
            return
        if self._shape.order == "stream":
            self._check_order(effect, None, effect.position)
        elif self._shape.order == "key" and effect.key is not None:
            self._check_order(effect, effect.key, effect.number)

    def _check_order(self, effect: Effect, of: str | None, number: int) -> None:
        if number <= self._last.get(of, 0):
            self._world.machine.violate(f"out of order: {effect}")
        self._last[of] = number
        for row in self._world.database.parked.values():
            if row.position < effect.position and self._is_before(row, effect):
                self._world.machine.violate(f"{effect} overtook {row.position}, which is parked")

    def _is_before(self, parked: ParkedRow, effect: Effect) -> bool:
        """Whether an effect has to wait for a parked event, which has had none yet."""
        row = self._world.database.by_position.get(parked.position)
        is_waited_for = row is not None and (self._shape.order == "stream" or row.key == effect.key)
        is_done = parked.event_uuid in self.seen or parked.event_uuid in self._world.redriven
        return is_waited_for and not is_done
