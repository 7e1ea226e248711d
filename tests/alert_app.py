"""An application with two consumers that fail on the events that say so, for alert scenes."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.app import Pipeline
from penstock.core.events import Event, StreamEvent
from penstock.core.retry import Retry
from penstock.errors import FatalError

PIPELINE = "shop"
STREAM = "orders"
BILL = "bill"
SHIP = "ship"


class Placed(Event, type="alerts.placed", version=1, key="customer"):
    """An order."""

    customer: str
    trouble: str = ""
    """The consumer that fails on it."""


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline with both consumers."""
    pipeline = Pipeline(PIPELINE, **settings)
    pipeline.stream(STREAM, Placed)

    @pipeline.consumer(STREAM, name=BILL)
    def bill(event: StreamEvent[Placed], _cursor: psycopg.Cursor) -> None:
        if event.payload.trouble == BILL:
            raise FatalError("there is no such customer")

    @pipeline.consumer(STREAM, name=SHIP, retry=Retry.none(), on_exhausted="hold")
    def ship(event: StreamEvent[Placed], _cursor: psycopg.Cursor) -> None:
        if event.payload.trouble == SHIP:
            raise RuntimeError("there is no such address")

    return pipeline


pipeline = build_pipeline()
