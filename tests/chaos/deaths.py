"""Workers that ended by themselves: whatever is done to them here, a worker outlives its servers.

One that ends with an error is replaced within a second, so that no book shows it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path

from penstock.telemetry import failpoints
from penstock.telemetry.failpoints import Action, Hit
from tests.chaos import app

# As the supervisor's log has it; what its workers print may stand on the same line.
DEATH = re.compile(
    r'"signal": "WorkerDied", "worker": "([^"]+)", "pid": (\d+), "exit_code": (-?\d+)'
)
KILLED = (-signal.SIGKILL, failpoints.EXIT_CODE, app.EXIT_CODE)
"""By faults, failpoints, supervisors, and events that kill."""


class Deaths:
    """Gathered from what supervisors say, whose logs are not kept for ever."""

    def __init__(self) -> None:
        self._strange: dict[int, str] = {}

    def read(self, log: Path) -> None:
        """Remember who ended otherwise than by being killed."""
        text = log.read_text(errors="replace") if log.exists() else ""
        for worker, pid, exit_code in DEATH.findall(text):
            if int(exit_code) not in KILLED:
                told = f"{worker} ended by itself, with exit code {exit_code}: {log.name}"
                self._strange[int(pid)] = told

    def unexplained(self, hits: Iterable[Hit]) -> list[str]:
        """Those to whom no failpoint has put a bug."""
        raised = {hit.pid for hit in hits if hit.action is Action.RAISE}
        return [told for pid, told in self._strange.items() if pid not in raised]
