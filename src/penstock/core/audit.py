"""Compares all books of a stream with each other, and names whatever does not fit.

A history may be audited at any moment, since effect, settled row, parked row, dead letter and
checkpoint are promised to commit together.
"""

from __future__ import annotations

from collections import Counter

from penstock.core.books import Anomaly, Books, Notes
from penstock.core.consumer_audit import audit_consumer
from penstock.core.history import History, SentRow


def audit(history: History) -> Books:
    """Compare all books with each other. Pure: the same history gives the same books."""
    sending = Notes("the outbox")
    _audit_sending(history, sending)
    _audit_positions(history, sending)
    findings = list(sending.findings())
    consumers = []
    for consumer in history.consumers:
        notes = Notes(consumer.name)
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


def _audit_positions(history: History, notes: Notes) -> None:
    """Positions are 1 … head, each once, and follow the commits of every key."""
    numbered = sorted((row for row in history.outbox if row.position is not None), key=_position)
    given = Counter(map(_position, numbered))
    for position in sorted(given.keys() ^ set(range(1, history.head + 1))):
        what = "no row" if position not in given else f"a row, but the head is {history.head}"
        notes.note(Anomaly.UNACCOUNTED, f"position {position} has {what}")
    for position, times in given.items():
        if times > 1:
            notes.note(Anomaly.UNACCOUNTED, f"position {position} was given out {times} times")
    notes.note_disorder("position", ((r.event_uuid, r.key, r.key_sequence) for r in numbered))


def _position(row: SentRow) -> int:
    assert row.position is not None
    return row.position
