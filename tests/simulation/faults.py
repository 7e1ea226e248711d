"""What happens to a line: every kind of fault, each one blow to a world."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.wire import encode_entry
from tests.simulation.database import Transaction
from tests.simulation.hot_log import HotServer
from tests.simulation.lease_statements import release_worker
from tests.simulation.world import KEYS, Worker, World

Fault = Callable[[World], bool]
"""Strikes, and returns whether there was anything to hit."""
WORKERS_MAX = 4


def _hot(world: World) -> tuple[HotServer, int]:
    """The server, and one of its entries."""
    return world.hot, int(world.machine.dice() * len(world.hot.entries))


# ── the hot log ───────────────────────────────────────────────────────────────────────────────


def lose_tail(world: World) -> bool:
    """A failover to a replica that is behind, or a file that was cut."""
    server, cut = _hot(world)
    if not server.entries:
        return False
    del server.entries[cut:]
    server.last_id = server.entries[-1][0] if server.entries else (0, 0)
    return True


def lose_everything(world: World) -> bool:
    world.hot.delete_log()
    world.hot.meta = None
    return True


def lose_log(world: World) -> bool:
    """The log alone: evicted, or deleted by hand."""
    world.hot.delete_log()
    return True


def lose_record(world: World) -> bool:
    world.hot.meta = None
    return True


def delete_entry(world: World) -> bool:
    """XDEL: the key remembers the id."""
    server, index = _hot(world)
    if not server.entries:
        return False
    del server.entries[index]
    return True


def trim(world: World) -> bool:
    server, cut = _hot(world)
    del server.entries[:cut]
    return cut > 0


def restore_snapshot(world: World) -> bool:
    """The server goes back to what it had saved; now and then it saves again."""
    if world.machine.dice() < 0.5:
        world.saved = world.hot.snapshot()
    world.hot.restore(world.saved)
    return True


def poison(world: World) -> bool:
    """Somebody adds an entry with an id of his own."""
    server, dice = world.hot, world.machine.dice
    position, sequence = server.last_id
    entry_id = [(10**15, 0), (position, sequence + 1), (position + 1, 0), (position + 3, 0)][
        int(dice() * 4)
    ]
    return server.add(entry_id, b"poison")


def forge(world: World) -> bool:
    """Somebody adds a copy of an entry, or one with a signature of his own, in the next place."""
    server, index = _hot(world)
    position = server.last_id[0] + 1
    if server.entries and world.machine.dice() < 0.5:
        return server.add((position, 0), server.entries[index][1])
    body = f"event\n{world.database.origin}\n1\n1\n{'0' * 8}-0000-0000-0000-{'0' * 12}"
    body += "\nT\n1\n\n0\nnull\n{}\n0"
    return server.add((position, 0), encode_entry("orders", position, body, KEYS.forged))


def tamper(world: World) -> bool:
    """Somebody replaces an entry by its neighbour."""
    server, index = _hot(world)
    if len(server.entries) < 2:
        return False
    entry_id, _ = server.entries[index]
    server.entries[index] = (entry_id, server.entries[index - 1][1])
    return True


def toggle_redis(world: World) -> bool:
    world.hot.is_away = not world.hot.is_away
    return True


# ── processes ─────────────────────────────────────────────────────────────────────────────────


def _somebody(world: World) -> Worker | None:
    alive = world.alive()
    return alive[int(world.machine.dice() * len(alive))] if alive else None


def kill_worker(world: World) -> bool:
    worker = _somebody(world)
    if worker is None:
        return False
    end_worker(world, worker)
    return True


def end_worker(world: World, worker: Worker) -> None:
    """Kill it. If its supervisor saw that, its leases are free; otherwise they run out."""
    world.machine.kill(worker.process)
    if world.machine.dice() < 0.6:
        release_worker(Transaction(world.database), {"worker_id": worker.process.name})


def pause_worker(world: World) -> bool:
    """It stands still, perhaps for longer than its leases run."""
    worker = _somebody(world)
    if worker is None or worker.process.paused_until > world.machine.now:
        return False
    worker.process.paused_until = world.machine.now + 3.0 * world.machine.dice()
    return True


def start_worker(world: World) -> bool:
    if len(world.alive()) >= WORKERS_MAX:
        return False
    world.start_worker()
    return True


def change_lanes(world: World) -> bool:
    """A deploy with another lane count, while workers of the last one are still there."""
    if "consumer" not in world.roles:
        return False
    if world.may_lose_commits:
        # A lost change of the lane count is outside of what is promised: its epoch comes again
        # with another count, and lanes of both may run for as long as their leases.
        return False
    lanes = 1 + int(world.machine.dice() * world.shape.lanes_max)
    world.shape = world.shape._replace(lanes=lanes)
    world.start_worker("consumer")
    return True


def pause_consumer(world: World) -> bool:
    """Somebody pauses the consumer, or lets it go on."""
    world.database.is_paused = not world.database.is_paused
    return "consumer" in world.roles


def stand_still(world: World) -> bool:
    """Nobody runs for a while; leases do."""
    world.machine.now += 2.0 * world.machine.dice()
    return True


def end_backends(world: World) -> bool:
    """PostgreSQL restarts: every open transaction is gone."""
    ended = list(world.database.open_transactions.values())
    for transaction in ended:
        transaction.terminate()
    return bool(ended)


def fail_over(world: World) -> bool:
    """A standby takes over that is behind."""
    database = world.database
    if not world.may_lose_commits:
        return False
    known = set(world.standby["by_position"])
    for position, row in database.by_position.items():
        if position not in known:
            world.forgotten[position, row.event_uuid] = row
    database.fail_over(world.standby)
    for forget in world.at_fail_over:
        forget()
    return True


FAULTS: tuple[tuple[Fault, int], ...] = (
    (lose_tail, 8),
    (lose_everything, 3),
    (lose_log, 2),
    (lose_record, 2),
    (delete_entry, 4),
    (trim, 3),
    (restore_snapshot, 5),
    (poison, 4),
    (forge, 4),
    (tamper, 4),
    (toggle_redis, 4),
    (kill_worker, 5),
    (pause_worker, 10),
    (start_worker, 4),
    (change_lanes, 2),
    (pause_consumer, 2),
    (stand_still, 8),
    (end_backends, 3),
    (fail_over, 6),
)
DECK: tuple[Fault, ...] = tuple(fault for fault, weight in FAULTS for _ in range(weight))
