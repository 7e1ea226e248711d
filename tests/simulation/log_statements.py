"""The statements of publishers and readers on the model: outbox, streams, keys."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.leases import PUBLISHER
from penstock.stores.queries import Queries
from tests.simulation.database import (
    NAMES,
    STATEMENTS,
    Database,
    Parameters,
    Refused,
    Rows,
    Statement,
    Transaction,
)
from tests.simulation.rows import Hole, OutboxRow

LEASE_LOST = "PS003"
TIMELINE_CHANGED = "PS005"
MAC_KEYS: Rows = [("key1", b"0123456789abcdef")]


def statement(file_name: str, name: str) -> Callable[[Statement], Statement]:
    """Registers what a query of a `.sql` file does."""

    def register(function: Statement) -> Statement:
        query = Queries(file_name)[name]
        STATEMENTS[query] = function
        NAMES[query] = f"{file_name[:-4]}.{name}"
        return function

    return register


# ── outbox ────────────────────────────────────────────────────────────────────────────────────


@statement("outbox.sql", "unnumbered_streams")
def unnumbered_streams(transaction: Transaction, _: Parameters) -> Rows:
    database = transaction.database
    return [(database.stream_name,)] if _has_unnumbered(database) else []


@statement("outbox.sql", "has_unnumbered")
def has_unnumbered(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    is_asked = database.stream_name in parameters["stream_names"]
    return [(database.stream_name,)] if is_asked and _has_unnumbered(database) else []


def _has_unnumbered(database: Database) -> bool:
    return any(row.position is None for row in database.outbox.values())


@statement("outbox.sql", "number")
def number(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    require_publisher(database, parameters)
    if database.stream_timeline != database.timeline:
        raise Refused(TIMELINE_CHANGED, "another timeline")
    return assign(database, database.head, parameters)


def require_publisher(database: Database, parameters: Parameters) -> None:
    row = database.leases[PUBLISHER]
    if (row.owner_id, row.term) != (parameters["owner_id"], parameters["term"]):
        raise Refused(LEASE_LOST, "the lease is held by another worker")


def assign(database: Database, head: int, parameters: Parameters) -> Rows:
    """Give out the positions behind `head`."""
    numbered: Rows = []
    for row in database.unnumbered()[: parameters["batch_size"]]:
        head += 1
        numbered.append((head, place(database, row, head, parameters["term"])))
    if numbered:
        database.head = head
        database.stream_timeline = database.timeline
    return numbered


def place(database: Database, row: OutboxRow, position: int, term: int) -> str:
    body = body_of(database, row, term)
    database.outbox[row.id] = database.by_position[position] = row._replace(
        position=position, body=body
    )
    return body


def body_of(database: Database, row: OutboxRow, term: int) -> str:
    """What events.entry prints."""
    key = "null" if row.key is None else f'"{row.key}"'
    return (
        f"event\n{database.origin}\n{term}\n{row.id}\n{row.event_uuid}\nT\n1\n\n0\n{key}\n{{}}\n"
        f"{row.number}"
    )


@statement("outbox.sql", "read")
def read_outbox(transaction: Transaction, parameters: Parameters) -> Rows:
    database, after = transaction.database, parameters["after"]
    rows: Rows = [(p, row.body) for p, row in database.by_position.items() if p > after]
    rows += [(hole.last, hole_body(database, hole)) for hole in database.holes if hole.last > after]
    rows.sort()
    return rows[: parameters["count"]]


def hole_body(database: Database, hole: Hole) -> str:
    """What events.hole_entry prints."""
    return f"hole\n{database.origin}\n{hole.first}\n{hole.last}"


@statement("mac_key.sql", "read")
def read_mac_keys(_: Transaction, __: Parameters) -> Rows:
    return MAC_KEYS


@statement("source.sql", "read")
def read_source(_: Transaction, __: Parameters) -> Rows:
    """It is no other service's stream."""
    return []


# ── streams ───────────────────────────────────────────────────────────────────────────────────


@statement("stream.sql", "register")
def register_stream(_: Transaction, __: Parameters) -> Rows:
    return []


@statement("stream.sql", "read")
def read_stream(transaction: Transaction, _: Parameters) -> Rows:
    database = transaction.database
    return [(database.stream_name, database.origin, database.head, database.published)]


@statement("stream.sql", "unleased")
def unleased(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    row = database.leases[PUBLISHER]
    is_free = row.until < database.machine.now or row.worker_id == parameters["worker_id"]
    return [(database.stream_name,)] if is_free else []


@statement("stream.sql", "confirm")
def confirm(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    database.published = max(database.published, parameters["position"])
    return [("off",)]


@statement("stream.sql", "incarnation")
def incarnation(transaction: Transaction, _: Parameters) -> Rows:
    return [(f"7/1/{transaction.database.timeline}",)]


@statement("stream.sql", "is_in_hole")
def is_in_hole(transaction: Transaction, parameters: Parameters) -> Rows:
    position = parameters["position"]
    return [(any(h.first <= position < h.last for h in transaction.database.holes),)]


@statement("stream.sql", "step_over")
def step_over(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    require_publisher(database, parameters)
    checkpoints = [row.checkpoint for _, row in database.consumer_leases()]
    used = max(database.head, parameters["reached"], *checkpoints, 0)
    hole = Hole(database.head + 1, used + parameters["margin"])
    database.holes.append(hole)
    database.head = hole.last
    database.stream_timeline = database.timeline
    return [hole]


@statement("stream.sql", "refill_base")
def refill_base(transaction: Transaction, parameters: Parameters) -> Rows:
    database = transaction.database
    lowest = min((row.checkpoint for _, row in database.consumer_leases()), default=None)
    wanted = database.published if lowest is None else min(database.published, lowest)
    retained = min(database.by_position, default=database.head + 1) - 1
    return [(max(0, database.head - parameters["length_max"], retained, wanted),)]
