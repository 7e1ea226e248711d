"""The statements of operators on the model: letters redriven and discarded, keys released."""

from __future__ import annotations

from itertools import groupby
from typing import TypeVar

import psycopg

from tests.simulation.database import Parameters, Rows, Transaction
from tests.simulation.inbox_statements import array, numbers
from tests.simulation.log_statements import statement
from tests.simulation.rows import DeadRow, ParkedRow

KeyT = TypeVar("KeyT", int, str)
RowT = TypeVar("RowT")


def _chosen(
    transaction: Transaction, table: dict[KeyT, RowT], keys: list[KeyT], *, waits: bool
) -> list[tuple[KeyT, RowT]]:
    """Rows as they are once they are locked; where nobody waits, those that are free."""
    found: list[tuple[KeyT, RowT]] = []
    for key in keys:
        if key not in transaction.rows(table):
            continue
        if waits:
            transaction.lock(table, key)
        elif not transaction.lock_free(table, key):
            continue
        if (row := transaction.rows(table).get(key)) is not None:
            found.append((key, row))
    return found


def _letters(transaction: Transaction, ids: str) -> list[str]:
    """Those with these numbers, in their order."""
    chosen = set(numbers(ids))
    dead = transaction.rows(transaction.database.dead)
    rows = sorted((row.position, uuid) for uuid, row in dead.items() if row.position in chosen)
    return [uuid for _, uuid in rows]


def _place(event_uuid: str, row: DeadRow, consumer: str) -> tuple[object, ...]:
    # There is one letter for a position, and its number is that.
    return (row.position, consumer, row.position, event_uuid, row.key_hash)


@statement("redrive.sql", "begin_operation")
def begin_operation(transaction: Transaction, _: Parameters) -> Rows:
    database = transaction.database
    database.operations.append(database.machine.now)
    return [(len(database.operations),)]


@statement("redrive.sql", "prepare")
def prepare(_: Transaction, __: Parameters) -> Rows:
    return [("", "", "")]


@statement("redrive.sql", "untouch")
@statement("redrive.sql", "touch")
def touch(_: Transaction, __: Parameters) -> Rows:
    return []


