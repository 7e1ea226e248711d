"""The books: whether every event that was sent has exactly one effect, in order.

The anomalies are named first. A history is what senders, outbox and consumers wrote down, read in
one snapshot; it may be audited at any moment, since effect, settled row and checkpoint are
promised to commit together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock.core.lanes import lane_of

EXAMPLES_MAX = 3
EFFECTIVE = "handled"
BURIED = "dead"


class Anomaly(Enum):
    """What can go wrong with events; the value says what it means."""

    LOST = "an acknowledged event has neither an effect nor a place among the pending"
    REPEATED = "an event has its effect twice"
    REORDERED = "effects of a key stand in another order than the key's commits"
    SKIPPED = "the checkpoint of its lane passed a position that has no settled row"
    PHANTOM = "there is an effect, a row or an entry of an event that was never sent"
    UNACCOUNTED = "two books disagree: about a position, a count, or what is still pending"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return self.value


# ── what is audited ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SentRow:
    """One row of the outbox; `key_sequence` counts the commits of its key."""

    event_uuid: str
    key: str | None
    key_sequence: int
    position: int | None


@dataclass(frozen=True, slots=True)
class Effect:
    """What a handler wrote for one event."""

    event_uuid: str
    key: str | None
    key_sequence: int


@dataclass(frozen=True, slots=True)
class SettledRow:
    """One row of `processed_event`."""

    event_uuid: str
    position: int
    outcome: str = EFFECTIVE


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerHistory:
    """What one consumer has done; effects in the order of their commits."""

    name: str
    effects: tuple[Effect, ...]
    settled: tuple[SettledRow, ...]
    checkpoints: tuple[int, ...]
    """How far each lane has come; a consumer without lanes has one."""
    start_position: int = 1
    settled_to: int = 0
    """Lanes of an earlier count may have settled events up to here, beyond the checkpoints."""

    def checkpoint_over(self, row: SentRow) -> int:
        """How far the lane has come that the event belongs to."""
        return self.checkpoints[lane_of(row.key, row.event_uuid, len(self.checkpoints))]


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Everything that is known of one stream, in one snapshot."""

    acknowledged: frozenset[str]
    """Events of transactions whose COMMIT was answered."""
    refused: frozenset[str] = frozenset()
    """Events of transactions that were rolled back: there must be no trace of them."""
    unknown: frozenset[str] = frozenset()
    """Events whose sender died or lost its connection at COMMIT: both outcomes are right."""
    outbox: tuple[SentRow, ...]
    head: int
    consumers: tuple[ConsumerHistory, ...] = ()


# ── what comes out ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of anomaly in one place, with its first few examples."""

    anomaly: Anomaly
    where: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.anomaly.name} {self.count} in {self.where}: " + "; ".join(self.examples)


@dataclass(frozen=True, slots=True)
class ConsumerBooks:
    """One consumer in numbers; `due` is what it has to settle in all."""

    name: str
    due: int
    handled: int
    passed: int
    """Settled without an effect: skipped, parked, buried or discarded."""
    dead: int
    """How many of those were buried: neither lost nor repeated, and waiting for a person."""
    pending: int


@dataclass(frozen=True, slots=True)
class Books:
    """The result of an audit."""

    sent: int
    published: int
    refused: int
    consumers: tuple[ConsumerBooks, ...]
    findings: tuple[Finding, ...]

    @property
    def balance(self) -> bool:
        """Whether nothing at all is wrong. Pending events are not wrong."""
        return not self.findings

    @property
    def pending(self) -> int:
        """How many events wait for a consumer, summed over the consumers."""
        return sum(consumer.pending for consumer in self.consumers)

    def count(self, anomaly: Anomaly) -> int:
        """How often an anomaly was found."""
        return sum(finding.count for finding in self.findings if finding.anomaly is anomaly)

    def as_plain(self) -> dict[str, Any]:
        """The same in plain values, for JSON."""
        return {
            "sent": self.sent,
            "published": self.published,
            "rolled_back": self.refused,
            "consumers": {
                consumer.name: {
                    "handled": consumer.handled,
                    "passed": consumer.passed,
                    "dead": consumer.dead,
                    "pending": consumer.pending,
                }
                for consumer in self.consumers
            },
            "anomalies": {anomaly.name.lower(): self.count(anomaly) for anomaly in Anomaly},
            "findings": [str(finding) for finding in self.findings],
            "balance": self.balance,
        }

    def __str__(self) -> str:
        lines = [f"sent {self.sent}, published {self.published}, rolled back {self.refused}"]
        lines += [
            f"{c.name}: handled {c.handled}, passed {c.passed}, pending {c.pending} of {c.due}"
            + (f"; {c.dead} of those passed are dead" if c.dead else "")
            for c in self.consumers
        ]
        lines += [str(finding) for finding in self.findings] or ["the books balance"]
        return "\n".join(lines)


@dataclass(slots=True)
class _Notes:
    """Findings while they are being collected in one place."""

    where: str
    examples: dict[Anomaly, list[str]] = field(default_factory=dict)
    counts: Counter[Anomaly] = field(default_factory=Counter)

    def note(self, anomaly: Anomaly, example: str) -> None:
        self.counts[anomaly] += 1
        kept = self.examples.setdefault(anomaly, [])
        if len(kept) < EXAMPLES_MAX:
            kept.append(example)

    def findings(self) -> Iterator[Finding]:
        for anomaly in Anomaly:
            if self.counts[anomaly]:
                yield Finding(
                    anomaly, self.where, self.counts[anomaly], tuple(self.examples[anomaly])
                )


