"""The books of one stream, gone through a stretch at a time while everybody works on.

Each stretch was read in one snapshot, so that what commits meanwhile is no anomaly. What has to be
known from one stretch to the next is kept here, and it is bounded.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.core.audit import audit_holes, audit_positions
from penstock.core.books import Anomaly, ConsumerBooks, Finding, Notes
from penstock.core.consumer_audit import audit_checkpoints, audit_consumer
from penstock.core.history import DEAD, PARKED, ConsumerHistory, History, HoleRow

KEYS_MAX = 100_000
"""Of so many keys it is remembered how far they were: those with the latest events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """A stream as a whole, at one moment."""

    stream_name: str
    head: int
    published: int
    first: int
    """The first position whose event is still in the outbox; head + 1 where none is."""
    readable_first: int
    """The first position that can be read, from the outbox or from an archive that leads to it."""
    holes: tuple[HoleRow, ...] = ()
    beyond: tuple[int, ...] = ()
    """The first few rows that have a position beyond the head."""
    consumers: tuple[ConsumerHistory, ...] = ()
    """Without their rows."""
    is_foreign: bool = False
    """Another database has its events: what was set aside here is all that can be compared."""

    def hole_over(self, position: int) -> HoleRow | None:
        """The hole that a position lies in."""
        return next((hole for hole in self.holes if hole.first <= position <= hole.last), None)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of positions with everything that the books say of it, at one moment."""

    history: History
    is_pruned: bool = False
    """The outbox holds nothing of it any more; its rows are those of events set aside."""


@dataclass(frozen=True, slots=True)
class LooseRow:
    """A settled row that has no event of that name and position in the outbox."""

    event_uuid: str
    position: int
    outcome: str
    is_sent: bool
    """There is such an event, elsewhere."""
    is_parked: bool
    has_letter: bool


class Verification:
    """Collects what is wrong with one stream, and counts what is where."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self._sending = Notes(f"the outbox of {survey.stream_name}")
        self._notes = {each.name: Notes(each.name) for each in survey.consumers}
        self._books = {each.name: _nothing(each.name) for each in survey.consumers}
        self._last_of_key: dict[str, int] = {}
        self._judge_survey()

    def add_window(self, window: Window) -> None:
        """Compare all books about one stretch; stretches come in order."""
        history = window.history
        if not window.is_pruned:
            audit_positions(history, self._sending, self._last_of_key)
            if len(self._last_of_key) > 2 * KEYS_MAX:
                # Only a later row with a lower id can be in disorder: it is drawn from the latest.
                latest = heapq.nlargest(
                    KEYS_MAX, self._last_of_key.items(), key=lambda item: item[1]
                )
                self._last_of_key = dict(latest)
        for consumer in history.consumers:
            if consumer.name not in self._notes:
                continue
            books = audit_consumer(history, consumer, self._notes[consumer.name])
            if window.is_pruned and not self.survey.is_foreign:
                books += _unseen(history, consumer)
            self._books[consumer.name] += books

    def add_loose_rows(self, consumer: str, rows: Sequence[LooseRow], survey: Survey) -> None:
        """Settled rows without their events: right where those were pruned, and nowhere else."""
        notes = self._notes[consumer]
        for row in rows:
            anomaly, problem = _loose(row, survey)
            if problem:
                notes.note(anomaly, f"{row.event_uuid} is {row.outcome} at {row.position}{problem}")

    def forget(self, names: Iterable[str]) -> None:
        """Whoever was forgotten or renamed meanwhile: there is nothing to say of them."""
        for name in names:
            del self._notes[name], self._books[name]

    def findings(self) -> Iterator[Finding]:
        """What was noted so far."""
        yield from self._sending.findings()
        for notes in self._notes.values():
            yield from notes.findings()

    def books(self) -> tuple[ConsumerBooks, ...]:
        """What is where, consumer by consumer."""
        return tuple(self._books.values())

    def _judge_survey(self) -> None:
        survey, notes = self.survey, self._sending
        if survey.published > survey.head:
            notes.note(
                Anomaly.UNACCOUNTED,
                f"published up to {survey.published}, beyond the head {survey.head}",
            )
        for position in survey.beyond:
            notes.note(
                Anomaly.UNACCOUNTED,
                f"position {position} has a row, but the head is {survey.head}",
            )
        history = _bare(survey)
        audit_holes(history, notes)
        for consumer in survey.consumers:
            audit_checkpoints(history, consumer, self._notes[consumer.name])
            if not survey.is_foreign:
                self._judge_reach(consumer)

    def _judge_reach(self, consumer: ConsumerHistory) -> None:
        """What a consumer has still to pass is in the outbox or in the archive."""
        readable_first = self.survey.readable_first
        last = min(readable_first - 1, consumer.last_due(self.survey.head))
        lost = _count(consumer.floor + 1, last, self.survey.holes)
        if lost:
            place = "outbox" if readable_first == self.survey.first else "archive"
            self._notes[consumer.name].note(
                Anomaly.LOST,
                f"its checkpoint is {consumer.floor}, and the {place} begins at {readable_first}",
                lost,
            )


