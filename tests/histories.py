"""Reads what a consumer has written down, for the books."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from penstock.core.history import ConsumerHistory, Effect, HoleRow, ParkedRow, Seek, SettledRow
from penstock.core.leases import consumer_role

REDRIVEN = """
SELECT DISTINCT e.event_uuid::text
  FROM events.operation_event e JOIN events.operation o ON o.id = e.operation_id
 WHERE e.consumer = %s AND o.kind IN ('redrive', 'release')
"""
PARKED = """
SELECT event_uuid::text, position, key_hash, next_attempt_at IS NOT NULL, held,
       operation_id IS NOT NULL
  FROM events.parked_event WHERE consumer = %s
"""


def read_consumer(
    connection: psycopg.Connection[Any],
    full_name: str,
    stream_name: str,
    effects: Sequence[tuple[Any, ...]],
) -> ConsumerHistory:
    """Everything but the effects, which are the application's; in the caller's snapshot."""

    def ask(query: str, *parameters: object) -> list[tuple[Any, ...]]:
        return connection.execute(query.encode(), parameters or (full_name,)).fetchall()

    settled = ask(
        "SELECT event_uuid::text, position, outcome FROM events.processed_event WHERE consumer = %s"
    )
    dead = ask("SELECT event_uuid::text FROM events.dead_letter WHERE consumer = %s")
    seeks = ask(
        "SELECT old_checkpoint, new_checkpoint FROM events.seek WHERE consumer = %s ORDER BY id"
    )
    # Without a row the consumer is not registered yet, and has one lane at the beginning.
    (lanes, epoch, settled_to, start_position), *_ = [
        *ask(
            "SELECT lanes, epoch, settled_to, start_position FROM events.consumer WHERE name = %s"
        ),
        (1, 1, 0, 1),
    ]
    reached = dict(
        ask("SELECT role, checkpoint FROM events.stream_lease WHERE stream_name = %s", stream_name)
    )
    roles = [consumer_role(full_name, epoch, lane, lanes) for lane in range(lanes)]
    return ConsumerHistory(
        name=full_name.rpartition(".")[2],
        effects=tuple(Effect(*row) for row in effects),
        settled=tuple(SettledRow(*row) for row in settled),
        checkpoints=tuple(reached.get(role, start_position - 1) for role in roles),
        start_position=start_position,
        settled_to=settled_to,
        parked=tuple(ParkedRow(*row) for row in ask(PARKED)),
        dead=frozenset(uuid for (uuid,) in dead),
        seeks=tuple(Seek(*row) for row in seeks),
        redriven=frozenset(uuid for (uuid,) in ask(REDRIVEN)),
    )


def read_holes(connection: psycopg.Connection[Any], stream_name: str) -> tuple[HoleRow, ...]:
    """The positions of a stream that no event will ever have."""
    rows = connection.execute(
        "SELECT first, last FROM events.hole WHERE stream_name = %s", (stream_name,)
    ).fetchall()
    return tuple(HoleRow(*row) for row in rows)
