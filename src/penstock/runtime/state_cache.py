"""What is costly to read, for many who ask: read at most every few seconds, while somebody asks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from penstock.telemetry.metrics import Reading

STATE_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 4.0
"""Whoever asks is answered by then, with nothing if need be: Prometheus waits ten seconds."""

WANTED_SECONDS: Final = 60.0
"""So long after somebody asked, it is read again by itself: who scrapes regularly never waits."""
AHEAD_PART: Final = 0.8

_logger = logging.getLogger("penstock")


class StateCache:
    """Reads in a thread of its own, so that a server that is away holds up nobody for long."""

    def __init__(self, read: Callable[[], Sequence[Reading]], close: Callable[[], object]) -> None:
        self._read = read
        self._close = close
        self._readings: Sequence[Reading] = ()
        self._read_at: float | None = None
        self._asked_at: float | None = None
        """Since when somebody waits for an answer."""
        self._wanted_until = 0.0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def get(self, asked_at: float | None = None) -> Sequence[Reading]:
        """What was read within STATE_SECONDS; nothing where it cannot be known in time.

        Whoever has asked before says when that was.
        """
        asked_at = self.ask() if asked_at is None else asked_at
        with self._changed:
            if self._is_fresh(asked_at):
                return self._readings
            if self._asked_at is None:
                return ()
            # Counted from the first who asked: a server that hangs holds up one, not each in turn.
            seconds = max(0.0, self._asked_at + ANSWER_SECONDS - asked_at)
            self._changed.wait_for(
                lambda: self._is_fresh(asked_at) or self._asked_at is None, seconds
            )
            return self._readings if self._is_fresh(asked_at) else ()

    def ask(self) -> float:
        """Have it read if that is due, without waiting; says when that was."""
        asked_at = time.monotonic()
        with self._changed:
            self._wanted_until = asked_at + WANTED_SECONDS
            if self._is_fresh(asked_at) or self._is_closed:
                return asked_at
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._keep_reading, name="penstock-metrics-state", daemon=True
                )
                self._thread.start()
            if self._asked_at is None:
                self._asked_at = asked_at
                self._changed.notify_all()
        return asked_at

    def close(self) -> None:
        """Read no more; the thread ends when it has no question under way."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_fresh(self, now: float) -> bool:
        return self._read_at is not None and now - self._read_at < STATE_SECONDS

    def _rest_seconds(self) -> float | None:
        """Until it is read ahead of whoever asks next; None: nobody has asked lately."""
        now = time.monotonic()
        if self._read_at is None or now > self._wanted_until:
            return None
        return max(0.0, self._read_at + STATE_SECONDS * AHEAD_PART - now)

    def _try_to_read(self) -> Sequence[Reading]:
        try:
            return self._read()
        except Exception:
            # Whoever scrapes must still learn of everything else.
            _logger.exception("the state of the pipeline could not be read for metrics")
            return ()

    def _keep_reading(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._asked_at is not None or self._is_closed, self._rest_seconds()
                )
                if self._is_closed:
                    break
            # The time before the question: what it says may be as old as that.
            began_at = time.monotonic()
            readings = self._try_to_read()
            with self._changed:
                self._readings, self._asked_at = readings, None
                # Nothing means that it could not be read: whoever asks next has it tried again.
                self._read_at = began_at if readings else None
                self._changed.notify_all()
        self._close()