def _loose(row: LooseRow, survey: Survey) -> tuple[Anomaly, str]:
    """What is wrong with a settled row that has no event; no text: nothing."""
    hole = survey.hole_over(row.position)
    if hole is not None:
        return Anomaly.UNACCOUNTED, f", in the hole {hole.first}..{hole.last}"
    if row.position > survey.head:
        return Anomaly.PHANTOM, f", beyond the head {survey.head}"
    if row.position >= survey.first:
        # An event of this name that stands elsewhere is found there.
        return Anomaly.PHANTOM, "" if row.is_sent else ", and was never sent"
    if row.outcome == PARKED and not row.is_parked:
        return Anomaly.UNACCOUNTED, " and not among the parked events"
    if row.outcome == DEAD and not row.has_letter:
        return Anomaly.UNACCOUNTED, " and has no letter"
    return Anomaly.UNACCOUNTED, ""


def _bare(survey: Survey) -> History:
    return History(acknowledged=frozenset(), outbox=(), head=survey.head, holes=survey.holes)


def _nothing(name: str) -> ConsumerBooks:
    return ConsumerBooks(name=name, due=0, handled=0, passed=0, parked=0, dead=0, pending=0)


def _unseen(history: History, consumer: ConsumerHistory) -> ConsumerBooks:
    """What was pruned together with its event, or waits in the archive, by arithmetic."""
    start, end = consumer.start_position, consumer.last_due(history.end)
    seen = [row.position for row in history.outbox if row.position is not None]

    def unseen(first: int, last: int) -> int:
        count = _count(max(first, history.first), min(last, history.end), history.holes)
        return count - sum(first <= position <= last for position in seen)

    pruned = unseen(start, min(end, consumer.floor))
    pending = unseen(max(start, consumer.floor + 1), end)
    return replace(
        _nothing(consumer.name),
        due=pruned + pending,
        pruned=pruned,
        pending=pending,
        before=unseen(1, start - 1),
        behind=unseen(end + 1, history.end),
    )


def _count(first: int, last: int, holes: Sequence[HoleRow]) -> int:
    """How many positions of a stretch have, or had, an event."""
    return max(0, last - first + 1) - sum(hole.overlap(first, last) for hole in holes)


# ── tiers ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A place at which another tier does not say what PostgreSQL says."""

    position: int
    anomaly: Anomaly
    what: str


def compare_tier(
    found: Mapping[int, bytes | None], expected: Mapping[int, bytes], *, first: int, head: int
) -> set[Disagreement]:
    """Compare the bodies of a tier with PostgreSQL's, place by place; None: not an entry at all.

    PostgreSQL has every place from `first` to `head` that is expected; what was pruned before
    that cannot be compared.
    """
    disagreements = {
        Disagreement(position, Anomaly.UNACCOUNTED, "is missing")
        for position in expected.keys() - found.keys()
    }
    for position, body in found.items():
        if position > head:
            what = "lies beyond the head"
            disagreements.add(Disagreement(position, Anomaly.PHANTOM, what))
        elif position not in expected:
            if position >= first:
                what = "has an entry and no event"
                disagreements.add(Disagreement(position, Anomaly.PHANTOM, what))
        elif body != expected[position]:
            what = "is no entry" if body is None else "differs from the outbox"
            disagreements.add(Disagreement(position, Anomaly.UNACCOUNTED, what))
    return disagreements
