"""The statements on parked events and dead letters on the model."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tests.simulation.database import WAITING, Parameters, Rows, Transaction
from tests.simulation.inbox_statements import array, mark, numbers
from tests.simulation.log_statements import statement
from tests.simulation.machine import NEVER
from tests.simulation.rows import DeadRow, ParkedRow

SETBACKS_MAX = 20
"""How many of them are kept."""


def _of_lane(rows: Iterable[ParkedRow], parameters: Parameters) -> list[ParkedRow]:
    lanes, lane = parameters["lanes"], parameters["lane"]
    return [row for row in rows if row.key_hash % lanes == lane]


@statement("parked.sql", "look")
def look(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.rows(transaction.database.parked).values()
    rows = [
        row for row in _of_lane(parked, parameters) if row.next_attempt_at is not None or row.held
    ]
    times = [row.next_attempt_at for row in rows if row.next_attempt_at is not None]
    keys = [row.key_hash for row in rows] if 0 < len(rows) <= parameters["keys_max"] else None
    now = transaction.database.machine.now
    return [(bool(rows), keys, min(times) - now if times else None)]


@statement("parked.sql", "due")
def due(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.rows(transaction.database.parked)
    now, count, in_order = (
        transaction.database.machine.now,
        parameters["count"],
        parameters["in_order"],
    )
    heads = [
        row
        for row in _of_lane(parked.values(), parameters)
        if row.next_attempt_at is not None and row.next_attempt_at <= now
    ]
    if in_order:
        heads = [row for row in heads if row.position == _first(parked.values(), row.key_hash)]
    heads.sort(key=lambda row: (row.next_attempt_at, row.position))
    chosen: set[int] = set()
    for head in heads[:count]:
        following = sorted(
            row.position
            for row in parked.values()
            if row.key_hash == head.key_hash and row.position >= head.position and not row.held
        )
        has_failed = head.setbacks > 0 and head.operation_id is None
        is_alone = head.attempts > 0 or has_failed or not in_order
        chosen.update(following[: 1 if is_alone else count])
    rows = [parked[position] for position in sorted(chosen)[:count]]
    return [
        (row.position, row.entry, row.attempts, row.setbacks, row.operation_id is not None)
        for row in rows
    ]


def _first(rows: Iterable[ParkedRow], key_hash: int) -> int | None:
    return min((row.position for row in rows if row.key_hash == key_hash), default=None)


@statement("parked.sql", "let_overtake")
def let_overtake(transaction: Transaction, _: Parameters) -> Rows:
    parked = transaction.database.parked
    for position, seen in sorted(parked.items()):
        if seen.next_attempt_at is None and not seen.held:
            transaction.lock(parked, position)
            # It may have gone, or been told, while we waited.
            row = transaction.rows(parked).get(position)
            if row is not None and row.next_attempt_at is None and not row.held:
                now = transaction.database.machine.now
                transaction.write(parked, position, row._replace(next_attempt_at=now))
    return []


@statement("parked.sql", "still_there")
def still_there(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.rows(transaction.database.parked)
    asked = (parked.get(position) for position in numbers(parameters["positions"]))
    there = [row.position for row in asked if row is not None and not row.held]
    return [(position,) for position in _in_order(parked, there, parameters)]


def _in_order(
    parked: dict[int, ParkedRow], positions: list[int], parameters: Parameters
) -> list[int]:
    """Without those behind the first of their key that is left out."""
    if not parameters["in_order"]:
        return positions
    left_out: dict[int, int] = {}
    for position, row in parked.items():
        if position not in positions:
            left_out[row.key_hash] = min(position, left_out.get(row.key_hash, position))
    return [p for p in positions if p < left_out.get(parked[p].key_hash, NEVER)]


@statement("parked.sql", "claim")
def claim(transaction: Transaction, parameters: Parameters) -> Rows:
    mark(transaction, parameters)
    parked = transaction.database.parked
    # What is read beside the locks is as it was when the statement began.
    before = {**transaction.rows(parked)}
    locked: list[int] = []
    for position in numbers(parameters["positions"]):
        row = before.get(position)
        if row is None or row.held:
            continue
        transaction.lock(parked, position)
        # It may have gone while we waited.
        row = transaction.rows(parked).get(position)
        if row is not None and not row.held:
            locked.append(position)
    claimed = _in_order(before, locked, parameters)
    transaction.seal = (parameters["seal_id"], len(claimed))
    return [(claimed, [])]


@statement("parked.sql", "settle")
def settle(transaction: Transaction, parameters: Parameters) -> Rows:
    database, positions = transaction.database, numbers(parameters["positions"])
    keys = []
    for position in positions:
        row = transaction.rows(database.parked).get(position)
        if row is None:
            continue
        transaction.write(database.parked, position, None)
        _set_outcome(transaction, row, parameters["outcome"])
        if row.event_uuid in transaction.rows(database.dead):
            transaction.write(database.dead, row.event_uuid, None)
        keys.append(row.key_hash)
    _promote(transaction, keys, positions)
    return [(None,)]


def _set_outcome(transaction: Transaction, row: ParkedRow, outcome: str) -> None:
    processed = transaction.database.processed
    if row.event_uuid in transaction.rows(processed):
        transaction.write(processed, row.event_uuid, (row.position, outcome))


def _promote(transaction: Transaction, keys: Iterable[int], leaving: list[int]) -> None:
    parked = transaction.database.parked
    now = transaction.database.machine.now
    for key_hash in sorted(set(keys)):
        rows = transaction.rows(parked)
        first = _first((row for p, row in rows.items() if p not in leaving), key_hash)
        if first is not None and rows[first].next_attempt_at is None and not rows[first].held:
            # Whoever has it in hand may be about to remove it.
            transaction.lock(parked, first)
            if (row := transaction.rows(parked).get(first)) is not None:
                transaction.write(parked, first, row._replace(next_attempt_at=now))


@statement("parked.sql", "park")
def park(transaction: Transaction, parameters: Parameters) -> Rows:
    parked = transaction.database.parked
    added: dict[int, list[tuple[int, str, str]]] = {}
    for position, event_uuid, key_hash, entry in sorted(
        zip(
            numbers(parameters["positions"]),
            array(parameters["event_uuids"]),
            numbers(parameters["key_hashes"]),
            parameters["entries"],
            strict=True,
        )
    ):
        added.setdefault(key_hash, []).append((position, event_uuid, entry))
    queues: Rows = []
    for key_hash, events in added.items():
        of_key = [r for r in transaction.rows(parked).values() if r.key_hash == key_hash]
        first = min((r for r in of_key if r.position < events[0][0]), default=None)
        if first is not None and not transaction.share(parked, first.position):
            first = None
        depth = max(of_key).depth if of_key else 0
        for n, event in enumerate(events, 1):
            is_first = first is None and n == 1
            _park(transaction, parameters, key_hash, event, depth=depth + n, is_first=is_first)
        waiting = depth - first.depth if first is not None else 0
        queues.append((first.position if first is not None else 0, waiting, len(events)))
    return queues


def _park(
    transaction: Transaction,
    parameters: Parameters,
    key_hash: int,
    event: tuple[int, str, str],
    *,
    depth: int,
    is_first: bool,
) -> None:
    now, delay = transaction.database.machine.now, parameters["delay_seconds"]
    position, event_uuid, entry = event
    next_attempt_at: float | None = None
    if not parameters["held"]:
        if delay is not None:
            next_attempt_at = now + delay
        elif is_first:
            next_attempt_at = now
    row = ParkedRow(
        position,
        event_uuid,
        key_hash,
        entry,
        parameters["attempts"],
        next_attempt_at,
        parameters["held"],
        depth,
        0 if parameters["error"] is None else 1,
        parked_at=now,
    )
    transaction.insert(transaction.database.parked, position, row)


@statement("parked.sql", "postpone")
def postpone(transaction: Transaction, parameters: Parameters) -> Rows:
    parked, position = transaction.database.parked, parameters["position"]
    row = transaction.rows(parked).get(position)
    if row is not None:
        held = parameters["held"]
        due_at = None if held else transaction.database.machine.now + parameters["delay_seconds"]
        is_on_its_way = row.attempts == parameters["attempts"]
        row = row._replace(
            operation_id=row.operation_id if is_on_its_way else None,
            attempts=parameters["attempts"],
            held=held,
            next_attempt_at=due_at,
            setbacks=min(SETBACKS_MAX, row.setbacks + 1),
        )
        transaction.write(parked, position, row)
    return []


@statement("parked.sql", "bury")
def bury(transaction: Transaction, parameters: Parameters) -> Rows:
    database, starts = transaction.database, parameters["starts"]
    parked = transaction.rows(database.parked).get(parameters["position"])
    earlier = 0 if parked is None else parked.setbacks
    row = DeadRow(
        parameters["position"],
        parameters["reason"],
        parameters["key_hash"],
        parameters["entry"],
        earlier + (1 if starts is None else len(json.loads(starts))),
    )
    transaction.write(database.dead, parameters["event_uuid"], row)
    return []


@statement("parked.sql", "remove")
def remove(transaction: Transaction, parameters: Parameters) -> Rows:
    parked, position = transaction.database.parked, parameters["position"]
    row = transaction.rows(parked).get(position)
    if row is not None:
        transaction.write(parked, position, None)
        _set_outcome(transaction, row, "dead")
        _promote(transaction, [row.key_hash], [position])
    return [(None,)]


@statement("parked.sql", "begin_letter")
def begin_letter(transaction: Transaction, parameters: Parameters) -> Rows:
    processed, event_uuid = transaction.database.processed, parameters["event_uuid"]
    if event_uuid not in transaction.rows(processed):
        return [(None,)]
    transaction.lock(processed, event_uuid)
    _, outcome = transaction.rows(processed).get(event_uuid, (0, None))
    return [(outcome,)]


@statement("parked.sql", "declare_dead")
def declare_dead(transaction: Transaction, parameters: Parameters) -> Rows:
    processed, event_uuid = transaction.database.processed, parameters["event_uuid"]
    row = transaction.rows(processed).get(event_uuid)
    if row is not None:
        transaction.write(processed, event_uuid, (row[0], "dead"))
    return []


WAITING.add(let_overtake)
