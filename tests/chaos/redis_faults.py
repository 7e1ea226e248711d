"""What is done to Redis: it ends, forgets, goes back in time, refuses, and stands still."""

from __future__ import annotations

import random

import redis

from tests.chaos.redis_pair import Persistence, connected
from tests.chaos.scene import Fault, Scene, fault, mend, some

REDIS = "redis"
AWAY_SECONDS = (0.0, 0.8)
LONG_SECONDS = (2.0, 5.0)
STALE_SECONDS = (0.2, 1.5)
REFUSE_SECONDS = (0.2, 1.5)
LEFT_MAX = 3
LOGS = "*:log"


@fault("redis-killed", takes=REDIS, weight=0.5)
def redis_killed(scene: Scene, chance: random.Random) -> str | None:
    """It ends, and comes back with everything that it had written into its file."""
    return _restarted(scene, chance.uniform(*AWAY_SECONDS), "aof", "with its file")


@fault("redis-away", takes=REDIS, weight=0.25)
def redis_away(scene: Scene, chance: random.Random) -> str | None:
    """It is gone for long enough that everybody has to do without it."""
    return _restarted(scene, chance.uniform(*LONG_SECONDS), "aof", "with its file")


@fault("redis-emptied", takes=REDIS, weight=0.5)
def redis_emptied(scene: Scene, chance: random.Random) -> str | None:
    """It had no persistence, and ends."""
    return _restarted(scene, chance.uniform(*AWAY_SECONDS), "none", "with nothing")


def _restarted(scene: Scene, seconds: float, persistence: Persistence, left: str) -> str | None:
    pair = scene.world.redis
    if not pair.is_up:
        return None
    pair.kill()
    try:
        scene.wait(seconds)
    finally:
        mend(lambda: pair.restart(persistence), what="Redis runs again")
    return f"Redis killed, away for {seconds:.2f} s, back {left}"


@fault("redis-lost-power", takes=REDIS, weight=0.5)
def redis_lost_power(scene: Scene, chance: random.Random) -> str | None:
    """With appendfsync everysec a power failure takes the last second along."""
    duration = chance.uniform(*STALE_SECONDS)
    pair = scene.world.redis
    if not pair.is_up:
        return None
    flushed = pair.size_of_file()
    scene.wait(duration)
    pair.kill()
    try:
        lost = pair.forget_since(flushed)
    finally:
        mend(pair.restart, what="Redis runs again")
    return f"Redis lost power, and the last {duration:.2f} s: {lost} bytes"


@fault("redis-restored", takes=REDIS, weight=0.5)
def redis_restored(scene: Scene, chance: random.Random) -> str | None:
    """It comes back as it was when the last snapshot was taken."""
    duration = chance.uniform(*STALE_SECONDS)
    pair = scene.world.redis
    if not pair.is_up:
        return None
    pair.save_snapshot()
    scene.wait(duration)
    pair.kill()
    mend(lambda: pair.restart("snapshot"), what="Redis runs again")
    return f"Redis restored from a snapshot of {duration:.2f} s ago"


@fault("redis-failed-over", takes=REDIS, weight=0.5)
def redis_failed_over(scene: Scene, chance: random.Random) -> str | None:
    """A replica that was cut off for a while becomes the primary."""
    duration = chance.uniform(*STALE_SECONDS)
    pair = scene.world.redis
    if not pair.is_up or not pair.replica_follows:
        return None
    pair.cut_off_replica()
    scene.wait(duration)
    pair.fail_over_to_stale_replica()
    return f"Redis failed over to a replica that is {duration:.2f} s behind"


@fault("redis-flushed", weight=0.8)
def redis_flushed(scene: Scene, _chance: random.Random) -> str | None:
    """FLUSHALL."""
    scene.world.redis.flush()
    return "FLUSHALL"


@fault("stream-deleted", weight=0.8)
def stream_deleted(scene: Scene, chance: random.Random) -> str | None:
    """DEL of one stream."""
    with connected(scene.world.direct_redis_url) as client:
        key = some(chance, log_keys(client))
        return f"DEL {key.decode()}" if key is not None and client.delete(key) else None


@fault("stream-trimmed", weight=1.0)
def stream_trimmed(scene: Scene, chance: random.Random) -> str | None:
    """XTRIM to nearly nothing, or to nothing."""
    left = chance.randint(0, LEFT_MAX)
    with connected(scene.world.direct_redis_url) as client:
        key = some(chance, log_keys(client))
        if key is None or not client.xtrim(key, maxlen=left, approximate=False):
            return None
    return f"XTRIM {key.decode()} MAXLEN {left}"


@fault("redis-out-of-memory", takes=REDIS, weight=0.5)
def redis_out_of_memory(scene: Scene, chance: random.Random) -> str | None:
    """It refuses everything that needs memory."""
    duration = chance.uniform(*REFUSE_SECONDS)
    scene.world.redis.limit_memory(1)
    try:
        scene.wait(duration)
    finally:
        mend(lambda: scene.world.redis.limit_memory(None), what="Redis has memory again")
    return f"maxmemory reached for {duration:.2f} s"


@fault("redis-read-only", takes=REDIS, weight=0.5)
def redis_read_only(scene: Scene, chance: random.Random) -> str | None:
    """The address leads to a replica, which reads but does not write."""
    duration = chance.uniform(*REFUSE_SECONDS)
    scene.world.redis.refuse_writes()
    try:
        scene.wait(duration)
    finally:
        mend(scene.world.redis.accept_writes, what="Redis accepts writes again")
    return f"Redis a read-only replica for {duration:.2f} s"


@fault("redis-frozen", takes=REDIS, weight=0.6)
def redis_frozen(scene: Scene, chance: random.Random) -> str | None:
    """Its process stands still."""
    duration = chance.uniform(*chance.choice((AWAY_SECONDS, AWAY_SECONDS, LONG_SECONDS)))
    if not scene.world.redis.freeze():
        return None
    try:
        scene.wait(duration)
    finally:
        scene.world.redis.thaw()
    return f"Redis stood still for {duration:.2f} s"


def log_keys(client: redis.Redis) -> list[bytes]:
    """The streams' keys that there are, in order."""
    return sorted(client.scan_iter(match=LOGS, count=1000))


FAULTS: tuple[Fault, ...] = (
    redis_killed,
    redis_away,
    redis_emptied,
    redis_lost_power,
    redis_restored,
    redis_failed_over,
    redis_flushed,
    stream_deleted,
    stream_trimmed,
    redis_out_of_memory,
    redis_read_only,
    redis_frozen,
)
