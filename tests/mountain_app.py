"""The application of the mountain drill: one small row for each event."""

from __future__ import annotations

import os

import psycopg

from penstock import Event, Pipeline, StreamEvent

STREAM = "steps"
CONSUMER = "climber"
FULL_NAME = f"mountain.{CONSUMER}"
EVENT_TYPE = "mountain.step"
BATCH_SIZE = "MOUNTAIN_BATCH_SIZE"
# The primary key refuses whatever is handled twice.
TABLES = "CREATE TABLE effect (position bigint PRIMARY KEY, number bigint NOT NULL)"
WRITE_EFFECT = "INSERT INTO effect VALUES (%s, %s)"


class Step(Event, type=EVENT_TYPE, version=1, key="path"):
    """One of very many."""

    path: str
    number: int


pipeline = Pipeline("mountain")


@pipeline.consumer(STREAM, name=CONSUMER, batch_size=int(os.environ.get(BATCH_SIZE, "100")))
def climb(event: StreamEvent[Step], cursor: psycopg.Cursor) -> None:
    """Write an effect."""
    cursor.execute(WRITE_EFFECT, (event.position, event.payload.number))
