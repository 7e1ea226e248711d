"""One consumer under each guarantee. Its handler leaves a line outside of the database."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import text

from penstock import Context, Event, Guarantee, Pipeline

TABLES = "CREATE TABLE effect (number bigint)"
BATCH_SIZE = 5


class Counted(Event, type="counted", version=1):
    """The nth event."""

    number: int


def note(number: int) -> None:
    """What the world sees of a call: one line, there as soon as it is written."""
    with Path(os.environ["CALLS"]).open("a") as calls:
        calls.write(f"{number}\n")


def build_pipeline(**settings: Any) -> Pipeline:
    """All four, on one stream."""
    pipeline = Pipeline("guarantee", lease_seconds=1.0, lease_renew_seconds=0.3, **settings)
    least: dict[str, Any] = {
        "guarantee": Guarantee.AT_LEAST_ONCE,
        "start": "earliest",
        "batch_size": BATCH_SIZE,
    }
    most = {**least, "guarantee": Guarantee.AT_MOST_ONCE}
    pipeline.consumer("counts", name="exactly_once", batch_size=BATCH_SIZE)(exactly_once)
    pipeline.consumer("counts", name="at_least_once", **least)(only_calls)
    pipeline.consumer("counts", name="completed", **least)(completes)
    pipeline.consumer("counts", name="at_most_once", **most)(only_calls)
    return pipeline


def exactly_once(event: Counted, cursor: psycopg.Cursor[Any]) -> None:
    """Writes with the checkpoint."""
    note(event.number)
    cursor.execute("INSERT INTO effect VALUES (%s)", (event.number,))


def only_calls(event: Counted) -> None:
    """Calls the world, and nothing else."""
    note(event.number)


def completes(event: Counted, context: Context) -> None:
    """Calls the world, then completes."""
    note(event.number)
    with context.complete() as session:
        session.execute(text("INSERT INTO effect VALUES (:number)"), {"number": event.number})


pipeline = build_pipeline()
