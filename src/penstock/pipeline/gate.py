"""Who may run handlers in this process: everybody at once, or one alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class Gate:
    """Lets batches run side by side, and a suspect only when nothing else does.

    If the process dies meanwhile, there is no doubt who did it. `excused` is entered by those who
    wait, which takes as long as the handlers of others do.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = 0
        """Who is alone, or waits to be."""

    @contextmanager
    def together(self, excused: AbstractContextManager[Any]) -> Iterator[None]:
        """Run beside others."""
        with excused, self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, excused: AbstractContextManager[Any]) -> Iterator[None]:
        """Run with nobody else inside."""
        with excused, self._changed:
            self._alone += 1
            self._changed.wait_for(lambda: not self._inside)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._alone -= 1
                self._changed.notify_all()
