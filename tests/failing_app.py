"""An application whose handler fails for the keys that a file names, for as long as it does."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg

from penstock import Event, Pipeline, Retry, StreamEvent

STREAM = "movements"
CONSUMER = "ledger"
FAILING_FILE = "FAILING_FILE"
TABLES = """
CREATE TABLE effect (
    number      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid  uuid        NOT NULL,
    key         text        NOT NULL,
    of_key      bigint      NOT NULL,
    handled_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""
WRITE_EFFECT = "INSERT INTO effect (event_uuid, key, of_key) VALUES (%s, %s, %s)"
RETRY = Retry.exponential(first_seconds=0.1, longest_seconds=1.0, attempts_max=1000)


class Moved(Event, type="moved", version=1, key="key"):
    """The nth movement of a key."""

    key: str
    number: int


pipeline = Pipeline("failing")
_failing = Path(os.environ.get(FAILING_FILE, os.devnull))


@pipeline.consumer(STREAM, name=CONSUMER, lanes=2, retry=RETRY)
def write(event: StreamEvent[Moved], cursor: psycopg.Cursor) -> None:
    """Write an effect, unless its key is named in the file."""
    moved = event.payload
    if moved.key in _failing.read_text().split():
        raise RuntimeError(f"{moved.key} fails just now")
    cursor.execute(WRITE_EFFECT, (event.event_uuid, moved.key, moved.number))
