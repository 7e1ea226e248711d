"""The model of what an idle consumer hears of senders."""

from __future__ import annotations

from tests.simulation.cooperation import present

EAGER_SHARE = 0.8
HEARD_SHARE = 0.9
BELL = 1


class Eagerness:
    """Stands in for `Intake.may_begin_early`, which spares calls: no promise depends on it."""

    def __get__(self, *_: object) -> bool:
        return present.machine.dice() < EAGER_SHARE

    def __set__(self, *_: object) -> None:
        """Whatever went before."""


class ModelEar:
    """Stands in for EagerEar: whether a sender is heard is left to chance."""

    def __init__(self, *_: str) -> None:
        self._is_open = True

    def descriptor(self) -> int | None:
        return BELL if self._is_open else None

    def is_heard(self) -> bool:
        return present.machine.dice() < HEARD_SHARE

    def tend(self) -> None:
        """It is open."""

    def drain(self) -> None:
        """Nothing is kept for anybody."""

    def close(self) -> None:
        self._is_open = False
