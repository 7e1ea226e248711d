"""The statements on leases, lanes, workers and suspects on the model."""

from __future__ import annotations

from penstock.core.leases import consumer_role
from tests.simulation.database import WAITING, Database, Parameters, Rows, Transaction
from tests.simulation.log_statements import statement
from tests.simulation.machine import NEVER
from tests.simulation.rows import LeaseRow

# ── leases ────────────────────────────────────────────────────────────────────────────────────


@statement("lease.sql", "ensure")
def ensure(transaction: Transaction, parameters: Parameters) -> Rows:
    row = LeaseRow(
        checkpoint=parameters["checkpoint"], epoch=parameters["epoch"], lane=parameters["lane"]
    )
    transaction.database.leases.setdefault(parameters["role"], row)
    return []


@statement("lease.sql", "acquire")
def acquire(transaction: Transaction, parameters: Parameters) -> Rows:
    database, role = transaction.database, parameters["role"]
    row = database.leases.get(role)
    if row is None:
        return []
    was_ours = row.owner_id is not None and row.owner_id in parameters["abandoned_owner_ids"]
    if not (row.until < database.machine.now or was_ours):
        return []
    database.leases[role] = row._replace(
        owner_id=parameters["owner_id"],
        worker_id=parameters["worker_id"],
        term=row.term + 1,
        clean=False,
        until=database.machine.now + parameters["lease_seconds"],
    )
    return [(row.term + 1, row.checkpoint, row.clean or was_ours)]


