"""Clocks that jump."""

from __future__ import annotations

import random

from tests.chaos.scene import Fault, Scene, fault, some

JUMPS_SECONDS = (-7200.0, -60.0, -5.0, 5.0, 60.0, 7200.0)
DURATION_SECONDS = (1.5, 4.0)


@fault("clock-jumped", takes="clock", weight=1.0, why_not=lambda scene: scene.world.clocks.why_not)
def clock_jumped(scene: Scene, chance: random.Random) -> str | None:
    """A host's wall clock is wrong for a while, and then right again."""
    jump, duration = chance.choice(JUMPS_SECONDS), chance.uniform(*DURATION_SECONDS)
    name = some(chance, scene.world.clocks.names)
    if name is None:
        return None
    scene.world.clocks.set(name, jump)
    try:
        scene.wait(duration)
    finally:
        scene.world.clocks.set(name, 0.0)
    return f"the clock of {name} wrong by {jump:+.0f} s for {duration:.2f} s"


FAULTS: tuple[Fault, ...] = (clock_jumped,)
