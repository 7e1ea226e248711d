"""How whoever fires timers sleeps: those who schedule notify, but only while somebody sleeps."""

from __future__ import annotations

import threading
import time
from enum import StrEnum
from typing import Any

import psycopg

from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

TEST_SECONDS = 2.0
# A sleeper looks up this often to see whether it should stop; it asks no server anything.
STOP_CHECK_SECONDS = 0.05


class Hold(StrEnum):
    """Whether those who schedule notify from now on."""

    HELD = "held"
    """They do. Whatever was scheduled without a notification is visible now: look once more."""
    TAKEN = "taken"
    """Another sleeper has the lock: they do, and everybody hears it."""
    UNDECIDED = "undecided"
    """A transaction that has scheduled something has not decided yet, and will not notify."""


class TimerWakeup:
    """A LISTEN connection with the sleeper's locks on it. No transaction is ever left open.

    The locks are for the session, so this needs a direct connection: `hears` tells a pooler.
    """

    def __init__(self, database_url: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("timekeeping.sql", schema)
        self._connection: psycopg.Connection[Any] = connect(database_url, "penstock timer wake-up")
        self._connection.prepare_threshold = None
        self._connection.execute(self._sql["listen"])

    def hears(self, other: psycopg.Connection[Any], stop: threading.Event) -> bool:
        """Whether a notification from another connection arrives here in time."""
        other.execute(self._sql["notify"])
        return self.sleep(TEST_SECONDS, stop)

    def try_be_first(self) -> bool:
        """Be the one who wakes first, until the connection ends; False: somebody else is."""
        row = self._connection.execute(self._sql["try_be_first"]).fetchone()
        return row is not None and bool(row[0])

    def try_hold(self) -> Hold:
        """Make everybody notify who schedules a timer that is due soon."""
        row = self._connection.execute(self._sql["try_hold"]).fetchone()
        assert row is not None
        hold = Hold(row[0])
        if hold is Hold.UNDECIDED:
            self._connection.execute(self._sql["let_go_shared"])
        return hold

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

    def let_go(self) -> None:
        """Nobody need notify any more."""
        if not self._connection.closed:
            self._connection.execute(self._sql["let_go"])

    def close(self) -> None:
        """End the connection, and with it the locks."""
        self._connection.close()
