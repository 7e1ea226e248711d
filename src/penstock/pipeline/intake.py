"""How far a lane has read its stream, and what it has at hand behind that."""

from __future__ import annotations

from penstock.errors import PositionMissing
from penstock.pipeline.outlook import Outlook
from penstock.pipeline.window import Scan, StreamWindow
from penstock.stores.eager_ear import EagerEar


class Intake:
    """Reads a lane's entries behind its cursor, in order; what it waits for it keeps."""

    def __init__(
        self, window: StreamWindow, lane: int, batch_size: int, ear: EagerEar | None = None
    ) -> None:
        self._outlook = Outlook(window, lane, batch_size)
        self.look_ahead = self._outlook.look_ahead
        self._ear = ear
        self._ahead: Scan | None = None
        self._missing: PositionMissing | None = None
        self._has_passed = False
        self.cursor = 0
        """Everything up to here is settled, or another lane's."""
        self.may_begin_early = False
        """Only right behind what went well: an event that ends processes, or that nobody
        publishes, is not begun with again and again."""
        self.has_word = False
        """Whether a sender was heard while there was nothing else."""

    @property
    def is_polling(self) -> bool:
        """Whether nobody wakes who waits here."""
        return self._outlook.is_polling(self.cursor)

    @property
    def has_more(self) -> bool:
        """Whether something was found while waiting."""
        return self._ahead is not None

    def take(self) -> Scan:
        """What comes next, if there is anything; passes what is not this lane's.

        Raises PositionMissing.
        """
        if self._missing is not None:
            missing, self._missing = self._missing, None
            raise missing
        scan, self._ahead = self._ahead or self._read(), None
        if not scan.entries:
            self._has_passed = scan.through > self.cursor
            self.cursor = scan.through
        return scan

    def has_passed(self) -> bool:
        """Whether it came by what is not this lane's since it was asked last: there may be more."""
        has_passed, self._has_passed = self._has_passed, False
        return has_passed

    def wait(self, seconds: float) -> None:
        """Wait for what comes next. Whatever is wrong with it is told when it is taken."""
        ear = self._ear if self.may_begin_early else None
        unless = None if ear is None else ear.descriptor()
        try:
            scan = self._outlook.read(after=self.cursor, wait_seconds=seconds, unless=unless)
        except PositionMissing as missing:
            # `take` might ask too soon to find out by itself.
            self._missing = missing
            return
        if scan.through > self.cursor:
            self._ahead = scan
        elif ear is not None:
            self.has_word = ear.is_heard()

    def pass_by(self, position: int) -> None:
        """Everything up to there is settled, and went well."""
        self.cursor = max(self.cursor, position)
        self.may_begin_early = True
        if self._ear is not None:
            # Of what came in the ordinary way, word came too.
            self._ear.drain()

    def forget(self) -> None:
        """Read anew what is at hand."""
        self._ahead = None

    def _read(self) -> Scan:
        return self._outlook.read(after=self.cursor, wait_seconds=0.0)
