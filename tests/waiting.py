"""Waiting without sleeping: every wait names what it waits for and ends, if in vain, in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP_SECONDS = 0.01
SOON_SECONDS = 45.0
"""For whatever should happen at once; so long because it only matters when a test fails."""

# A row, a file or a process that does not exist yet is looked for again, not stumbled over.
NOT_THERE_YET = (LookupError, TypeError, ValueError, FileNotFoundError, ProcessLookupError)


def wait_until(
    condition: Callable[[], bool],
    *,
    what: str | Callable[[], str],
    seconds: float = SOON_SECONDS,
) -> None:
    """Return as soon as the condition holds; fail the test when it never does.

    `what` may be a function: it is asked at the end, when there is most to tell.
    """
    deadline = time.monotonic() + seconds
    while True:
        # Asked again after the deadline: a machine that stood still may have done its work.
        is_last = time.monotonic() > deadline
        stumble: Exception | None = None
        try:
            if condition():
                return
        except NOT_THERE_YET as error:
            stumble = error
        if is_last:
            told = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {seconds:g} s in vain until {told}") from stumble
        threading.Event().wait(STEP_SECONDS)
