"""What people do in the middle of it all: deploys, new consumers, redrives, slow handlers."""

from __future__ import annotations

import random

from tests.chaos.process_faults import HOST
from tests.chaos.scene import Fault, Scene, fault, mend

OPERATOR = "operator"
LANES_MAX = 6
SLOW_SECONDS = (0.5, 2.5)
HANDLER_SECONDS = (0.005, 0.05)
PAUSE_SECONDS = (0.5, 2.0)
REDRIVE_SECONDS = (0.5, 2.0)


@fault("consumer-added", takes=OPERATOR, weight=0.3)
def consumer_added(scene: Scene, _chance: random.Random) -> str | None:
    """A new consumer starts at the first position of the stream; there is only one to come."""
    if scene.hosts.has_added_consumer:
        return None
    return f"{scene.hosts.add_consumer()} added"


@fault("lanes-changed", takes=HOST, weight=0.15)
def lanes_changed(scene: Scene, chance: random.Random) -> str | None:
    """Another number of lanes is deployed, and for that every host is started again."""
    count = chance.randint(1, LANES_MAX)
    scene.hosts.change_lanes(count)
    return f"{count} lanes deployed"


@fault("redrive-run", takes=OPERATOR, weight=0.8)
def redrive_run(scene: Scene, chance: random.Random) -> str | None:
    """Dead letters get another attempt, and the redrive is interrupted."""
    seconds = chance.uniform(*REDRIVE_SECONDS)
    return f"redrive: {scene.hosts.redrive(seconds)}"


@fault("handlers-slowed", takes=OPERATOR, weight=0.5)
def handlers_slowed(scene: Scene, chance: random.Random) -> str | None:
    """Every handler takes its time."""
    duration, each = chance.uniform(*SLOW_SECONDS), chance.uniform(*HANDLER_SECONDS)
    scene.hosts.set_slow(each)
    try:
        scene.wait(duration)
    finally:
        scene.hosts.set_slow(0)
    return f"handlers took {each * 1000:.0f} ms more for {duration:.2f} s"


# Nothing else leads to ConsumerPaused and ConsumerResumed, each of which has to be hit.
@fault("consumer-paused", takes=OPERATOR, weight=2.5)
def consumer_paused(scene: Scene, chance: random.Random) -> str | None:
    """A consumer handles nothing for a while."""
    duration = chance.uniform(*PAUSE_SECONDS)
    scene.hosts.pause()
    try:
        scene.wait(duration)
    finally:
        mend(scene.hosts.resume, what="the consumer is resumed")
    return f"a consumer paused for {duration:.2f} s"


FAULTS: tuple[Fault, ...] = (
    consumer_added,
    lanes_changed,
    redrive_run,
    handlers_slowed,
    consumer_paused,
)
