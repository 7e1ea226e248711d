"""How a line is when its history begins: some events are on the hot log, some of these handled."""

from __future__ import annotations

from functools import cache

from penstock.core.lanes import key_hash
from penstock.core.leases import PUBLISHER, consumer_role
from penstock.core.wire import encode_entry
from penstock.stores.hot_log import Fence
from tests.simulation.database import Database
from tests.simulation.hot_log import Meta
from tests.simulation.log_statements import incarnation, place
from tests.simulation.rows import DeadRow, Effect, LeaseRow, OutboxRow, ParkedRow
from tests.simulation.world import KEYS, World

TERM = 1
# With an operator: these, and between them those that are dead and not held.
HELD_SHARE, DEAD_SHARE = 0.3, 0.5


def begin(world: World, rows: list[OutboxRow]) -> None:
    """Enter what a publisher and a consumer have done with these rows before they stopped."""
    database, hot = world.database, world.hot
    dice, operated = world.machine.dice, world.shape.has_operator
    handled = int(dice() ** (1 if operated else 2) * (len(rows) + 1))
    may_hold = operated and world.shape.order == "key"
    for position, row in enumerate(rows, 1):
        body = place(database, row, position, TERM)
        hot.add((position, 0), _signed(position, body))
        if position <= handled:
            fate = dice() if operated else 1.0
            _settle(database, row, position, fate if may_hold or fate > HELD_SHARE else 1.0)
    database.head = database.published = len(rows)
    database.leases[PUBLISHER] = LeaseRow(term=TERM)
    role = consumer_role(database.consumer, database.epoch, 0, database.lanes)
    database.leases[role] = LeaseRow(term=TERM, checkpoint=handled)
    ((word,),) = incarnation(database.autocommit, {})
    hot.meta = Meta(Fence(database.origin, word, TERM), 0, 0.0)
    database.on_effects(database.effects)
    world.saved = hot.snapshot()
    if world.may_lose_commits:
        world.standby = database.snapshot()


def _settle(database: Database, row: OutboxRow, position: int, fate: float) -> None:
    """Handled, a dead letter, held, or behind one that is held."""
    hashed = key_hash(row.key, row.event_uuid)
    body = database.by_position[position].body
    waits_behind = [r for r in database.parked.values() if r.key_hash == hashed]
    if waits_behind or fate < HELD_SHARE:
        held, depth = not waits_behind, len(waits_behind) + 1
        setbacks = int(held)
        database.parked[position] = ParkedRow(
            position, row.event_uuid, hashed, body, setbacks, None, held, depth, setbacks
        )
    if fate < DEAD_SHARE and not waits_behind:
        database.dead[row.event_uuid] = DeadRow(position, "exhausted", hashed, body)
    outcome = "dead" if row.event_uuid in database.dead else "handled"
    if position in database.parked:
        outcome = "parked"
    database.processed[row.event_uuid] = (position, outcome)
    if outcome == "handled":
        database.effects.append(Effect(row.event_uuid, row.key, row.number, position))


@cache
def _signed(position: int, body: str) -> bytes:
    return encode_entry(Database.stream_name, position, body, KEYS.own)
