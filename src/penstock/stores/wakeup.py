"""How a publisher sleeps: senders notify it, but only while it holds its streams' locks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import psycopg

from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

TEST_SECONDS = 2.0
# A sleeper looks up this often to see whether it should stop; it asks no server anything.
STOP_CHECK_SECONDS = 0.05


class Ear:
    """A LISTEN connection, in autocommit: no transaction is ever left open on it.

    `hears` finds out whether notifications arrive: behind a pooler they do not.
    """

    def __init__(self, database_url: str, name: str, listen: str, notify: str) -> None:
        self._notify = notify
        self._connection: psycopg.Connection[Any] = connect(database_url, f"penstock {name}")
        self._connection.prepare_threshold = None
        self._connection.execute(listen)

    def hears(self, other: psycopg.Connection[Any], stop: threading.Event) -> bool:
        """Whether a notification from another connection arrives here in time."""
        other.execute(self._notify)
        return self.sleep(TEST_SECONDS, stop)

    def sleep(self, seconds: float, stop: threading.Event) -> bool:
        """Wait for a notification; False where `stop` or the end of the time came first."""
        deadline = time.monotonic() + seconds
        while not stop.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if list(self._connection.notifies(timeout=min(left, STOP_CHECK_SECONDS), stop_after=1)):
                return True
        return False

    def drop_heard(self) -> None:
        """Forget what was notified until now: whoever asks is about to look."""
        for _ in self._connection.notifies(timeout=0):
            pass

    def close(self) -> None:
        """End the connection, and with it the session's locks."""
        self._connection.close()


class Wakeup(Ear):
    """An ear with the sleeper's locks on its session."""

    def __init__(self, database_url: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("wakeup.sql", schema)
        super().__init__(database_url, "wake-up", self._sql["listen"], self._sql["notify"])

    def try_hold(self, stream_names: Sequence[str]) -> bool:
        """Make senders notify from now on; False while one of them is undecided.

        True means: whatever was sent without a notification is visible now. Look once more,
        then sleep.
        """
        if not stream_names:
            return True
        row = self._connection.execute(
            self._sql["try_hold"], {"stream_names": list(stream_names)}
        ).fetchone()
        if row is not None and row[0]:
            return True
        self.let_go()
        return False

    def was_notified(self) -> bool:
        """Whether a notification has arrived, without waiting for one."""
        return bool(list(self._connection.notifies(timeout=0, stop_after=1)))

    def let_go(self) -> None:
        """Senders need not notify any more; what they did notify until now is dropped."""
        if not self._connection.closed:
            self._connection.execute(self._sql["let_go"])
            self.drop_heard()
