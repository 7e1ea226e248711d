"""Crashes a process at a signal, for tests that prove what survives it.

`PENSTOCK_FAILPOINT=BatchAppended:kill:2` kills the process at the second `BatchAppended`;
`…:stop` stops it there until it is continued. Several are separated by commas.
"""

from __future__ import annotations

import signal as process_signals
import threading

from penstock.core.require import require
from penstock.telemetry.bus import subscribe
from penstock.telemetry.signals import Signal

ENVIRONMENT_NAME = "PENSTOCK_FAILPOINT"
_ACTIONS = {"kill": process_signals.SIGKILL, "stop": process_signals.SIGSTOP}


class Failpoint:
    """Counts one kind of signal and acts on the nth."""

    def __init__(self, action: process_signals.Signals, nth: int) -> None:
        self._action = action
        self._remaining = nth
        self._lock = threading.Lock()

    def __call__(self, _signal: Signal) -> None:
        """Act if this is the one."""
        with self._lock:
            self._remaining -= 1
            is_now = self._remaining == 0
        if is_now:
            # To this very thread: a stop sent to the process may reach another thread first, and
            # this one would run on for a moment, past the point.
            process_signals.pthread_kill(threading.get_ident(), self._action)


def install_failpoints(description: str | None) -> None:
    """Arm the failpoints that the description names; None or empty arms none."""
    for part in (description or "").split(","):
        if part:
            name, action, nth = (*part.split(":"), "1")[:3]
            require(
                name in Signal.registry and action in _ACTIONS and nth.isdigit(),
                f"{ENVIRONMENT_NAME}={part!r} must be Signal:kill|stop[:nth]",
            )
            subscribe(Signal.registry[name], Failpoint(_ACTIONS[action], int(nth)))
