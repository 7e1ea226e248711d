"""An application with many keys and lanes, for several supervisors that stand for hosts."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.app import Pipeline
from penstock.core.events import Event, StreamEvent

STREAM = "movements"
CONSUMER = "ledger"
LANES = 16
TABLES = """
CREATE TABLE effect (
    number      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid  uuid        NOT NULL,
    account     text        NOT NULL,
    of_account  bigint      NOT NULL,
    handled_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
"""
WRITE_EFFECT = "INSERT INTO effect (event_uuid, account, of_account) VALUES (%s, %s, %s)"


class Moved(Event, type="fleet.moved", version=1, key="account"):
    """The nth movement of an account."""

    account: str
    number: int


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline, with one consumer in lanes."""
    pipeline = Pipeline("fleet", **settings)
    pipeline.stream(STREAM, Moved)

    @pipeline.consumer(STREAM, name=CONSUMER, lanes=LANES, batch_size=20)
    def write(event: StreamEvent[Moved], cursor: psycopg.Cursor) -> None:
        payload = event.payload
        cursor.execute(WRITE_EFFECT, (event.event_uuid, payload.account, payload.number))

    return pipeline


pipeline = build_pipeline()
