"""What a line promises, whatever happens to it; looked at now and then, and at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from penstock.core.lanes import lane_of
from penstock.core.options import Guarantee
from penstock.core.wire import decode_entry
from penstock.errors import MalformedEntry
from tests.simulation.effects import Effects
from tests.simulation.log_statements import hole_body
from tests.simulation.rows import OutboxRow
from tests.simulation.world import KEYS, World


class Promises:
    """Every effect as promised, and at the end everything settled."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._shape = world.shape
        self._effects = Effects(world)
        self._is_thorough = world.machine.dice() < 0.25
        """Whether to wait until the checkpoints are at the end too, which takes a while."""

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
        if any(row.event_uuid not in database.processed for row in self._owed()):
            return False
        if self._unheld() or self._effects.unburied():
            return False
        if not self._is_thorough or self._is_held_up():
            return True
        # After a failover a consumer may be ahead: it has handled what PostgreSQL has lost.
        return all(
            row.checkpoint == database.head
            or (row.checkpoint > database.head and self._effects.has_lost)
            for _, row in database.consumer_leases()
        )

    def _hot_end(self) -> int | None:
        """How far the hot log reaches; an empty one, to its base."""
        server = self._world.hot
        if server.entries:
            return server.tail()
        return None if server.meta is None else server.meta.base

    def _owed(self) -> Iterable[OutboxRow]:
        """The events that are to be settled; nothing passes a held one of a whole stream."""
        outbox, parked = self._world.database.outbox.values(), self._world.database.parked
        if not self._is_held_up():
            return outbox
        return (row for row in outbox if row.position is not None and row.position < min(parked))

    def _is_held_up(self) -> bool:
        parked = self._world.database.parked.values()
        return self._shape.order == "stream" and any(row.held for row in parked)

    def _unheld(self) -> list[int]:
        """Parked positions that wait for no operator."""
        parked = self._world.database.parked.values()
        if self._shape.order == "none":
            return [row.position for row in parked if not row.held]
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
        expected = (outcome == "parked", is_dead if outcome == "parked" else outcome == "dead")
        if (is_parked, is_dead) != expected:
            violate(f"{position} is entered as {outcome}, but parked {is_parked}, dead {is_dead}")
        has_effect = event_uuid in self._effects.seen
        match self._shape.guarantee:
            case Guarantee.EXACTLY_ONCE:
                is_right = has_effect is (outcome == "handled")
            case Guarantee.AT_LEAST_ONCE:
                is_right = has_effect or outcome != "handled"
            case Guarantee.AT_MOST_ONCE:
                is_right = outcome in {"handled", "dead"}
            case unreachable:
                assert_never(unreachable)
        if not is_right:
            violate(f"{position} is entered as {outcome}, and has an effect: {has_effect}")

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
