"""An application whose events come from timers, for tests/timer_drill.py."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.app import Pipeline
from penstock.core.events import Event, StreamEvent

STREAM = "bells"
CONSUMER = "listen"
TABLES = """
CREATE TABLE plan (timer_id text PRIMARY KEY, bell text NOT NULL, due_at timestamptz NOT NULL);
CREATE TABLE rung (
    number     bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    event_uuid uuid        NOT NULL,
    timer_id   text        NOT NULL,
    handled_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE VIEW fired AS
SELECT metadata ->> '__timer_id__' AS timer_id, (metadata ->> '__timer_due_ms__')::bigint AS due_ms,
       created_at, id, key, event_uuid
  FROM events.outbox_event;
CREATE VIEW lateness AS
SELECT timer_id, f.created_at - p.due_at AS to_outbox, r.handled_at - p.due_at AS to_handler
  FROM plan p JOIN fired f USING (timer_id) JOIN rung r USING (timer_id);
"""
WRITE = "INSERT INTO rung (event_uuid, timer_id) VALUES (%s, %s)"


class Rang(Event, type="bells.rang", version=1, key="bell"):
    """A bell rings."""

    bell: str


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline, with one consumer."""
    pipeline = Pipeline("bells", **settings)
    pipeline.stream(STREAM, Rang)

    @pipeline.consumer(STREAM, name=CONSUMER)
    def listen(event: StreamEvent[Rang], cursor: psycopg.Cursor) -> None:
        cursor.execute(WRITE, (event.event_uuid, event.metadata["__timer_id__"]))

    return pipeline


pipeline = build_pipeline()
