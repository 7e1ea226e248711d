"""How a line is when its history begins: some events are on the hot log, some of these handled."""

from __future__ import annotations

from functools import cache

from penstock.core.leases import PUBLISHER, consumer_role
from penstock.core.wire import encode_entry
from penstock.stores.hot_log import Fence
from tests.simulation.database import Database, Effect, LeaseRow, OutboxRow
from tests.simulation.hot_log import Meta
from tests.simulation.log_statements import incarnation, place
from tests.simulation.world import KEYS, World

TERM = 1


def begin(world: World, rows: list[OutboxRow]) -> None:
    """Enter what a publisher and a consumer have done with these rows before they stopped."""
    database, hot = world.database, world.hot
    handled = int(world.machine.dice() ** 2 * (len(rows) + 1))
    for position, row in enumerate(rows, 1):
        body = place(database, row, position, TERM)
        hot.add((position, 0), _signed(position, body))
        if position <= handled:
            database.processed[row.event_uuid] = (position, "handled")
            database.effects.append(Effect(row.event_uuid, row.key, row.number, position))
    database.head = database.published = len(rows)
    database.leases[PUBLISHER] = LeaseRow(term=TERM)
    role = consumer_role(database.consumer, database.epoch, 0, database.lanes)
    database.leases[role] = LeaseRow(term=TERM, checkpoint=handled)
    ((word,),) = incarnation(database.autocommit, {})
    hot.meta = Meta(Fence(database.origin, word, TERM), 0, 0.0)
    database.on_effects(database.effects)
    world.saved, world.standby = hot.snapshot(), database.snapshot()


@cache
def _signed(position: int, body: str) -> bytes:
    return encode_entry(Database.stream_name, position, body, KEYS.own)
