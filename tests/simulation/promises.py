"""What a line promises, whatever happens to it; looked at with every commit and at the end."""

from __future__ import annotations

from penstock.core.lanes import lane_of
from penstock.core.wire import decode_entry
from penstock.errors import MalformedEntry
from tests.simulation.database import Effect
from tests.simulation.log_statements import hole_body
from tests.simulation.world import KEYS, World


class Promises:
    """Each effect once, in the order of its key, and at the end everything settled."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._handled: dict[str, Effect] = {}
        self._last_of_key: dict[str, int] = {}
        self._has_lost = False
        self._is_thorough = world.machine.dice() < 0.25
        """Whether to wait until the checkpoints are at the end too, which takes a while."""
        world.database.on_effects = self.check_effects
        world.at_fail_over.append(self._forget)

    def _forget(self) -> None:
        """PostgreSQL has lost commits: what is left of the effects counts."""
        self._has_lost = True
        effects, self._handled, self._last_of_key = self._world.database.effects, {}, {}
        self.check_effects(effects)

    def check_effects(self, effects: list[Effect]) -> None:
        """With the commit that brings them."""
        world = self._world
        for effect in effects:
            if effect.event_uuid in self._handled:
                world.machine.violate(f"repeated: {effect}")
            self._handled[effect.event_uuid] = effect
            if effect.key is None:
                continue
            if effect.number <= self._last_of_key.get(effect.key, 0):
                world.machine.violate(f"out of order: {effect}")
            self._last_of_key[effect.key] = effect.number
            self._check_overtaking(effect)

    def _check_overtaking(self, effect: Effect) -> None:
        database = self._world.database
        for row in database.parked.values():
            parked = database.by_position.get(row.position)
            if parked is not None and parked.key == effect.key and row.position < effect.position:
                self._world.machine.violate(f"{effect} overtook {row.position}, which is parked")

    def check_checkpoints(self) -> None:
        """No lane has passed an event that nobody has entered."""
        database = self._world.database
        for role, lease in database.consumer_leases():
            for position, row in database.by_position.items():
                if (
                    position <= lease.checkpoint
                    and row.event_uuid not in database.processed
                    and lane_of(row.key, row.event_uuid, database.lanes) == lease.lane
                ):
                    self._world.machine.violate(f"{role} has passed {position}")

    def is_done(self) -> bool:
        """Whether there is nothing left to do."""
        roles = self._world.roles
        if "publisher" in roles and not self._is_published():
            return False
        return "consumer" not in roles or self._is_consumed()

    def _is_published(self) -> bool:
        database = self._world.database
        if any(row.position is None for row in database.outbox.values()):
            return False
        return database.published == database.head == self._hot_end()

    def _is_consumed(self) -> bool:
        database = self._world.database
        if any(row.event_uuid not in database.processed for row in database.outbox.values()):
            return False
        if self._unheld():
            return False
        if not self._is_thorough:
            return True
        # After a failover a consumer may be ahead: it has handled what PostgreSQL has lost.
        return all(
            row.checkpoint == database.head or (row.checkpoint > database.head and self._has_lost)
            for _, row in database.consumer_leases()
        )

    def _hot_end(self) -> int | None:
        """How far the hot log reaches; an empty one, to its base."""
        server = self._world.hot
        if server.entries:
            return server.tail()
        return None if server.meta is None else server.meta.base

    def _unheld(self) -> list[int]:
        """Parked positions whose key is not held."""
        parked = self._world.database.parked.values()
        held = {row.key_hash for row in parked if row.held}
        return [row.position for row in parked if row.key_hash not in held]

    def check_end(self) -> None:
        """After the line was healed."""
        world, database = self._world, self._world.database
        violate = world.machine.violate
        if not self.is_done() and not world.machine.violations:
            violate(f"pending at the end: {self._pending()}")
        positions = sorted(database.by_position)
        taken = [p for hole in database.holes for p in (hole.first, hole.last)]
        if not taken and positions != list(range(1, database.head + 1)):
            violate(f"positions are not 1 to {database.head}: {positions}")
        for row in database.outbox.values():
            self._check_settled(row.event_uuid)
        self._check_hot_log()

    def _pending(self) -> str:
        database = self._world.database
        unsettled = [
            r for u, r in database.outbox.items() if r.event_uuid not in database.processed
        ]
        return (
            f"unsettled {[row.id for row in unsettled]}, parked {sorted(database.parked)}, head "
            f"{database.head}, published {database.published}, hot log {self._hot_end()}, "
            f"checkpoints {[row.checkpoint for _, row in database.consumer_leases()]}"
        )

    def _check_settled(self, event_uuid: str) -> None:
        """In exactly one of handled, dead, parked; and the effect there exactly if handled."""
        database, violate = self._world.database, self._world.machine.violate
        settled = database.processed.get(event_uuid)
        if settled is None:
            return
        position, outcome = settled
        is_parked, is_dead = position in database.parked, event_uuid in database.dead
        expected = {"handled": (True, False, False), "dead": (False, False, True)}.get(outcome)
        found = (event_uuid in self._handled, is_parked, is_dead)
        if outcome == "parked":
            expected = (False, True, is_dead)
        if found != expected:
            violate(f"{position} is entered as {outcome}, but (handled, parked, dead) is {found}")

    def _check_hot_log(self) -> None:
        """What is signed is what PostgreSQL holds there, byte for byte. The rest nobody reads."""
        world = self._world
        database = world.database
        bodies = {position: row.body for position, row in database.by_position.items()}
        bodies |= {hole.last: hole_body(database, hole) for hole in database.holes}
        for (position, sequence), raw in world.hot.entries:
            try:
                decode_entry(
                    database.stream_name, position, raw if sequence == 0 else b"", KEYS.own
                )
            except MalformedEntry:
                continue
            body = raw.partition(b"\n")[2].decode()
            if body != bodies.get(position):
                world.machine.violate(f"the hot log has {body!r} at {position}")
