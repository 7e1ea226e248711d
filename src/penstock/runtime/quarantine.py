"""Who is set aside after a crash loop: remembered here, and kept where a restart finds it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import psycopg

from penstock.core.crash_budget import Crash
from penstock.errors import PenstockError
from penstock.stores.outage import Outage

POLL_SECONDS = 2.0
ANSWER_SECONDS = 6.0
# With nothing left to write there is nothing to lose; enough to close the connection properly.
FAREWELL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One that crashed too often, and the crashes."""

    name: str
    reason: str
    crashes: tuple[Crash, ...]


class QuarantineStore(Protocol):
    """Where quarantine outlives this process. Errors mean that it is away for now."""

    def write(self, entries: Sequence[Quarantined]) -> None:
        """Keep these; one that is kept already stays as it is."""

    def read(self) -> frozenset[str]:
        """The names of all that are set aside, by whichever supervisor."""

    def close(self) -> None:
        """Let go of the connection."""


class Quarantine:
    """What is set aside. A store that is away only delays the writing; nothing here waits for it.

    A name leaves when the store, having been told of it, no longer has it: somebody released it.
    """

    def __init__(self, store: QuarantineStore | None = None) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: frozenset[str] = frozenset()
        self._unwritten: dict[str, Quarantined] = {}
        self._is_stopping = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_tried = threading.Event()
        self._has_read = False
        self._outage = Outage("supervisor", "PostgreSQL")
        self._on_news: Callable[[], object] = lambda: None
        self.answered_at: float | None = None
        """When the store last answered, in monotonic time."""

    @property
    def names(self) -> frozenset[str]:
        """Everybody who is set aside."""
        with self._lock:
            return self._kept | self._unwritten.keys()

    @property
    def is_known(self) -> bool:
        """Whether the store has been read, or there is none."""
        return self._store is None or self._has_read

    def add(self, entry: Quarantined) -> None:
        """Set somebody aside, here at once and in the store as soon as it answers."""
        with self._lock:
            self._unwritten[entry.name] = entry
        self._wake.set()

    def start(self, on_news: Callable[[], object]) -> None:
        """Read the store, if it answers; look again every few seconds from then on."""
        if self._store is None:
            return
        self._on_news = on_news
        self._thread = threading.Thread(target=self._keep, name="penstock-quarantine", daemon=True)
        self._thread.start()
        self._has_tried.wait(ANSWER_SECONDS)

    def stop(self) -> None:
        """Write what is not written yet, if the store answers soon, and look no more."""
        self._is_stopping = True
        self._wake.set()
        if self._thread is not None:
            with self._lock:
                seconds = ANSWER_SECONDS if self._unwritten else FAREWELL_SECONDS
            self._thread.join(seconds)

    def _keep(self) -> None:
        assert self._store is not None
        while True:
            try:
                self._exchange(self._store)
            except (psycopg.Error, PenstockError) as error:
                self._outage.begin(error)
            self._has_tried.set()
            if self._is_stopping:
                self._store.close()
                return
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()

    def _exchange(self, store: QuarantineStore) -> None:
        with self._lock:
            before, unwritten = self._kept, dict(self._unwritten)
        if unwritten:
            store.write(list(unwritten.values()))
        # Read after writing: what is missing now was released, not late.
        kept = store.read()
        with self._lock:
            self._kept = kept
            for name in unwritten:
                self._unwritten.pop(name, None)
        self.answered_at = time.monotonic()
        self._outage.end()
        is_first, self._has_read = not self._has_read, True
        if is_first or kept != before:
            self._on_news()
