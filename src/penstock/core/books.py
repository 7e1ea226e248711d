"""The books: whether every event that was sent has exactly one effect, in order.

The anomalies are named first. What is compared with what stands in `audit.py`, and for one
consumer in `consumer_audit.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

EXAMPLES_MAX = 3


class Anomaly(Enum):
    """What can go wrong with events; the value says what it means."""

    LOST = "an acknowledged event has neither an effect nor a place among the pending"
    REPEATED = "an event has its effect twice"
    REORDERED = "effects of a key stand in another order than the key's commits"
    SKIPPED = "the checkpoint of its lane passed a position that has no settled row"
    PHANTOM = "there is an effect, a row or an entry of an event that was never sent"
    UNACCOUNTED = "two books disagree: about a position, a count, or what is still to be done"

    @property
    def meaning(self) -> str:
        """One sentence for people."""
        return self.value


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of anomaly in one place, with its first few examples."""

    anomaly: Anomaly
    where: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.anomaly.name} {self.count} in {self.where}: " + "; ".join(self.examples)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerBooks:
    """One consumer in numbers: every event that is due to it is in one of the others."""

    name: str
    due: int
    handled: int
    passed: int
    """Without an effect, for good: skipped, discarded, or passed over by an operator."""
    parked: int
    """Waiting for another attempt, or for a person to decide."""
    dead: int
    """Buried: neither lost nor repeated, and waiting for a person."""
    pending: int
    pruned: int = 0
    """Passed so long ago that nothing but the checkpoint tells of it, or being forgotten."""
    before: int = 0
    """Before its start: not due to it, and not among the others."""
    behind: int = 0
    """Behind its end, if it is a replay: likewise."""
    holes: int = 0
    """Positions without an event: likewise."""

    def __add__(self, other: ConsumerBooks) -> ConsumerBooks:
        """The books of another stretch of positions, added to these."""
        counts = [each.name for each in fields(self) if each.name != "name"]
        summed = {name: getattr(self, name) + getattr(other, name) for name in counts}
        return ConsumerBooks(name=self.name, **summed)

    def as_plain(self) -> dict[str, int]:
        """The same in plain values, for JSON."""
        return {
            "handled": self.handled,
            "passed": self.passed,
            "parked": self.parked,
            "dead": self.dead,
            "pending": self.pending,
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in self.as_plain().items())
        return f"{self.name}: {counts} of {self.due}"


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
        """Whether nothing at all is wrong. Pending, parked and dead events are not wrong."""
        return not self.findings

    @property
    def pending(self) -> int:
        """How many events wait for a consumer, summed over the consumers."""
        return sum(consumer.pending for consumer in self.consumers)

    @property
    def parked(self) -> int:
        """How many events wait for another attempt, summed over the consumers."""
        return sum(consumer.parked for consumer in self.consumers)

    @property
    def dead(self) -> int:
        """How many events were buried, summed over the consumers."""
        return sum(consumer.dead for consumer in self.consumers)

    def count(self, anomaly: Anomaly) -> int:
        """How often an anomaly was found."""
        return sum(finding.count for finding in self.findings if finding.anomaly is anomaly)

    def as_plain(self) -> dict[str, Any]:
        """The same in plain values, for JSON."""
        return {
            "sent": self.sent,
            "published": self.published,
            "rolled_back": self.refused,
            "consumers": {consumer.name: consumer.as_plain() for consumer in self.consumers},
            "anomalies": {anomaly.name.lower(): self.count(anomaly) for anomaly in Anomaly},
            "findings": [str(finding) for finding in self.findings],
            "balance": self.balance,
        }

    def __str__(self) -> str:
        lines = [f"sent {self.sent}, published {self.published}, rolled back {self.refused}"]
        lines += map(str, self.consumers)
        lines += [str(finding) for finding in self.findings] or ["the books balance"]
        return "\n".join(lines)


@dataclass(slots=True)
class Notes:
    """Findings while they are being collected in one place."""

    where: str
    examples: dict[Anomaly, list[str]] = field(default_factory=dict)
    counts: Counter[Anomaly] = field(default_factory=Counter)

    def note(self, anomaly: Anomaly, example: str, times: int = 1) -> None:
        """One more of these, or several; the first few are kept as examples."""
        self.counts[anomaly] += times
        kept = self.examples.setdefault(anomaly, [])
        if len(kept) < EXAMPLES_MAX:
            kept.append(example)

    def note_disorder(
        self,
        what: str,
        steps: Iterable[tuple[str, str | None, int]],
        last: dict[str, int] | None = None,
    ) -> None:
        """Steps are (event, key, its number in its key): along them, the numbers of a key grow.

        `last` knows how far each key had come before, and is kept up to date.
        """
        last = {} if last is None else last
        for uuid, key, sequence in steps:
            if key is None:
                continue
            if sequence < last.get(key, 0):
                self.note(
                    Anomaly.REORDERED,
                    f"the {what} of {uuid} (number {sequence} of {key}) comes after {last[key]}",
                )
            last[key] = max(sequence, last.get(key, 0))

    def findings(self) -> Iterator[Finding]:
        """What was noted, by anomaly."""
        for anomaly in Anomaly:
            if self.counts[anomaly]:
                yield Finding(
                    anomaly, self.where, self.counts[anomaly], tuple(self.examples[anomaly])
                )
