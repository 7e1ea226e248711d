"""A server that went away: said once, tried again with growing pauses, said once when back."""

from __future__ import annotations

import time

from penstock.telemetry import signals
from penstock.telemetry.bus import emit

PAUSE_FIRST_SECONDS = 0.05
PAUSE_LONGEST_SECONDS = 2.0
# Whoever is lost again before it was there for so long is no better than before: pauses grow on.
STEADY_SECONDS = 5.0


class Outage:
    """Whether a server is away, and when it is worth trying again."""

    def __init__(self, worker: str, server: str) -> None:
        self._worker = worker
        self._server = self._lost = server
        self._lost_at: float | None = None
        self.reason = ""
        """What it answered, or that it did not, the last time that it was lost."""
        self._failures = 0
        self._steady_at = 0.0
        self._retry_at = 0.0

    @property
    def is_going_on(self) -> bool:
        """Whether the server did not answer the last time."""
        return self._lost_at is not None

    @property
    def is_worth_trying(self) -> bool:
        """Whether the server is there, or it is time to see if it is."""
        return self._lost_at is None or time.monotonic() >= self._retry_at

    @property
    def pause_seconds(self) -> float:
        """How long to leave the server alone."""
        return 0.0 if self._lost_at is None else max(0.0, self._retry_at - time.monotonic())

    def begin(self, error: Exception) -> None:
        """The server did not answer."""
        now = time.monotonic()
        self.reason = str(error)
        if self._lost_at is None:
            if now >= self._steady_at:
                self._failures = 0
            self._lost_at = now
            self._lost = getattr(error, "server", None) or self._server
            emit(signals.ServerLost(self._worker, self._lost, str(error)))
        self._retry_at = now + min(PAUSE_FIRST_SECONDS * 2**self._failures, PAUSE_LONGEST_SECONDS)
        self._failures = min(self._failures + 1, 10)

    def end(self) -> None:
        """The server answered."""
        if self._lost_at is not None:
            now = time.monotonic()
            self._steady_at = now + STEADY_SECONDS
            emit(signals.ServerFound(self._worker, self._lost, round(now - self._lost_at, 3)))
        self._lost_at = None
