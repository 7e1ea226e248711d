"""How a process ends: when it is asked to, when its time is up, and when its parent is gone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for a SIGTERM when the parent ends, and leave if it already has.

    Other systems than Linux have no such request.
    """
    if sys.platform == "linux":
        request = ctypes.CDLL(None, use_errno=True).prctl
        request(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:
        raise SystemExit(1)


def stop_on_signals(stop: threading.Event, shutdown_seconds: float) -> None:
    """Let SIGTERM and SIGINT set the event; a SIGINT after that, or the time limit, ends us.

    A second SIGTERM changes nothing: a supervisor, the kernel at the supervisor's end and whoever
    stops a whole group may each send one.

    The main thread runs signal handlers, so it must not itself wait on the event: it could hold
    the event's lock when the signal comes.
    """
    asked: list[int] = []

    def request_stop(number: int, _: FrameType | None) -> None:
        # The next signal may interrupt this function anywhere, and then waits for no lock of ours.
        if asked:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        asked.append(number)
        # The kernel ends us when the time is up, even where nobody is left to do it, and even
        # while a handler does not let Python run.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, shutdown_seconds)
        stop.set()

    for number in STOP_SIGNALS:
        signal.signal(number, request_stop)


def seconds_to_end() -> float | None:
    """How long the kernel still lets this process run; None before anybody asked it to stop."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    return left or None


@contextlib.contextmanager
def told_of_stop_signals(
    tell: Callable[[], object], *, insist: Callable[[], object] | None = None
) -> Iterator[None]:
    """Call `tell` at every SIGTERM and SIGINT meanwhile, in the main thread.

    Given `insist`, that is called instead at a SIGINT that is not the first of them.
    """
    asked: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        is_insisting = bool(asked) and number == signal.SIGINT
        asked.append(number)
        (insist if is_insisting and insist is not None else tell)()

    before = {number: signal.signal(number, remember) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
