"""The statements of a batch on the model: claim, unclaim, fence, and what a handler writes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.database import Database, Parameters, Refused, Rows, Transaction
from tests.simulation.lease_statements import move_checkpoint
from tests.simulation.log_statements import LEASE_LOST, body_of, statement
from tests.simulation.rows import Effect

SEAL_BROKEN = "PS002"
NOT_ALL_FRESH = "PS004"
NOT_NUMBERED = "PS006"
NUMBERING_SECONDS_MAX = 0.3


def array(literal: str) -> list[str]:
    """The values of an array literal."""
    return literal[1:-1].split(",") if len(literal) > 2 else []


def numbers(literal: str) -> list[int]:
    """The same for numbers."""
    return [int(value) for value in array(literal)]


@statement("consumer.sql", "claim_batch")
def claim_batch(transaction: Transaction, parameters: Parameters) -> Rows:
    mark(transaction, parameters)
    return _claim(transaction, parameters, array(parameters["outcomes"]))


@statement("consumer.sql", "claim_among_parked")
def claim_among_parked(transaction: Transaction, parameters: Parameters) -> Rows:
    mark(transaction, parameters)
    first = _first_parked(transaction)
    outcomes = [
        "parked" if outcome == "handled" and first.get(key_hash, position) < position else outcome
        for outcome, position, key_hash in zip(
            array(parameters["outcomes"]),
            numbers(parameters["positions"]),
            numbers(parameters["key_hashes"]),
            strict=True,
        )
    ]
    return _claim(transaction, parameters, outcomes)


def _first_parked(transaction: Transaction) -> dict[int, int]:
    """The first parked position of each key."""
    first: dict[int, int] = {}
    for row in transaction.rows(transaction.database.parked).values():
        first[row.key_hash] = min(row.position, first.get(row.key_hash, row.position))
    return first


@statement("consumer.sql", "survey")
def survey(transaction: Transaction, parameters: Parameters) -> Rows:
    processed = transaction.database.processed
    first = _first_parked(transaction) if parameters["in_order"] else {}
    fresh = [
        position
        for event_uuid, position, key_hash in zip(
            array(parameters["event_uuids"]),
            numbers(parameters["positions"]),
            numbers(parameters["key_hashes"]),
            strict=True,
        )
        if event_uuid not in processed and first.get(key_hash, position) >= position
    ]
    return [(fresh,)]


def mark(transaction: Transaction, parameters: Parameters) -> None:
    """The advisory locks by which a successor finds this transaction."""
    transaction.groups = (parameters["role"], parameters["epoch_group"])


def _claim(transaction: Transaction, parameters: Parameters, outcomes: Sequence[str]) -> Rows:
    fresh: list[int] = []
    waiting: list[int] = []
    processed = transaction.database.processed
    for event_uuid, position, outcome in zip(
        array(parameters["event_uuids"]), numbers(parameters["positions"]), outcomes, strict=True
    ):
        if transaction.insert(processed, event_uuid, (position, outcome)):
            (waiting if outcome == "parked" else fresh).append(position)
    transaction.seal = (parameters["seal_id"], len(fresh))
    return [(fresh, waiting)]


@statement("consumer.sql", "unclaim")
def unclaim(transaction: Transaction, parameters: Parameters) -> Rows:
    processed = transaction.database.processed
    for event_uuid in array(parameters["event_uuids"]):
        if event_uuid in transaction.rows(processed):
            transaction.write(processed, event_uuid, None)
    return []


@statement("consumer.sql", "fence")
def fence(transaction: Transaction, parameters: Parameters) -> Rows:
    """Raises unless all is as the worker takes it; the caller commits in the same moment."""
    seal, transaction.seal = transaction.seal, None
    if seal is None or seal[0] != parameters["seal_id"]:
        raise Refused(SEAL_BROKEN, "the seal is missing")
    row = transaction.database.leases.get(parameters["role"])
    if not move_checkpoint(transaction.database, parameters):
        raise Refused(LEASE_LOST, "the lease is held by another worker")
    if seal[1] != parameters["fresh"]:
        assert row is not None
        transaction.database.leases[parameters["role"]] = row
        raise Refused(NOT_ALL_FRESH, f"{seal[1]} events are new, not {parameters['fresh']}")
    return []


@statement("early.sql", "claim_early")
def claim_early(transaction: Transaction, parameters: Parameters) -> Rows:
    database, after = transaction.database, parameters["after"]
    waiting, dice = database.unnumbered(), database.machine.dice
    if not waiting or database.head != after:
        return [(None,)]
    row = waiting[0]
    if dice() < database.wrong_share:
        row = waiting[int(dice() * len(waiting))]
    claim = {
        "event_uuids": f"{{{row.event_uuid}}}",
        "positions": f"{{{after + 1}}}",
        "outcomes": "{handled}",
    }
    ((fresh, _),) = claim_batch(transaction, {**parameters, **claim})
    return [(body_of(database, row, 0) if fresh else None,)]


@statement("early.sql", "require_numbered")
def require_numbered(transaction: Transaction, parameters: Parameters) -> Rows:
    """A numbering that is under way is waited for."""
    database = transaction.database
    if not _is_numbered(database, parameters) and database.machine.current is not None:
        transaction.sleep(NUMBERING_SECONDS_MAX * database.machine.dice())
    if not _is_numbered(database, parameters):
        raise Refused(NOT_NUMBERED, "the event is not there")
    return []


def _is_numbered(database: Database, parameters: Parameters) -> bool:
    row = database.by_position.get(parameters["position"])
    return row is not None and row.event_uuid == parameters["event_uuid"]


def write_effect(transaction: Transaction, effect: Effect) -> None:
    """A handler's INSERT."""
    transaction.effects.append(effect)