@statement("redrive.sql", "lock_letters")
def lock_letters(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    ids = parameters["ids"]
    keys = _letters(transaction, ids if isinstance(ids, str) else _literal(ids))
    found = _chosen(transaction, database.dead, keys, waits=False)
    return [_place(uuid, row, database.consumer) for uuid, row in found]


def _literal(values: list[int]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


@statement("redrive.sql", "read_places")
def read_places(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    ids = parameters["ids"]
    dead = transaction.rows(database.dead)
    keys = _letters(transaction, ids if isinstance(ids, str) else _literal(ids))
    return [_place(uuid, dead[uuid], database.consumer) for uuid in keys]


@statement("redrive.sql", "mark_parked")
def mark_parked(transaction: Transaction, parameters: Parameters) -> Rows:
    return _mark(transaction, parameters, "parked", only="dead")


@statement("redrive.sql", "mark_dead")
def mark_dead(transaction: Transaction, parameters: Parameters) -> Rows:
    return _mark(transaction, parameters, "dead")


@statement("redrive.sql", "mark_discarded")
def mark_discarded(transaction: Transaction, parameters: Parameters) -> Rows:
    return _mark(transaction, parameters, "discarded")


def _mark(
    transaction: Transaction, parameters: Parameters, outcome: str, only: str | None = None
) -> Rows:
    processed = transaction.database.processed
    rows = transaction.rows(processed)
    asked = [u for u in array(parameters["event_uuids"]) if u in rows]
    keys: list[str] = [u for u in asked if only is None or rows[u][1] == only]
    marked: Rows = []
    for event_uuid, (position, found) in _chosen(transaction, processed, keys, waits=True):
        if only is None or found == only:
            transaction.write(processed, event_uuid, (position, outcome))
            marked.append((event_uuid,))
    return marked


@statement("redrive.sql", "release_held")
def release_held(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    rows = transaction.rows(parked)
    keys: list[int] = [p for p in numbers(parameters["positions"]) if p in rows and rows[p].held]
    released: Rows = []
    for position, row in _chosen(transaction, parked, keys, waits=True):
        if row.held:
            released.append((row.event_uuid,))
            changed = row._replace(
                held=False,
                attempts=0,
                next_attempt_at=transaction.database.machine.now,
                operation_id=parameters["operation_id"],
            )
            transaction.write(parked, position, changed)
    return released


@statement("redrive.sql", "park")
def park(transaction: Transaction, parameters: Parameters) -> Rows:
    dead = transaction.rows(transaction.database.dead)
    letters = sorted(
        (dead[u].key_hash, dead[u].position, u) for u in _letters(transaction, parameters["ids"])
    )
    for key_hash, of_key in groupby(letters, key=lambda letter: letter[0]):
        _park_key(transaction, parameters, key_hash, [uuid for _, _, uuid in of_key])
    return []


def _park_key(
    transaction: Transaction, parameters: Parameters, key_hash: int, event_uuids: list[str]
) -> None:
    database = transaction.database
    dead, parked = transaction.rows(database.dead), database.parked
    of_key = sorted(r for r in transaction.rows(parked).values() if r.key_hash == key_hash)
    first, last = dead[event_uuids[0]].position, dead[event_uuids[-1]].position
    before = [row for row in of_key if row.position < first]
    behind = [row for row in of_key if row.position > last]
    is_first = not (before and transaction.share(parked, before[0].position))
    depth = 0
    if before:
        depth = before[-1].depth
    elif behind:
        depth = behind[0].depth - len(event_uuids) - 1
    for n, event_uuid in enumerate(event_uuids, 1):
        letter = dead[event_uuid]
        is_due = (is_first and n == 1) or database.ordering == "none"
        row = ParkedRow(
            letter.position,
            event_uuid,
            key_hash,
            letter.entry,
            0,
            database.machine.now if is_due else None,
            False,
            depth + n,
            letter.attempts,
            parameters["operation_id"],
            database.machine.now,
        )
        if not transaction.insert(parked, letter.position, row):
            raise psycopg.errors.UniqueViolation


@statement("redrive.sql", "lock_parked")
def lock_parked(transaction: Transaction, parameters: Parameters) -> Rows:
    keys: list[int] = [*sorted(numbers(parameters["positions"]))]
    found = _chosen(transaction, transaction.database.parked, keys, waits=False)
    return [(position,) for position, _ in found]


@statement("redrive.sql", "parked")
def read_parked(transaction: Transaction, parameters: Parameters) -> Rows:
    rows = transaction.rows(transaction.database.parked)
    return [(position,) for position in numbers(parameters["positions"]) if position in rows]


@statement("redrive.sql", "delete_letters")
def delete_letters(transaction: Transaction, parameters: Parameters) -> Rows:
    for event_uuid in _letters(transaction, parameters["ids"]):
        transaction.write(transaction.database.dead, event_uuid, None)
    return []


@statement("redrive.sql", "remove_parked")
def remove_parked(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    keys: list[int] = [*numbers(parameters["positions"])]
    for position, _ in _chosen(transaction, parked, keys, waits=True):
        transaction.write(parked, position, None)
    return []


@statement("redrive.sql", "promote_after")
def promote_after(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    removed = zip(parameters["key_hashes"], parameters["positions"], strict=True)
    for key_hash, position in removed:
        rows = transaction.rows(parked).values()
        behind = sorted(
            r.position for r in rows if r.key_hash == key_hash and r.position > position
        )
        chosen = next((p for p in behind if transaction.lock_free(parked, p)), None)
        if chosen is not None:
            row = transaction.rows(parked)[chosen]
            if row.next_attempt_at is None and not row.held:
                now = transaction.database.machine.now
                transaction.write(parked, chosen, row._replace(next_attempt_at=now))
    return []


@statement("redrive.sql", "release_waiting")
def release_waiting(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    rows = transaction.rows(parked)
    keys: list[int] = [p for p in sorted(parameters["positions"]) if p in rows and not rows[p].held]
    released: Rows = []
    for position, row in _chosen(transaction, parked, keys, waits=False):
        now = transaction.database.machine.now
        transaction.write(parked, position, row._replace(next_attempt_at=now))
        released.append((row.event_uuid, position))
    return released


@statement("redrive.sql", "lock_waiting")
def lock_waiting(transaction: Transaction, parameters: Parameters) -> Rows:
    database, operation_id = transaction.database, parameters["operation_id"]
    rows = transaction.rows(database.parked)
    keys = [p for p, row in rows.items() if row.operation_id == operation_id and not row.held]
    keys.sort(reverse=True)
    started_at = database.operations[operation_id - 1]
    return [
        (database.consumer, position, row.event_uuid, row.key_hash, row.parked_at < started_at)
        for position, row in _chosen(transaction, database.parked, keys, waits=False)
    ]


@statement("redrive.sql", "hold_again")
def hold_again(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    keys = [*numbers(parameters["positions"])]
    for position, row in _chosen(transaction, parked, keys, waits=True):
        held = row._replace(
            held=True, next_attempt_at=None, operation_id=None, attempts=row.setbacks
        )
        transaction.write(parked, position, held)
    return []
