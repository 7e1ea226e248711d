"""Compares the books of one consumer with each other and with the outbox.

Every position is in exactly one place: before the consumer's start or behind its end, handled,
skipped, discarded, parked, dead, passed over by an operator, pruned, pending, or in a hole.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.books import Anomaly, ConsumerBooks, Notes
from penstock.core.history import (
    DEAD,
    DISCARDED,
    HANDLED,
    OUTCOMES,
    PARKED,
    SKIPPED,
    ConsumerHistory,
    Effect,
    History,
    ParkedRow,
    SentRow,
    SettledRow,
    passed_over,
)
from penstock.core.lanes import key_hash

_BEFORE = "before its start"
_BEHIND = "behind its end"
_OVER = "passed over"
_PRUNED = "pruned"
_PENDING = "pending"
_NOWHERE = "nowhere"


def audit_consumer(history: History, consumer: ConsumerHistory, notes: Notes) -> ConsumerBooks:
    """Note whatever does not fit, and count what is where."""
    return _Audit(history, consumer, notes).run()


def audit_checkpoints(history: History, consumer: ConsumerHistory, notes: Notes) -> None:
    """No lane, of whatever epoch, has been where no position is; it may start there one day."""
    head = history.head
    reachable = max(head, consumer.start_position - 1)
    for lane, checkpoint in enumerate(consumer.checkpoints):
        if checkpoint > reachable:
            notes.note(
                Anomaly.UNACCOUNTED,
                f"the checkpoint {checkpoint} of lane {lane} lies beyond the head {head}",
            )
    if consumer.settled_to > reachable:
        notes.note(
            Anomaly.UNACCOUNTED,
            f"its earlier lanes settled events up to {consumer.settled_to}, beyond the head {head}",
        )


class _Audit:
    """One consumer's books, laid out so that each event is found in all of them."""

    def __init__(self, history: History, consumer: ConsumerHistory, notes: Notes) -> None:
        self._history = history
        self._consumer = consumer
        self._notes = notes
        self._sent = {row.event_uuid: row for row in history.outbox}
        self._effects = Counter(effect.event_uuid for effect in consumer.effects)
        self._settled = {row.event_uuid: row for row in consumer.settled}
        self._parked = {row.event_uuid: row for row in consumer.parked}
        self._passed_over = passed_over(consumer.seeks)

    def run(self) -> ConsumerBooks:
        self._audit_names()
        self._audit_holes()
        self._audit_effects()
        self._audit_keys()
        places = Counter(self._audit_row(row) for row in self._history.outbox)
        start = max(self._consumer.start_position, self._history.first)
        end = self._consumer.last_due(self._history.end)
        return ConsumerBooks(
            name=self._consumer.name,
            due=len(self._history.outbox) - places[_BEFORE] - places[_BEHIND],
            handled=places[HANDLED],
            passed=places[SKIPPED] + places[DISCARDED] + places[_OVER],
            parked=places[PARKED],
            dead=places[DEAD],
            pending=places[_PENDING],
            pruned=places[_PRUNED],
            before=places[_BEFORE],
            behind=places[_BEHIND],
            holes=sum(hole.overlap(start, end) for hole in self._history.holes),
        )

    def _unaccounted(self, what: str) -> None:
        self._notes.note(Anomaly.UNACCOUNTED, what)

    # ── all events together ───────────────────────────────────────────────────────────────────

    def _audit_names(self) -> None:
        known = self._effects.keys() | self._settled.keys() | self._parked.keys()
        for uuid in sorted((known | self._consumer.dead) - self._sent.keys()):
            self._notes.note(Anomaly.PHANTOM, f"{uuid} was handled or set aside, and never sent")

    def _audit_holes(self) -> None:
        """Where there is no event, nobody settles, parks or handles one."""
        if not self._history.holes:
            return
        places = [(row.event_uuid, row.position, row.outcome) for row in self._consumer.settled]
        places += [(row.event_uuid, row.position, "set aside") for row in self._consumer.parked]
        for row in self._history.outbox:
            if row.position is not None and self._effects[row.event_uuid]:
                places.append((row.event_uuid, row.position, "in effect"))
        for uuid, position, what in places:
            hole = self._history.hole_over(position)
            if hole is not None:
                self._unaccounted(
                    f"{uuid} is {what} at {position}, in the hole {hole.first}..{hole.last}"
                )

    def _audit_effects(self) -> None:
        """Each once, and those of a key in order. A redriven event comes when it comes."""
        for uuid, times in self._effects.items():
            if times > 1:
                self._notes.note(Anomaly.REPEATED, f"{uuid} has {times} effects")
        firsts: dict[str, Effect] = {}
        for effect in self._consumer.effects:
            if effect.event_uuid not in self._consumer.redriven:
                firsts.setdefault(effect.event_uuid, effect)
        self._notes.note_disorder(
            "effect", ((e.event_uuid, e.key, e.key_sequence) for e in firsts.values())
        )
        reached: dict[str | None, int] = {}
        for effect in firsts.values():
            reached[effect.key] = max(effect.key_sequence, reached.get(effect.key, 0))
        for uuid in self._parked.keys() - self._consumer.redriven:
            row = self._sent.get(uuid)
            # The key's events come in order: those behind this one came after it was parked.
            if row and row.key is not None and row.key_sequence < reached.get(row.key, 0):
                self._notes.note(
                    Anomaly.REORDERED,
                    f"{uuid} (number {row.key_sequence} of {row.key}) is parked, and number "
                    f"{reached[row.key]} has its effect",
                )

    def _audit_keys(self) -> None:
        """Only the first event of a key is ever tried, and its successors wait for it."""
        firsts: dict[int, ParkedRow] = {}
        for row in sorted(self._consumer.parked, key=lambda row: row.position):
            firsts.setdefault(row.key_hash, row)
        for row in firsts.values():
            if not row.is_due and not row.is_held:
                self._unaccounted(
                    f"{row.event_uuid} at {row.position} is the first of its parked key and has "
                    "no time for an attempt: nobody will ever try it"
                )

    # ── one event in all books ────────────────────────────────────────────────────────────────

    def _audit_row(self, row: SentRow) -> str:
        """Returns the one place where the event is."""
        uuid = row.event_uuid
        settled = self._settled.get(uuid)
        if settled is not None:
            self._audit_settled(row, settled)
        elif uuid in self._parked or uuid in self._consumer.dead:
            self._unaccounted(f"{uuid} at {row.position} was set aside and is not settled")
        place = self._place(row, settled)
        effects = self._effects[uuid]
        if place == _NOWHERE:
            checkpoint = self._consumer.checkpoint_over(row)
            self._notes.note(Anomaly.SKIPPED, f"{uuid} at {row.position}, checkpoint {checkpoint}")
        if place in (_NOWHERE, HANDLED) and not effects and self._consumer.knows_effects:
            self._notes.note(Anomaly.LOST, f"{uuid} at {row.position} was passed without an effect")
        if place not in (_NOWHERE, HANDLED, _PRUNED) and effects:
            self._unaccounted(f"{uuid} has an effect and counts as {place}")
        return place

    def _place(self, row: SentRow, settled: SettledRow | None) -> str:
        outside = self._outside(row)
        if outside is not None:
            if settled is not None:
                self._unaccounted(f"{row.event_uuid} is {settled.outcome} and {outside}")
            return outside
        if settled is not None:
            return settled.outcome
        if not _is_passed(row, self._consumer.checkpoint_over(row)):
            return _PENDING
        if self._was_passed_over(row):
            return _OVER
        may_be_gone = row.is_old or _is_passed(row, self._consumer.given_up_to)
        return _PRUNED if may_be_gone and _is_passed(row, self._consumer.floor) else _NOWHERE

    def _outside(self, row: SentRow) -> str | None:
        """Where a row stands that is not due to the consumer."""
        position, end = row.position, self._consumer.end_position
        if position is not None and position < self._consumer.start_position:
            return _BEFORE
        # What is not numbered yet comes behind every end.
        return _BEHIND if end is not None and (position is None or position > end) else None

    def _was_passed_over(self, row: SentRow) -> bool:
        position = row.position
        return position is not None and any(a < position <= to for a, to in self._passed_over)

    def _audit_settled(self, row: SentRow, settled: SettledRow) -> None:
        uuid, checkpoint = row.event_uuid, self._consumer.checkpoint_over(row)
        if settled.outcome not in OUTCOMES:
            self._unaccounted(f"{uuid} is {settled.outcome}, which is no outcome")
        if settled.position != row.position:
            self._unaccounted(
                f"{uuid} stands at {row.position} and was settled at {settled.position}"
            )
        if not _is_passed(row, max(checkpoint, self._consumer.settled_to)):
            self._unaccounted(
                f"{uuid} at {row.position} is settled ahead of the checkpoint {checkpoint}"
            )
        parked = self._parked.get(uuid)
        if (settled.outcome == PARKED) is (parked is None):
            there = "not" if parked is None else "also"
            self._unaccounted(f"{uuid} is {settled.outcome} and {there} among the parked events")
        if parked is not None:
            self._audit_parked(row, parked)
        self._audit_letter(settled, parked)

    def _audit_parked(self, row: SentRow, parked: ParkedRow) -> None:
        if parked.position != row.position:
            self._unaccounted(
                f"{row.event_uuid} stands at {row.position} and is parked at {parked.position}"
            )
        if parked.key_hash != key_hash(row.key, row.event_uuid):
            self._unaccounted(f"{row.event_uuid} of {row.key} is parked under another key")

    def _audit_letter(self, settled: SettledRow, parked: ParkedRow | None) -> None:
        """A letter is of a dead event, or of one that is held or on its way back."""
        is_with_operators = parked is not None and (parked.is_held or parked.is_redriven)
        has_letter = settled.event_uuid in self._consumer.dead
        if has_letter is not (settled.outcome == DEAD or is_with_operators):
            what = "a" if has_letter else "no"
            self._unaccounted(f"{settled.event_uuid} is {settled.outcome} and has {what} letter")


def _is_passed(row: SentRow, checkpoint: int) -> bool:
    return row.position is not None and row.position <= checkpoint
