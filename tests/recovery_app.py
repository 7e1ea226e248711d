"""The application of the recovery drill: one consumer of the workload, with every default."""

from __future__ import annotations

import psycopg

from penstock.app import Pipeline
from tests.workload import STREAM, WRITE_EFFECT_DRIVER, Given, Posted, Remarked, effect_of

CONSUMER = "cursor"
FULL_NAME = f"line.{CONSUMER}"

# The names are the workload's, so that the same books can be closed.
pipeline = Pipeline("line")
pipeline.stream(STREAM, Posted, Remarked)


@pipeline.consumer(STREAM, name=CONSUMER)
def write(event: Given, cursor: psycopg.Cursor) -> None:
    """Write an effect."""
    cursor.execute(WRITE_EFFECT_DRIVER, list(effect_of(FULL_NAME, event).values()))
