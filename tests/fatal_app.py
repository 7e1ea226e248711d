"""An application with one event among many that ends whoever handles it."""

from __future__ import annotations

import os
from typing import Any

import psycopg

from penstock.app import Pipeline
from penstock.core.events import Event

FATAL = 50
TABLES = "CREATE TABLE effect (number bigint)"


class Counted(Event, type="fatal.counted", version=1, key="key"):
    """The nth event."""

    key: str
    number: int


pipeline = Pipeline("fatal")


@pipeline.consumer("counts", name="count", lanes=int(os.environ.get("LANES", "1")))
def count(event: Counted, cursor: psycopg.Cursor[Any]) -> None:
    """Write an effect, unless it is that event."""
    if event.number == FATAL:
        os._exit(23)
    cursor.execute("INSERT INTO effect VALUES (%s)", (event.number,))
