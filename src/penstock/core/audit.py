"""Compares all books of a stream with each other, and names whatever does not fit.

A history may be audited at any moment, since effect, settled row, parked row, dead letter and
checkpoint are promised to commit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.core.books import Anomaly, Books, Notes
from penstock.core.consumer_audit import audit_checkpoints, audit_consumer
from penstock.core.history import History, SentRow


def audit(history: History) -> Books:
    """Compare all books with each other. Pure: the same history gives the same books."""
    sending = Notes("the outbox")
    _audit_sending(history, sending)
    audit_holes(history, sending)
    audit_positions(history, sending)
    findings = list(sending.findings())
    consumers = []
    for consumer in history.consumers:
        notes = Notes(consumer.name)
        audit_checkpoints(history, consumer, notes)
        consumers.append(audit_consumer(history, consumer, notes))
        findings += notes.findings()
    return Books(
        sent=len(history.outbox),
        published=sum(row.position is not None for row in history.outbox),
        refused=len(history.refused),
        consumers=tuple(consumers),
        findings=tuple(findings),
    )


def _audit_sending(history: History, notes: Notes) -> None:
    """What senders believe against what the outbox holds."""
    rows = Counter(row.event_uuid for row in history.outbox)
    for uuid in sorted(history.acknowledged - rows.keys()):
        notes.note(Anomaly.LOST, f"{uuid} was acknowledged and is not in the outbox")
    for uuid in sorted(history.refused & rows.keys()):
        notes.note(Anomaly.PHANTOM, f"{uuid} was rolled back and is in the outbox")
    known = history.acknowledged | history.unknown | history.refused
    for uuid in sorted(rows.keys() - known):
        notes.note(Anomaly.UNACCOUNTED, f"{uuid} is in the outbox, and no sender knows it")
    for uuid, times in rows.items():
        if times > 1:
            notes.note(Anomaly.UNACCOUNTED, f"{uuid} is in the outbox {times} times")


def audit_holes(history: History, notes: Notes) -> None:
    """Holes lie apart from each other and below the head."""
    reached = 0
    for hole in sorted(history.holes, key=lambda hole: hole.first):
        where = f"the hole {hole.first}..{hole.last}"
        if hole.first <= reached:
            notes.note(Anomaly.UNACCOUNTED, f"{where} overlaps one that ends at {reached}")
        if hole.last > history.head:
            notes.note(Anomaly.UNACCOUNTED, f"{where} goes beyond the head {history.head}")
        reached = max(reached, hole.last)


def audit_positions(
    history: History, notes: Notes, last_of_key: dict[str, int] | None = None
) -> None:
    """Each position once or in a hole, none beyond the head, in the order of every key's commits.

    `last_of_key` carries the order from one stretch of positions to the next.
    """
    numbered = sorted((row for row in history.outbox if row.position is not None), key=_position)
    given = Counter(map(_position, numbered))
    for position, times in given.items():
        hole = history.hole_over(position)
        if hole is not None:
            what = f"has a row and lies in the hole {hole.first}..{hole.last}"
            notes.note(Anomaly.UNACCOUNTED, f"position {position} {what}")
        elif not 1 <= position <= history.head:
            what = f"has a row, but the head is {history.head}"
            notes.note(Anomaly.UNACCOUNTED, f"position {position} {what}")
        if times > 1:
            notes.note(Anomaly.UNACCOUNTED, f"position {position} was given out {times} times")
    for first, last in _missing(history, list(given)):
        what = f"position {first} has" if first == last else f"positions {first}..{last} have"
        notes.note(Anomaly.UNACCOUNTED, f"{what} no row", last - first + 1)
    steps = ((row.event_uuid, row.key, row.key_sequence) for row in numbered)
    notes.note_disorder("position", steps, last_of_key)


def _missing(history: History, given: list[int]) -> Iterator[tuple[int, int]]:
    """The stretches that have neither a row nor a hole. Holes may be huge: nothing counts along."""
    taken = [(position, position) for position in given]
    taken += [(hole.first, hole.last) for hole in history.holes]
    expected = history.first
    for first, last in sorted(taken):
        if first > history.end:
            break
        if first > expected:
            yield expected, first - 1
        expected = max(expected, last + 1)
    if expected <= history.end:
        yield expected, history.end


def _position(row: SentRow) -> int:
    assert row.position is not None
    return row.position
