"""What operators ask about parked keys, and letting them be tried at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from penstock.core.lanes import key_hash
from penstock.errors import OperationRefused
from penstock.ops.dead_letters import reporting_loss
from penstock.stores.operations import Operation
from penstock.stores.parked_keys import FullParkedEvent, Head, ParkedKeys
from penstock.stores.queries import DEFAULT_SCHEMA

RELEASE_CHUNK = 1000

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Released:
    """What a release did."""

    operation_id: int
    waiting: int
    """Events that waited for their next attempt and are due now."""
    held: int
    """Held events that get one more attempt."""
    in_hand: int
    """Events that a worker tries at this moment anyway."""

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def find_parked(keys: ParkedKeys, position: int, consumer: str | None) -> FullParkedEvent:
    """The parked event at a position. Raises OperationRefused where there is none, or several."""
    found = keys.read(position, consumer)
    if len(found) == 1:
        return found[0]
    if not found:
        raise OperationRefused(
            f"Nothing is parked at position {position}"
            f"{f' for {consumer}' if consumer else ''}: it was handled, buried, or never failed."
        )
    names = ", ".join(parked.event.consumer for parked in found)
    raise OperationRefused(f"Several consumers have parked {position}: {names}. Add --consumer.")


def release(
    connection: Connection,
    consumer: str,
    *,
    position: int | None = None,
    key: str | None = None,
    by: str,
    reason: str = "",
    schema: str = DEFAULT_SCHEMA,
) -> Released:
    """Let the first event of one key, or of all, be tried now; a held one gets one attempt.

    Raises OperationRefused where nothing is parked, or the event waits behind another.
    """
    keys = ParkedKeys(connection, schema)
    if position is not None:
        _require_head(find_parked(keys, position, consumer))
    asked = {"position": position, "key": key}
    with reporting_loss("What was released stays so; run the same command for the rest."):
        chunk = _heads(keys, consumer, position=position, key=key, after=-1)
        if not chunk and key is not None:
            raise OperationRefused(f"{consumer} has parked nothing of key {key!r}.")
        operation = Operation(
            connection,
            "release",
            {name: value for name, value in asked.items() if value is not None},
            consumer=consumer,
            by=by,
            reason=reason,
            schema=schema,
        )
        done = Released(operation.id, 0, 0, 0)
        while chunk:
            done = _release_chunk(operation, consumer, chunk, done)
            chunk = _heads(keys, consumer, position=position, key=key, after=chunk[-1].position)
        operation.end("done")
    return done


def _heads(
    keys: ParkedKeys, consumer: str, *, position: int | None, key: str | None, after: int
) -> Sequence[Head]:
    if position is not None:
        # Its key was looked at already; it is alone.
        if after >= position:
            return ()
        parked = find_parked(keys, position, consumer)
        return (Head(position, parked.event.held, parked.letter_id),)
    hashed = None if key is None else key_hash(key, "")
    return keys.heads(consumer, key_hash=hashed, after=after, limit=RELEASE_CHUNK)


def _release_chunk(
    operation: Operation, consumer: str, heads: Sequence[Head], so_far: Released
) -> Released:
    waiting = [head.position for head in heads if not head.held]
    held = [head.letter_id for head in heads if head.held and head.letter_id is not None]
    released = operation.release(consumer, waiting) if waiting else 0
    moved = operation.move(held) if held else 0
    return Released(
        so_far.operation_id,
        so_far.waiting + released,
        so_far.held + moved,
        so_far.in_hand + len(heads) - released - moved,
    )


def _require_head(parked: FullParkedEvent) -> None:
    if parked.behind is not None:
        raise OperationRefused(
            f"Position {parked.event.position} waits behind {parked.behind}, the first of its key. "
            f"Nothing was changed; release {parked.behind} instead."
        )
