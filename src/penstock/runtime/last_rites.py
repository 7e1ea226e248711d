"""What follows the death of a worker: giving back what it held, and asking what killed it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from penstock.errors import ServerUnavailable
from penstock.runtime.children import Child

PAUSE_SECONDS = 0.25
"""Between two attempts to reach a server that is away."""
FINISH_SECONDS = 6.0
THREAD_NAME = "penstock-last-rites"

_logger = logging.getLogger("penstock")


class LastRites:
    """Each on a thread of its own: a database that does not answer must not hold up a restart."""

    def __init__(
        self,
        on_death: Callable[[str], object],
        tell: Callable[[Child, bool], None],
        *,
        patience_seconds: float,
    ) -> None:
        """`tell` is called once for each child, from its thread, as soon as anything is known."""
        self._on_death = on_death
        self._tell = tell
        self._patience_seconds = patience_seconds
        self._threads: list[threading.Thread] = []
        self._end = threading.Event()

    def begin(self, child: Child) -> None:
        """Clean up after a child; returns at once."""
        thread = threading.Thread(
            target=self._clean_up, args=(child,), name=THREAD_NAME, daemon=True
        )
        thread.start()
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def finish(self) -> None:
        """Wait for those that are under way, for a while, and try nothing twice any more."""
        self._end.set()
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _clean_up(self, child: Child) -> None:
        is_explained = False
        away: ServerUnavailable | None = None
        try:
            is_explained = self._on_death(child.worker_id) is True
        except ServerUnavailable as error:
            away = error
        finally:
            self._tell(child, is_explained)
        if away is not None:
            self._clean_up_later(child.worker_id, away)

    def _clean_up_later(self, worker_id: str, away: ServerUnavailable) -> None:
        """Or whoever takes its place would wait for its leases to run out."""
        text = "what dead worker %s held is given back once there is an answer: %s"
        _logger.warning(text, worker_id, away)
        ends_at = time.monotonic() + self._patience_seconds
        while time.monotonic() < ends_at and not self._end.wait(PAUSE_SECONDS):
            with suppress(ServerUnavailable):
                self._on_death(worker_id)
                return
