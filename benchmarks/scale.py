"""How much is measured in one round."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Counts of one slice. A round alternates between the sides, so many slices of each."""

    slices: int
    consumed: int
    consumed_per_event: int
    published: int
    published_per_event: int
    senders: int
    sending_seconds: float
    latencies: int
    latencies_warm_up: int
    latency_handlers: tuple[str, ...]
    split: int
    decoded: int
    archived: int
    timers: int
    timers_pending: int
    redis_timers: int
    redis_timers_pending: int


FULL = Scale(
    slices=5,
    consumed=2_000,
    consumed_per_event=150,
    published=4_000,
    published_per_event=500,
    senders=8,
    sending_seconds=0.4,
    latencies=30,
    latencies_warm_up=20,
    latency_handlers=("psycopg", "orm"),
    split=40_000,
    decoded=50_000,
    archived=250_000,
    timers=1_000,
    timers_pending=1_000_000,
    redis_timers=2_000,
    redis_timers_pending=1_000_000,
)
# Enough to see that everything runs and that both sides do the same; too little to be a measure.
QUICK = Scale(
    slices=2,
    consumed=500,
    consumed_per_event=20,
    published=500,
    published_per_event=100,
    senders=2,
    sending_seconds=0.05,
    latencies=3,
    latencies_warm_up=1,
    latency_handlers=("psycopg",),
    split=1_000,
    decoded=2_000,
    archived=1_000,
    timers=100,
    timers_pending=5_000,
    redis_timers=100,
    redis_timers_pending=5_000,
)
