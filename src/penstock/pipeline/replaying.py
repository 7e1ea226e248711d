"""A replay at work: its reader ends with the range, and a stage watches until all is settled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg

from penstock.core.progress import Progress
from penstock.core.replays import Replay, ReplayProgress
from penstock.pipeline.reader import Reader, Stretch
from penstock.stores.replays import Replays

LOOK_SECONDS = 0.3


class RangeReader:
    """A stream up to a position, as if nothing came behind it."""

    def __init__(self, reader: Reader, last: int) -> None:
        self._reader = reader
        self._last = last
        self._is_at_end = False

    @property
    def is_polling(self) -> bool:
        """Whether nobody wakes this reader: behind its end, nobody ever does."""
        return self._is_at_end or self._reader.is_polling

    def is_near(self, after: int) -> bool:
        """Whether what follows is read at once."""
        return self._reader.is_near(after)

    def read(
        self,
        *,
        after: int,
        count: int,
        wait_seconds: float,
        unless: int | None = None,
    ) -> Stretch:
        """Up to `count` entries that follow `after`, and none behind the end."""
        left = self._last - after
        self._is_at_end = left <= 0
        if self._is_at_end:
            return Stretch([], after)
        entries, through = self._reader.read(
            after=after, count=min(count, left), wait_seconds=wait_seconds, unless=unless
        )
        # A hole may reach beyond the end.
        return Stretch(entries, min(through, self._last))


class ReplayWatch:
    """Tells how far a replay is, and says when there is nothing left for its lanes to do."""

    def __init__(
        self,
        replay: Replay,
        replays: Replays,
        control: Callable[[], psycopg.Connection[Any]],
        *,
        on_look: Callable[[ReplayProgress], None],
        on_rest: Callable[[], None],
    ) -> None:
        self._replay = replay
        self._replays = replays
        self._control = control
        self._on_look = on_look
        self._on_rest = on_rest

    def step(self) -> Progress:
        """Look once. Raises ConsumerUnknown for a replay that was cancelled."""
        progress = self._replays.progress(self._control(), self._replay.name)
        self._on_look(progress)
        if not progress.has_work:
            self._on_rest()
        return Progress(0, pause_seconds=LOOK_SECONDS)

    def wait(self, stop: threading.Event) -> None:
        """Every step says itself how long to wait."""

    def close(self) -> None:
        """There is nothing to give back."""
