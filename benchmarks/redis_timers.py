"""Redis timers among a million others, against the same among a thousand."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import redis

from benchmarks.bed import Bed
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from penstock.core.timer_envelope import pack
from penstock.stores.timer_queue import RedisTimers

# Sorted sets find a place in logarithmic time: 20 steps instead of 10, of which none is felt.
TARGET = 0.8
FEW_PENDING = 1_000
FILLED_AT_ONCE = 5_000
CLAIMED_AT_ONCE = 5
DAY_SECONDS = 86_400.0
PAYLOAD = pack(b'{"order_id": 1234567}', {"content-type": "application/json"})


class Topic:
    """A topic with so many timers that are due within a year, but not soon."""

    def __init__(self, store: RedisTimers, name: str) -> None:
        self.store = store
        self.name = name
        self._numbers = iter(range(1_000_000_000))

    def fill(self, client: redis.Redis, count: int) -> None:
        """Arm what is not touched any more; directly, since that is not what is measured."""
        keys = self.store.names.of(self.name)
        now = time.time()
        for first in range(0, count, FILLED_AT_ONCE):
            ids = [f"pending-{n}" for n in range(first, min(first + FILLED_AT_ONCE, count))]
            with client.pipeline(transaction=False) as batch:
                batch.hset(keys.payloads, mapping=dict.fromkeys(ids, PAYLOAD))
                scores = {
                    timer_id: now + DAY_SECONDS * (1 + (first + n) * 7919 % 364)
                    for n, timer_id in enumerate(ids)
                }
                batch.zadd(keys.timeline, scores)
                batch.execute()

    def publish(self, count: int, delay_seconds: float) -> list[str]:
        """Arm so many."""
        ids = [f"measured-{next(self._numbers)}" for _ in range(count)]
        for timer_id in ids:
            self.store.publish(self.name, timer_id, PAYLOAD, delay_seconds=delay_seconds)
        return ids

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel them; each has to be there."""
        for timer_id in ids:
            assert self.store.cancel(self.name, timer_id)

    def handle(self, count: int) -> None:
        """Claim and commit so many, as a worker does."""
        done = 0
        while done < count:
            claims = self.store.claim(self.name, count=CLAIMED_AT_ONCE, lease_seconds=30.0)
            assert claims.timers
            for timer in claims.timers:
                self.store.commit(timer)
            done += len(claims.timers)


def _published(topic: Topic, count: int) -> float:
    begun = time.perf_counter()
    ids = topic.publish(count, DAY_SECONDS * 180)
    seconds = time.perf_counter() - begun
    topic.cancel(ids)
    return seconds


def _cancelled(topic: Topic, count: int) -> float:
    ids = topic.publish(count, DAY_SECONDS * 180)
    begun = time.perf_counter()
    topic.cancel(ids)
    return time.perf_counter() - begun


def _handled(topic: Topic, count: int) -> float:
    topic.publish(count, 0.0)
    begun = time.perf_counter()
    topic.handle(count)
    return time.perf_counter() - begun


class AmongMany:
    """Measures one action in both topics, in turn."""

    def __init__(
        self,
        claim: Claim,
        act: Callable[[Topic, int], float],
        many: Topic,
        few: Topic,
        scale: Scale,
    ) -> None:
        self.claim = claim
        self._act = act
        self._many = many
        self._few = few
        self._scale = scale

    def measure(self) -> Round:
        """One round: slices of both sides in turn."""
        seconds = [0.0, 0.0]
        for _ in range(self._scale.slices):
            seconds[0] += self._act(self._many, self._scale.redis_timers)
            seconds[1] += self._act(self._few, self._scale.redis_timers)
        count = self._scale.redis_timers * self._scale.slices
        return Round({"timers/s": count / seconds[0]}, {"timers/s": count / seconds[1]})


@contextmanager
def opened_redis_timers(bed: Bed, scale: Scale) -> Iterator[Sequence[AmongMany]]:
    """Publish, cancel, and claim with commit, each among many and among few."""
    store = RedisTimers(bed.redis_url)
    client = redis.Redis.from_url(bed.redis_url)
    many, few = Topic(store, "bench-many"), Topic(store, "bench-few")
    try:
        many.fill(client, scale.redis_timers_pending)
        few.fill(client, FEW_PENDING)
        shown = f"among {scale.redis_timers_pending:,} by among {FEW_PENDING:,}"
        yield [
            AmongMany(
                Claim(f"redis-timers-{name}", f"{name} {shown}", TARGET), act, many, few, scale
            )
            for name, act in (
                ("publish", _published),
                ("cancel", _cancelled),
                ("handle", _handled),
            )
        ]
    finally:
        for topic in (many, few):
            keys = store.names.of(topic.name)
            client.unlink(keys.timeline, keys.payloads, keys.state)
        client.close()
        store.close()
