"""How much is measured in one round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Counts of one round; warm-up comes on top and is not timed."""

    consumed: int
    consumed_per_event: int
    published: int
    published_per_event: int
    senders: int
    sending_seconds: float
    latencies: int
    latencies_warm_up: int
    latency_handlers: tuple[str, ...]


FULL = Scale(
    consumed=10_000,
    consumed_per_event=600,
    published=20_000,
    published_per_event=2_000,
    senders=8,
    sending_seconds=1.5,
    latencies=150,
    latencies_warm_up=20,
    latency_handlers=("psycopg", "orm"),
)
# Enough to see that everything runs and that both sides do the same; too little to be a measure.
QUICK = Scale(
    consumed=500,
    consumed_per_event=40,
    published=500,
    published_per_event=100,
    senders=2,
    sending_seconds=0.1,
    latencies=5,
    latencies_warm_up=1,
    latency_handlers=("psycopg",),
)
