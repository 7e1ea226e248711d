"""What else a machine had to do while something was measured on it."""

from __future__ import annotations

import os

from tests.failure_drill import say


def say_load() -> None:
    """Figures from a machine that is busy with other things tell little; this one tells that."""
    load, cores = os.getloadavg(), os.cpu_count()
    say(f"Load of the machine: {load[0]:.1f}, over five minutes {load[1]:.1f}, on {cores} cores.")
