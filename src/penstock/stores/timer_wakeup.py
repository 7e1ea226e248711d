"""How whoever fires timers sleeps: those who schedule notify, but only while somebody sleeps."""

from __future__ import annotations

from enum import StrEnum

from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.wakeup import Ear


class Hold(StrEnum):
    """Whether those who schedule notify from now on."""

    HELD = "held"
    """They do. Whatever was scheduled without a notification is visible now: look once more."""
    TAKEN = "taken"
    """Another sleeper has the lock: they do, and everybody hears it."""
    UNDECIDED = "undecided"
    """A transaction that has scheduled something has not decided yet, and will not notify."""


class TimerWakeup(Ear):
    """An ear with the sleeper's locks on its session, which needs a direct connection."""

    def __init__(self, database_url: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("timekeeping.sql", schema)
        super().__init__(database_url, "timer wake-up", self._sql["listen"], self._sql["notify"])

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

    def let_go(self) -> None:
        """Nobody need notify any more."""
        if not self._connection.closed:
            self._connection.execute(self._sql["let_go"])
