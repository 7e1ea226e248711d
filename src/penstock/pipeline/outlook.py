"""One lane's view of its stream, which it looks along while PostgreSQL commits a batch."""

from __future__ import annotations

from contextlib import suppress

import psycopg

from penstock.errors import PenstockError
from penstock.pipeline.window import Scan, StreamWindow


class Outlook:
    """Reads batch after batch. Behind a full one there is another, as a rule."""

    def __init__(self, window: StreamWindow, lane: int, count: int) -> None:
        self._window = window
        self._lane = lane
        self._count = count
        self._full_to: int | None = None
        """Where the last batch ended, if it was full, and nobody has looked further yet."""
        self._found: tuple[int, Scan] | None = None
        """What was read ahead, and the position that it follows."""

    def is_polling(self, after: int) -> bool:
        """Whether nobody wakes a lane there."""
        return self._window.is_polling(after)

    def read(self, *, after: int, wait_seconds: float, unless: int | None = None) -> Scan:
        """The next entries; waits where there is nothing behind `after`.

        It stops waiting when the descriptor `unless` becomes readable. Raises PositionMissing,
        never skips.
        """
        found, self._found = self._found, None
        scan = found[1] if found is not None and found[0] == after else None
        if scan is None:
            scan = self._read(after, wait_seconds, unless)
        # Who wants events singly would ask twice for each.
        is_full = len(scan.entries) == self._count > 1
        self._full_to = scan.through if is_full else None
        return scan

    def look_ahead(self) -> None:
        """Read what follows a full batch. Whatever is wrong there, `read` meets it again.

        It may be called in the middle of a transaction: nothing is fetched that takes long.
        """
        after, self._full_to = self._full_to, None
        if after is None or not self._window.is_near(after):
            return
        with suppress(PenstockError, psycopg.Error):
            scan = self._read(after, wait_seconds=0.0)
            if scan.through > after:
                self._found = after, scan

    def _read(self, after: int, wait_seconds: float, unless: int | None = None) -> Scan:
        return self._window.read(
            self._lane, after=after, count=self._count, wait_seconds=wait_seconds, unless=unless
        )
