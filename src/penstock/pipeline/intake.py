"""How far a lane has read its stream, and what it has at hand behind that."""

from __future__ import annotations

from penstock.core.isolation import Batch
from penstock.errors import PositionMissing
from penstock.pipeline.attempt import NotFollowing
from penstock.pipeline.outlook import Outlook
from penstock.pipeline.window import Scan

# How long a transaction stays open for an event that was begun with before it was published.
CONFIRM_SECONDS = 0.05


class Intake:
    """Reads a lane's entries behind its cursor, in order; what it waits for it keeps."""

    def __init__(self, outlook: Outlook) -> None:
        self._outlook = outlook
        self._ahead: Scan | None = None
        self._missing: PositionMissing | None = None
        self.cursor = 0
        """Everything up to here is settled, or another lane's."""
        self.may_begin_early = False
        """Only right behind what went well: an event that ends processes, or that nobody
        publishes, is not begun with again and again."""

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
        scan, self._ahead = self._ahead or self._read(wait_seconds=0.0), None
        if not scan.entries:
            self.cursor = scan.through
        return scan

    def wait(self, seconds: float) -> None:
        """Wait for what comes next. Whatever is wrong with it is told when it is taken."""
        try:
            scan = self._read(seconds, early=self.may_begin_early)
        except PositionMissing as missing:
            # `take` might ask too soon to find out by itself.
            self._missing = missing
            return
        self._ahead = scan if scan.through > self.cursor else None

    def confirm(self, batch: Batch) -> None:
        """Wait until an early event is read at its place. Nothing of it is committed before."""
        scan = self._ahead = self._read(CONFIRM_SECONDS)
        if not (scan.entries and scan.entries[0].is_same_event(batch.entries[0])):
            raise NotFollowing("it has no position yet, or another one than expected")

    def pass_by(self, position: int) -> None:
        """Everything up to there is settled."""
        self.cursor = max(self.cursor, position)
        self.may_begin_early = True
        if self._ahead is not None:
            self._ahead = self._ahead.behind(position)

    def forget(self) -> None:
        """Read anew what is at hand."""
        self._ahead = None

    def _read(self, wait_seconds: float, *, early: bool = False) -> Scan:
        return self._outlook.read(after=self.cursor, wait_seconds=wait_seconds, early=early)
