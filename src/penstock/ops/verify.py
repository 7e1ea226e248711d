"""Proves the books, while everybody works on: a stretch at a time, and only by reading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from penstock.core.books import ConsumerBooks, Finding, Notes
from penstock.core.settings import Settings
from penstock.core.verification import Survey, Verification
from penstock.errors import UsageError
from penstock.ops.consumers import Consumers
from penstock.ops.verify_tiers import Tier, TierReport, verify_tier
from penstock.stores.verifying import FIRST_UUID, BooksReader

WINDOW_EVENTS = 5000
"""So many events are looked at in one snapshot: a fraction of a second, and a few megabytes."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far the work is, for whoever waits for it."""

    what: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class StreamReport:
    """One stream in numbers."""

    name: str
    head: int
    published: int
    proved_from: int
    """Before it the outbox is pruned: of that only what was set aside could be looked at."""
    holes: int
    """How many positions lie in holes."""
    is_foreign: bool
    """Another database has its events: only what was set aside here was looked at."""
    consumers: tuple[ConsumerBooks, ...]
    tiers: tuple[TierReport, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, and how far the proof goes."""

    streams: tuple[StreamReport, ...]
    findings: tuple[Finding, ...]

    @property
    def balance(self) -> bool:
        """Whether nothing at all is wrong."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "balance": self.balance,
            "findings": [
                {
                    "anomaly": found.anomaly.name.lower(),
                    "meaning": found.anomaly.meaning,
                    "where": found.where,
                    "count": found.count,
                    "examples": list(found.examples),
                }
                for found in self.findings
            ],
            "streams": [stream.as_json() for stream in self.streams],
        }


class Verify:
    """Goes through the books of one stream or all, for one consumer or all.

    Bounded in memory and in the length of every transaction, whatever the size of the stream. What
    comes in after it began with a stream is left for the next time.
    """

    def __init__(
        self,
        connection: psycopg.Connection[Any],
        settings: Settings,
        *,
        tiers: tuple[Tier, ...] = (),
        on_step: Callable[[Step], None] = lambda _: None,
        window_events: int = WINDOW_EVENTS,
    ) -> None:
        self._consumers = Consumers(connection, settings.schema)
        self._books = BooksReader(
            connection,
            settings.schema,
            settled_retention_days=settings.settled_retention_days,
        )
        self._tiers = tiers
        self._on_step = on_step
        self._window_events = window_events

    def run(self, stream_name: str | None = None, consumer: str | None = None) -> Report:
        """Look at everything that was asked for. Raises UsageError for names nobody knows."""
        name = None if consumer is None else self._consumers.find(consumer)
        findings: list[Finding] = []
        streams: list[StreamReport] = []
        for stream in self._chosen(stream_name):
            survey = self._books.survey(stream, name)
            if name is None or survey.consumers:
                verification = Verification(survey)
                self._walk(verification, name)
                findings += verification.findings()
                tiers = []
                # What another database publishes is compared there.
                for tier in () if survey.is_foreign else self._tiers:
                    report, notes = self._walk_tier(tier, survey)
                    tiers.append(report)
                    findings += notes.findings()
                streams.append(_report(verification, tuple(tiers)))
        if name is not None and not streams:
            raise UsageError(f"{name} does not read {stream_name}.")
        return Report(tuple(streams), tuple(findings))

    def _chosen(self, stream_name: str | None) -> list[str]:
        known = self._books.streams()
        if stream_name is None:
            return known
        if stream_name not in known:
            there = f"there are: {', '.join(known)}" if known else "there is none"
            raise UsageError(f"There is no stream {stream_name!r}; {there}.")
        return [stream_name]

    def _walk(self, verification: Verification, consumer: str | None) -> None:
        survey = verification.survey
        self._walk_positions(verification, consumer)
        names = {each.name for each in survey.consumers}
        for name in sorted(names):
            self._walk_settled(verification, name)
        there = self._books.survey(survey.stream_name, consumer).consumers
        verification.forget(names - {each.name for each in there})

    def _walk_positions(self, verification: Verification, consumer: str | None) -> None:
        survey = verification.survey
        done = 0
        while done < survey.head:
            window = self._books.window(
                survey.stream_name,
                consumer,
                first=done + 1,
                last=survey.head,
                count=self._window_events,
            )
            verification.add_window(window)
            done = window.history.end
            self._on_step(Step(f"{survey.stream_name}: positions", done, survey.head))

    def _walk_settled(self, verification: Verification, consumer: str) -> None:
        """Rows that belong to no position are found only by looking at all of them."""
        until = self._books.last_settled(consumer)
        after: str | None = FIRST_UUID
        done = 0
        while until is not None and after is not None:
            page = self._books.loose(
                verification.survey.stream_name,
                consumer,
                after=after,
                until=until,
                count=self._window_events,
            )
            verification.add_loose_rows(consumer, page.rows, page.survey)
            after = page.last
            # Nobody has counted them; there are hardly more than positions.
            done = min(done + self._window_events, verification.survey.head)
            self._on_step(Step(f"{consumer}: settled rows", done, verification.survey.head))

    def _walk_tier(self, tier: Tier, survey: Survey) -> tuple[TierReport, Notes]:
        what = f"{survey.stream_name}: {tier.name}"
        return verify_tier(
            tier,
            self._books,
            survey,
            count=self._window_events,
            on_progress=lambda done, total: self._on_step(Step(what, done, total)),
        )


def _report(verification: Verification, tiers: tuple[TierReport, ...]) -> StreamReport:
    survey = verification.survey
    return StreamReport(
        name=survey.stream_name,
        head=survey.head,
        published=survey.published,
        proved_from=survey.first,
        holes=sum(hole.last - hole.first + 1 for hole in survey.holes),
        is_foreign=survey.is_foreign,
        consumers=verification.books(),
        tiers=tiers,
    )
