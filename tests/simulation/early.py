"""The model of what an idle consumer hears of senders, and how it guesses wrong."""

from __future__ import annotations

from penstock.core.wire import Entry, decode_body
from tests.simulation.cooperation import present
from tests.simulation.database import Database
from tests.simulation.log_statements import body_of

EAGER_SHARE = 0.8
HEARD_SHARE = 0.9
# A sender that commits late takes the place of one that was quicker.
WRONG_SHARE = 0.2
BELL = 1


class Eagerness:
    """Stands in for `Intake.may_begin_early`, which spares calls: no promise depends on it."""

    def __get__(self, *_: object) -> bool:
        return present.machine.dice() < EAGER_SHARE

    def __set__(self, *_: object) -> None:
        """Whatever went before."""


class ModelEarlyEvents:
    """Stands in for EarlyEvents: whether a sender is heard is left to chance."""

    def __init__(self, *_: str) -> None:
        self._is_open = True

    def descriptor(self) -> int | None:
        return BELL if self._is_open and present.machine.dice() < HEARD_SHARE else None

    def following(self, after: int) -> Entry | None:
        present.machine.breathe()
        database: Database = present.wire.database
        waiting = database.unnumbered()
        if not waiting or database.head != after:
            return None
        dice = present.machine.dice
        row = waiting[int(dice() * len(waiting))] if dice() < WRONG_SHARE else waiting[0]
        return decode_body(Database.stream_name, after + 1, body_of(database, row, 0).encode())

    def drain(self) -> None:
        """Nothing is kept for anybody."""

    def close(self) -> None:
        self._is_open = False
