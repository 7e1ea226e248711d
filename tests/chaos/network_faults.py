"""What happens between the processes and the servers: connections cut, mute, slow, or deceiving."""

from __future__ import annotations

import random
from collections.abc import Callable

from penstock.stores.queries import lua
from penstock.stores.redis_link import Script
from tests.chaos.scene import Fault, Scene, fault
from tests.proxy import Proxy

HOLE_SECONDS = (0.1, 1.5)
DELAY_SECONDS = (0.5, 2.0)
HELD_BACK_SECONDS = (0.002, 0.03)
REPLY_SECONDS = 3.0
NTH_MAX = 5

COMMIT = b"COMMIT"
APPEND = Script(lua("append")).sha.encode()
"""How an append is recognised on the wire."""

Between = Callable[[Scene], Proxy]


def to_postgres(scene: Scene) -> Proxy:
    """Between everybody and PostgreSQL."""
    return scene.world.database_proxy


def to_redis(scene: Scene) -> Proxy:
    """Between everybody and Redis."""
    return scene.world.redis_proxy


def _cut(server: str, between: Between, weight: float) -> Fault:
    @fault(f"{server}-cut", weight=weight)
    def cut(scene: Scene, _chance: random.Random) -> str | None:
        proxy = between(scene)
        before = proxy.cuts
        proxy.cut()
        count = proxy.cuts - before
        return f"{count} connections to {server} cut" if count else None

    return cut


def _black_holed(server: str, between: Between, weight: float) -> Fault:
    @fault(f"{server}-black-holed", takes=server, weight=weight)
    def black_hole(scene: Scene, chance: random.Random) -> str | None:
        duration = chance.uniform(*HOLE_SECONDS)
        with between(scene).black_hole():
            scene.wait(duration)
        return f"nothing reached {server} for {duration:.2f} s"

    return black_hole


def _muted(server: str, between: Between, weight: float) -> Fault:
    @fault(f"{server}-muted", takes=server, weight=weight)
    def mute(scene: Scene, chance: random.Random) -> str | None:
        duration = chance.uniform(*HOLE_SECONDS)
        proxy = between(scene)
        with proxy.swallowing_replies():
            scene.wait(duration)
            # Whoever got half of a conversation could not go on with the other half.
            proxy.cut()
        return f"the replies of {server} lost for {duration:.2f} s, then the connections"

    return mute


def _delayed(server: str, between: Between, weight: float) -> Fault:
    @fault(f"{server}-delayed", takes=server, weight=weight)
    def delay(scene: Scene, chance: random.Random) -> str | None:
        duration, held_back = chance.uniform(*DELAY_SECONDS), chance.uniform(*HELD_BACK_SECONDS)
        between(scene).delay(held_back)
        try:
            scene.wait(duration)
        finally:
            between(scene).delay(0)
        return f"{server} {held_back * 1000:.0f} ms farther away for {duration:.2f} s"

    return delay


def _reply_lost(name: str, between: Between, match: bytes, weight: float) -> Fault:
    @fault(name, takes=name, weight=weight)
    def lose_reply(scene: Scene, chance: random.Random) -> str | None:
        nth = chance.randint(1, NTH_MAX)
        happened = between(scene).cut_reply_to(match, nth=nth)
        happened.wait(REPLY_SECONDS)
        between(scene).spare_replies()
        return f"the reply to the {nth}. on one connection lost" if happened.is_set() else None

    return lose_reply


FAULTS = (
    _cut("postgres", to_postgres, 1.2),
    _cut("redis", to_redis, 1.5),
    _black_holed("postgres", to_postgres, 0.6),
    _black_holed("redis", to_redis, 0.5),
    _muted("postgres", to_postgres, 0.5),
    _muted("redis", to_redis, 0.5),
    _delayed("postgres", to_postgres, 0.6),
    _delayed("redis", to_redis, 0.4),
    _reply_lost("commit-reply-lost", to_postgres, COMMIT, 3.0),
    _reply_lost("append-reply-lost", to_redis, APPEND, 2.5),
)
