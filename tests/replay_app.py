"""An application whose handler notes what it sees, calls a file as its outside, and may fail."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg

from penstock import Context, Pipeline, Retry, StreamEvent

STREAM = "orders"
CONSUMER = "shop.bill"
TABLES = """
CREATE TABLE effect (serial bigint GENERATED ALWAYS AS IDENTITY, position bigint, key text,
                     is_replay boolean, idempotency_key text);
CREATE TABLE bad (position bigint PRIMARY KEY, only_in_replays boolean NOT NULL DEFAULT true)
"""

pipeline = Pipeline("shop")


@pipeline.consumer(
    STREAM,
    name="bill",
    lanes=int(os.environ.get("REPLAY_LANES", "1")),
    batch_size=5,
    retry=Retry.fixed(seconds=0.05, attempts_max=2),
)
def bill(event: StreamEvent[Any], cursor: psycopg.Cursor[Any], context: Context) -> None:
    """Note the event, unless it is bad."""
    outside = os.environ.get("REPLAY_OUTSIDE")
    if outside:
        context.once("charge", lambda: _charge(Path(outside), event.position))
    if cursor.execute(
        "SELECT 1 FROM bad WHERE position = %s AND (%s OR NOT only_in_replays)",
        (event.position, context.is_replay),
    ).fetchone():
        raise RuntimeError(f"{event.position} is bad")
    cursor.execute(
        "INSERT INTO effect (position, key, is_replay, idempotency_key) VALUES (%s, %s, %s, %s)",
        (event.position, event.key, context.is_replay, context.idempotency_key("charge")),
    )


def _charge(outside: Path, position: int) -> int:
    with outside.open("a") as file:
        file.write(f"{position}\n")
    return position
