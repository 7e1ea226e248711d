"""Whether the other tiers of the log hold what PostgreSQL holds, byte by byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.core.books import Notes
from penstock.core.verification import Disagreement, Survey, compare_tier
from penstock.errors import ServerUnavailable, ServerUnsuitable
from penstock.stores.hot_log import HotLog
from penstock.stores.verifying import BooksReader

FROM_POSTGRES = "readers take it from PostgreSQL"


class Tier(Protocol):
    """Another place where a stream lies, under the same positions."""

    @property
    def name(self) -> str:
        """What people call it."""

    def read(self, stream_name: str, *, after: int, count: int) -> list[tuple[int, bytes | None]]:
        """Places and bodies behind a position, in order and at one moment; None: not an entry."""

    def last(self, stream_name: str) -> int | None:
        """The last place; None where there is nothing."""


class HotTier:
    """The hot log as a tier: each entry is a transport line, which is its own, and a body."""

    name = "hot log"

    def __init__(self, hot_log: HotLog) -> None:
        self._hot_log = hot_log

    def read(self, stream_name: str, *, after: int, count: int) -> list[tuple[int, bytes | None]]:
        """Entries without their transport lines."""
        raw = self._hot_log.read(stream_name, after=after, count=count, wait_seconds=0.0)
        return [(position, entry.partition(b"\n")[2] or None) for position, entry in raw]

    def last(self, stream_name: str) -> int | None:
        """The last place; None where there is nothing."""
        return self._hot_log.last(stream_name)


@dataclass(frozen=True, slots=True)
class TierReport:
    """How much of a stream a tier holds, and whatever else is worth knowing."""

    name: str
    first: int | None
    last: int | None
    compared: int
    remark: str = ""
    was_read: bool = True
    """Whether it answered up to its end."""


def verify_tier(
    tier: Tier,
    books: BooksReader,
    survey: Survey,
    *,
    count: int,
    on_progress: Callable[[int, int], None],
) -> tuple[TierReport, Notes]:
    """Compare what a tier holds. What it does not hold, or does not tell, is no anomaly."""
    comparison = _Comparison(tier, books, survey, count)
    try:
        comparison.run(on_progress)
    except (ServerUnavailable, ServerUnsuitable) as error:
        comparison.remark = str(error)
        comparison.was_read = False
    return comparison.report(), comparison.notes


@dataclass(frozen=True, slots=True)
class _Reached:
    """How far a tier was compared, and the last entry that it had up to there."""

    position: int = 0
    anchor: int | None = None


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of a tier, compared."""

    first: int
    compared: int
    disagreements: set[Disagreement]
    reached: _Reached


class _Comparison:
    """One walk along one tier."""

    def __init__(self, tier: Tier, books: BooksReader, survey: Survey, count: int) -> None:
        self._tier = tier
        self._books = books
        self._survey = survey
        self._stream_name = survey.stream_name
        self._count = count
        self._first: int | None = None
        self._last: int | None = None
        self._compared = 0
        self.remark = ""
        self.was_read = True
        self.notes = Notes(f"the {tier.name} of {survey.stream_name}")

    def report(self) -> TierReport:
        """As far as it came."""
        return TierReport(
            *(self._tier.name, self._first, self._last, self._compared),
            *(self.remark, self.was_read),
        )

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """From its first place to the last one that it had at the beginning."""
        self._last = self._tier.last(self._stream_name)
        end = max(self._last or 0, self._survey.head)
        reached = _Reached()
        while reached.position < end and (stretch := self._look(reached)) is not None:
            if stretch.disagreements:
                self._note_lasting(stretch.disagreements, self._look(reached))
            self._first = self._first or stretch.first
            self._compared += stretch.compared
            reached = stretch.reached
            on_progress(reached.position, end)
        self._remark_on(reached.position)

    def _remark_on(self, reached: int) -> None:
        if not reached:
            self.remark = f"it holds nothing; {FROM_POSTGRES}"
        elif reached < self._survey.published:
            self.remark = (
                f"it ends at {reached}, and {self._survey.published} was confirmed; the "
                f"publisher fills it again, and meanwhile {FROM_POSTGRES}"
            )

    def _note_lasting(self, found: set[Disagreement], again: _Stretch | None) -> None:
        """What is just being written, trimmed or rebuilt looks different a moment later."""
        lasting = found & again.disagreements if again is not None else set()
        for each in sorted(lasting, key=lambda each: each.position):
            self.notes.note(each.anomaly, f"{each.position} {each.what} ({FROM_POSTGRES})")

    def _look(self, reached: _Reached) -> _Stretch | None:
        """Compare the next stretch; None: nothing is there.

        The entry at the anchor is read again: without it the tier was trimmed meanwhile, and
        begins where it begins. PostgreSQL is asked afterwards, so it knows whatever was published.
        """
        after = (reached.anchor or 1) - 1
        entries = self._tier.read(self._stream_name, after=after, count=self._count + 1)
        if not entries or entries[-1][0] <= reached.position:
            return None
        is_anchored = entries[0][0] == reached.anchor
        before = reached.position if is_anchored else entries[0][0] - 1
        survey, expected = self._books.bodies(self._stream_name, after=before, count=self._count)
        last = entries[-1][0]
        if len(expected) == self._count:
            # Where the tier lacks many, PostgreSQL has more before its last entry than were read.
            last = min(last, max(expected))
        found = {position: body for position, body in entries if before < position <= last}
        expected = {position: body for position, body in expected.items() if position <= last}
        anchor = max((position for position, _ in entries if position <= last), default=None)
        return _Stretch(
            entries[0][0],
            len(found),
            compare_tier(found, expected, first=survey.first, head=survey.head),
            _Reached(last, anchor),
        )
