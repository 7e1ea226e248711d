"""Waiting without sleeping: every wait names what it waits for and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_SECONDS = 0.01


def wait_until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Return as soon as the condition holds; fail the test when it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain until {what}")
        threading.Event().wait(STEP_SECONDS)