@statement("lease.sql", "renew")
def renew(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    until = database.machine.now + parameters["lease_seconds"]
    kept: Rows = []
    for role, owner, term in zip(
        parameters["roles"], parameters["owner_ids"], parameters["terms"], strict=True
    ):
        row = database.leases.get(role)
        is_ours = row is not None and (row.owner_id, row.term) == (owner, term)
        if row is not None and is_ours and row.until >= database.machine.now:
            database.leases[role] = row._replace(until=until)
            kept.append((database.stream_name, role, row.checkpoint))
    return kept


@statement("lease.sql", "release")
def release(transaction: Transaction, parameters: Parameters) -> Rows:
    database, role = transaction.database, parameters["role"]
    row = database.leases.get(role)
    if row is not None and _is_holder(row, parameters):
        database.leases[role] = row._replace(
            until=-NEVER,
            owner_id=None,
            worker_id=None,
            clean=True,
            term=max(row.term, parameters["term_seen"]),
        )
    return []


def _is_holder(row: LeaseRow, parameters: Parameters) -> bool:
    return (row.owner_id, row.term) == (parameters["owner_id"], parameters["term"])


@statement("lease.sql", "release_worker")
def release_worker(transaction: Transaction, parameters: Parameters) -> Rows:
    database, worker_id = transaction.database, parameters["worker_id"]
    database.workers.pop(worker_id, None)
    freed: Rows = []
    for role, row in database.leases.items():
        if row.worker_id == worker_id:
            database.leases[role] = row._replace(until=-NEVER, worker_id=None)
            freed.append((database.stream_name, role))
    return freed


@statement("lease.sql", "read")
def read_lease(transaction: Transaction, parameters: Parameters) -> Rows:
    row = transaction.database.leases.get(parameters["role"])
    return [] if row is None else [(row.owner_id, row.term, row.checkpoint)]


@statement("lease.sql", "end_predecessor")
def end_predecessor(transaction: Transaction, parameters: Parameters) -> Rows:
    former = {parameters["role"], *parameters["former_groups"]}
    found = [
        other
        for other in transaction.database.open_transactions.values()
        if other is not transaction and not former.isdisjoint(other.groups)
    ]
    for other in found:
        other.terminate()
    return [(0, True)] * len(found)


# ── lanes and workers ─────────────────────────────────────────────────────────────────────────


@statement("consumer.sql", "read")
def read_consumer(transaction: Transaction, _: Parameters) -> Rows:
    return [(transaction.database.stream_name,)]


@statement("consumer.sql", "describe")
def describe(transaction: Transaction, parameters: Parameters) -> Rows:
    transaction.database.ordering = parameters["ordering"]
    return []


@statement("lane.sql", "agree")
def agree(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    deployed_at = parameters["deployed_at"].timestamp()
    if parameters["needs_one_lane"] and database.lanes > 1:
        deployed_at = max(database.machine.now, database.deployed_at + 1e-6)
    if deployed_at > database.deployed_at:
        if parameters["lanes"] != database.lanes:
            begin_epoch(database, parameters["lanes"])
        database.deployed_at = deployed_at
    for lane in range(database.lanes):
        row = LeaseRow(epoch=database.epoch, lane=lane)
        database.leases.setdefault(_role(database, lane), row)
    return [
        (database.stream_name, 1, database.lanes, database.epoch, database.settled_to),
    ]


def _role(database: Database, lane: int) -> str:
    return consumer_role(database.consumer, database.epoch, lane, database.lanes)


def begin_epoch(database: Database, lanes: int) -> None:
    """Ends all terms, and starts the lanes anew at the lowest checkpoint."""
    ended = dict(database.consumer_leases())
    for role in ended:
        del database.leases[role]
    checkpoints = [row.checkpoint for row in ended.values()]
    now = database.machine.now
    was_clean = all(row.clean or row.until > now for row in ended.values())
    database.lanes = lanes
    database.epoch += 1
    database.settled_to = max(database.settled_to, *checkpoints, 0)
    lowest = min(checkpoints, default=0)
    for lane in range(lanes):
        database.leases[_role(database, lane)] = LeaseRow(
            checkpoint=lowest, epoch=database.epoch, lane=lane, clean=was_clean
        )


@statement("lane.sql", "watch")
def watch(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    now = database.machine.now
    lanes = sorted(
        (row for _, row in database.consumer_leases() if row.epoch == database.epoch),
        key=lambda row: row.lane,
    )
    ends = [
        row.until - now
        for row in lanes
        if row.until > now and row.worker_id not in (None, parameters["worker_id"])
    ]
    return [
        (
            database.lanes,
            database.epoch,
            database.is_paused,
            [worker for worker, until in database.workers.items() if until > now],
            [row.worker_id if row.until > now else None for row in lanes],
            min(ends, default=None),
        )
    ]


@statement("lane.sql", "join")
def join(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    until = database.machine.now + parameters["lease_seconds"]
    database.workers[parameters["worker_id"]] = until
    return []


@statement("lane.sql", "stay")
def stay(transaction: Transaction, parameters: Parameters) -> Rows:
    workers = transaction.database.workers
    return join(transaction, parameters) if parameters["worker_id"] in workers else []


@statement("lane.sql", "leave")
def leave(transaction: Transaction, parameters: Parameters) -> Rows:
    transaction.database.workers.pop(parameters["worker_id"], None)
    return []


@statement("lane.sql", "forget_expired")
def forget_expired(_: Transaction, __: Parameters) -> Rows:
    return []


@statement("lane.sql", "advance")
def advance(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    return [()] if move_checkpoint(database, parameters) else []


def move_checkpoint(database: Database, parameters: Parameters) -> bool:
    """Compare and set: owner, term, time, checkpoint."""
    role = parameters["role"]
    row = database.leases.get(role)
    if (
        row is None
        or not _is_holder(row, parameters)
        or row.checkpoint != parameters["old_checkpoint"]
        or row.until <= database.machine.now
    ):
        return False
    set_checkpoint(database, role, row, parameters["new_checkpoint"])
    return True


def set_checkpoint(database: Database, role: str, row: LeaseRow, checkpoint: int) -> None:
    if checkpoint < row.checkpoint:
        database.machine.violate(f"{role} went back from {row.checkpoint} to {checkpoint}")
    database.leases[role] = row._replace(checkpoint=checkpoint)


# ── suspects ──────────────────────────────────────────────────────────────────────────────────


@statement("suspect.sql", "unfinished")
def unfinished_suspects(transaction: Transaction, _: Parameters) -> Rows:
    database = transaction.database
    done = {position for position, outcome in database.processed.values() if outcome != "parked"}
    for position in done & database.suspects.keys():
        transaction.lock(database.suspects, position)
        transaction.write(database.suspects, position, None)
    return [(position,) for position in sorted(database.suspects.keys() - done)]


@statement("suspect.sql", "start")
def start_suspect(transaction: Transaction, parameters: Parameters) -> Rows:
    suspects, position = transaction.database.suspects, parameters["position"]
    transaction.lock(suspects, position)
    starts = (*transaction.rows(suspects).get(position, ()), parameters["worker_id"])
    transaction.write(suspects, position, starts)
    return [([{"worker_id": worker_id} for worker_id in starts], "off")]


@statement("suspect.sql", "finish")
def finish_suspect(transaction: Transaction, parameters: Parameters) -> Rows:
    suspects, position = transaction.database.suspects, parameters["position"]
    if position in transaction.rows(suspects):
        transaction.write(suspects, position, None)
    return []


WAITING.update((unfinished_suspects, start_suspect, finish_suspect))
