"""An application whose numbers are watched: one consumer that does nothing."""

from __future__ import annotations

from penstock import Pipeline
from tests.events import Placed

pipeline = Pipeline("shop")


@pipeline.consumer("orders", name="bill")
def bill(event: Placed) -> None:
    """Only counted."""
