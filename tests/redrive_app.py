"""An application whose handler does nothing, for letters in great number."""

from __future__ import annotations

from typing import Any

from penstock import Pipeline, StreamEvent

STREAM = "orders"
CONSUMER = "nothing"

pipeline = Pipeline("redrive")


@pipeline.consumer(STREAM, name=CONSUMER, batch_size=500)
def nothing(event: StreamEvent[Any]) -> None:
    """Do nothing."""