# ── the audit ──────────────────────────────────────────────────────────────────────────────────


def audit(history: History) -> Books:
    """Compare all books with each other. Pure: the same history gives the same books."""
    sending = _Notes("the outbox")
    _audit_sending(history, sending)
    _audit_positions(history, sending)
    findings = list(sending.findings())
    consumers = []
    for consumer in history.consumers:
        notes = _Notes(consumer.name)
        consumers.append(_audit_consumer(history, consumer, notes))
        findings += notes.findings()
    return Books(
        sent=len(history.outbox),
        published=sum(row.position is not None for row in history.outbox),
        refused=len(history.refused),
        consumers=tuple(consumers),
        findings=tuple(findings),
    )


def _audit_sending(history: History, notes: _Notes) -> None:
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


def _audit_positions(history: History, notes: _Notes) -> None:
    """Positions are 1 … head, each once, and follow the commits of every key."""
    numbered = sorted((row for row in history.outbox if row.position is not None), key=_position)
    given = Counter(map(_position, numbered))
    for position in sorted(given.keys() ^ set(range(1, history.head + 1))):
        what = "no row" if position not in given else f"a row, but the head is {history.head}"
        notes.note(Anomaly.UNACCOUNTED, f"position {position} has {what}")
    for position, times in given.items():
        if times > 1:
            notes.note(Anomaly.UNACCOUNTED, f"position {position} was given out {times} times")
    _audit_order("position", ((r.event_uuid, r.key, r.key_sequence) for r in numbered), notes)


def _position(row: SentRow) -> int:
    assert row.position is not None
    return row.position


def _audit_order(what: str, steps: Iterable[tuple[str, str | None, int]], notes: _Notes) -> None:
    """Along the steps, the sequence of every key grows."""
    last: dict[str, int] = {}
    for uuid, key, sequence in steps:
        if key is None:
            continue
        if sequence < last.get(key, 0):
            notes.note(
                Anomaly.REORDERED,
                f"the {what} of {uuid} (number {sequence} of {key}) comes after {last[key]}",
            )
        last[key] = max(sequence, last.get(key, 0))


def _audit_consumer(history: History, consumer: ConsumerHistory, notes: _Notes) -> ConsumerBooks:
    sent = {row.event_uuid: row for row in history.outbox}
    effects = Counter(effect.event_uuid for effect in consumer.effects)
    settled = {row.event_uuid: row for row in consumer.settled}
    for uuid, times in effects.items():
        if times > 1:
            notes.note(Anomaly.REPEATED, f"{uuid} has {times} effects")
    for uuid in sorted((effects.keys() | settled.keys()) - sent.keys()):
        notes.note(Anomaly.PHANTOM, f"{uuid} was handled and never sent")
    for lane, checkpoint in enumerate(consumer.checkpoints):
        if checkpoint > history.head:
            notes.note(
                Anomaly.UNACCOUNTED,
                f"the checkpoint {checkpoint} of lane {lane} lies beyond the head {history.head}",
            )
    first_effects: dict[str, Effect] = {}
    for effect in consumer.effects:
        first_effects.setdefault(effect.event_uuid, effect)
    _audit_order(
        "effect", ((e.event_uuid, e.key, e.key_sequence) for e in first_effects.values()), notes
    )
    due = [r for r in history.outbox if r.position is None or r.position >= consumer.start_position]
    pending = 0
    for row in due:
        row_settled = settled.get(row.event_uuid)
        _audit_row(consumer, row, effects[row.event_uuid], row_settled, notes)
        pending += row_settled is None and not _is_passed(row, consumer.checkpoint_over(row))
    outcomes = Counter(row.outcome for row in consumer.settled)
    handled = outcomes[EFFECTIVE]
    passed = len(consumer.settled) - handled
    return ConsumerBooks(consumer.name, len(due), handled, passed, outcomes[BURIED], pending)


def _audit_row(
    consumer: ConsumerHistory,
    row: SentRow,
    effects: int,
    settled: SettledRow | None,
    notes: _Notes,
) -> None:
    """One event in all books of one consumer."""
    uuid = row.event_uuid
    checkpoint = consumer.checkpoint_over(row)
    is_passed = _is_passed(row, checkpoint)
    if settled is None and is_passed:
        notes.note(Anomaly.SKIPPED, f"{uuid} at {row.position}, checkpoint {checkpoint}")
        if not effects:
            notes.note(Anomaly.LOST, f"{uuid} at {row.position} was passed and has no effect")
    elif settled is None:
        if effects:
            notes.note(Anomaly.UNACCOUNTED, f"{uuid} has an effect and counts as pending")
    else:
        if settled.outcome == EFFECTIVE and not effects:
            notes.note(Anomaly.LOST, f"{uuid} at {row.position} is settled and has no effect")
        if settled.outcome != EFFECTIVE and effects:
            notes.note(Anomaly.UNACCOUNTED, f"{uuid} is {settled.outcome} and has an effect")
        if settled.position != row.position:
            notes.note(
                Anomaly.UNACCOUNTED,
                f"{uuid} stands at {row.position} and was settled at {settled.position}",
            )
        if not _is_passed(row, max(checkpoint, consumer.settled_to)):
            notes.note(
                Anomaly.UNACCOUNTED,
                f"{uuid} at {row.position} is settled ahead of the checkpoint {checkpoint}",
            )


def _is_passed(row: SentRow, checkpoint: int) -> bool:
    return row.position is not None and row.position <= checkpoint
