"""What the demo finds out about itself: progress, latency, and the books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from sqlalchemy import Connection, column, func, literal_column, select, table

from penstock.cli.demo_app import EFFECTS, STREAM, Invoice, Order, Shipment
from penstock.cli.demo_senders import Journal
from penstock.core.audit import audit
from penstock.core.books import Anomaly, Books
from penstock.core.history import (
    ConsumerHistory,
    Effect,
    History,
    ParkedRow,
    SentRow,
    SettledRow,
)
from penstock.core.leases import consumer_role

HOW_MEASURED = (
    "from the commit of the order to the commit of its effect, by PostgreSQL's commit timestamps"
)
_WORDS = {
    Anomaly.LOST: "lost",
    Anomaly.REPEATED: "handled twice",
    Anomaly.REORDERED: "out of order",
    Anomaly.SKIPPED: "skipped",
    Anomaly.PHANTOM: "phantoms",
    Anomaly.UNACCOUNTED: "unaccounted for",
}
_outbox = table(
    "outbox_event",
    *map(column, ("event_uuid", "stream_name", "key", "payload", "position")),
    schema="events",
)
_stream = table("stream", *map(column, ("name", "head", "published")), schema="events")
_lease = table("stream_lease", *map(column, ("stream_name", "role", "checkpoint")), schema="events")
_settled = table(
    "processed_event",
    *map(column, ("consumer", "event_uuid", "position", "outcome")),
    schema="events",
)
_parked = table(
    "parked_event",
    *map(column, ("consumer", "event_uuid", "position", "key_hash", "next_attempt_at", "held")),
    schema="events",
)
_dead = table("dead_letter", *map(column, ("consumer", "event_uuid")), schema="events")


@dataclass(frozen=True, slots=True)
class Counts:
    """How far the line is."""

    published: int
    handled: dict[str, int]

    @property
    def slowest(self) -> int:
        """How many events every consumer has handled."""
        return min(self.handled.values())


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from commit to commit."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that the demo has to say at its end."""

    books: Books
    acts: Sequence[str]
    seconds: float
    latency: dict[str, Latency]

    @property
    def events_per_second(self) -> float:
        """From the first send to the last effect, crashes included."""
        return self.books.sent / self.seconds if self.seconds else 0.0

    @property
    def is_complete(self) -> bool:
        """Whether the books balance and nothing is left to do, or to be decided by a person."""
        books = self.books
        is_done = books.pending == books.parked == books.dead == 0
        return books.balance and is_done and books.sent > 0

    def as_plain(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.books.as_plain(),
            "balance": self.is_complete,
            "seconds": round(self.seconds, 3),
            "events_per_second": round(self.events_per_second, 1),
            "commit_to_commit_ms": {
                name: {"p50": round(each.p50_ms, 1), "p99": round(each.p99_ms, 1)}
                for name, each in self.latency.items()
            },
            "measured": HOW_MEASURED,
            "done_to_it": list(self.acts),
        }

    def render(self) -> RenderableType:
        """For people."""
        rows = Table(box=SIMPLE, show_header=False, pad_edge=False)
        rows.add_column()
        rows.add_column(justify="right")
        rows.add_column(style="dim")
        books = self.books
        rows.add_row("sent", f"{books.sent:,}", f"{books.refused:,} more were rolled back")
        for consumer in books.consumers:
            left = {name: getattr(consumer, name) for name in ("pending", "parked", "dead")}
            notes = ", ".join(f"{count:,} {name}" for name, count in left.items() if count)
            rows.add_row(f"handled by {consumer.name}", f"{consumer.handled:,}", notes)
        rows.add_section()
        for anomaly, words in _WORDS.items():
            count = books.count(anomaly)
            style = "bold red" if count else "bold green"
            rows.add_row(words, Text(f"{count:,}", style), anomaly.meaning if count else "")
        rows.add_section()
        rows.add_row("events per second", f"{self.events_per_second:,.0f}", f"{self.seconds:.1f} s")
        for name, each in self.latency.items():
            worst = f"p99 {each.p99_ms:,.0f} ms"
            rows.add_row(f"latency of {name}", f"p50 {each.p50_ms:,.0f} ms", worst)
        return Group(rows, *self._closing_words())

    def _closing_words(self) -> list[Text]:
        words = [Text(f"Latency: {HOW_MEASURED}.", "dim")]
        words += [Text(f"Done to it: {'; '.join(self.acts)}.", "dim")]
        words += [Text(str(finding), "red") for finding in self.books.findings]
        if self.is_complete:
            return [*words, Text("The books balance: every event exactly once.", "bold green")]
        return [*words, Text("The books do not balance.", "bold red")]


def read_counts(connection: Connection) -> Counts:
    """How far everybody is, in three cheap questions."""
    published = connection.execute(
        select(_stream.c.published).where(_stream.c.name == STREAM)
    ).scalar_one_or_none()
    parked: dict[str, int] = dict(
        connection.execute(select(_parked.c.consumer, func.count()).group_by(_parked.c.consumer))
        .tuples()
        .all()
    )
    handled = {
        name: checkpoint - parked.get(f"demo.{name}", 0)
        for name, checkpoint in _read_checkpoints(connection).items()
    }
    return Counts(published or 0, handled)


def _read_checkpoints(connection: Connection) -> dict[str, int]:
    checkpoints = dict(
        connection.execute(
            select(_lease.c.role, _lease.c.checkpoint).where(_lease.c.stream_name == STREAM)
        )
        .tuples()
        .all()
    )
    return {name: checkpoints.get(consumer_role(f"demo.{name}"), 0) for name in EFFECTS}


def read_latency(connection: Connection, effect: type[Invoice] | type[Shipment]) -> Latency:
    """From the commit that sent an event to the commit that holds its effect."""
    sent_at = func.pg_xact_commit_timestamp(literal_column("placed_order.xmin"))
    done_at = func.pg_xact_commit_timestamp(literal_column(f"{effect.__tablename__}.xmin"))
    milliseconds = func.extract("epoch", done_at - sent_at) * 1000
    p50, p99 = connection.execute(
        select(
            func.percentile_cont(0.5).within_group(milliseconds),
            func.percentile_cont(0.99).within_group(milliseconds),
        ).select_from(Order.__table__.join(effect.__table__, _same_event(effect)))
    ).one()
    return Latency(float(p50 or 0), float(p99 or 0))


def _same_event(effect: type[Invoice] | type[Shipment]) -> Any:
    return Order.event_uuid == effect.event_uuid


def read_books(connection: Connection, journal: Journal) -> Books:
    """Audit the whole history, in one snapshot."""
    rows = connection.execute(
        select(
            _outbox.c.event_uuid,
            _outbox.c.key,
            _outbox.c.payload,
            _outbox.c.position,
        ).where(_outbox.c.stream_name == STREAM)
    ).all()
    head = connection.execute(
        select(_stream.c.head).where(_stream.c.name == STREAM)
    ).scalar_one_or_none()
    return audit(
        History(
            acknowledged=frozenset(journal.acknowledged),
            refused=frozenset(journal.refused),
            unknown=frozenset(journal.unknown),
            outbox=tuple(
                SentRow(str(uuid), key, payload["number"], position)
                for uuid, key, payload, position in rows
            ),
            head=head or 0,
            consumers=tuple(_read_consumer(connection, name) for name in EFFECTS),
        )
    )


def _read_consumer(connection: Connection, name: str) -> ConsumerHistory:
    effect, full_name = EFFECTS[name], f"demo.{name}"
    effects = connection.execute(
        select(effect.event_uuid, effect.customer, effect.number).order_by(effect.serial)
    ).all()
    settled = connection.execute(
        select(_settled.c.event_uuid, _settled.c.position, _settled.c.outcome).where(
            _settled.c.consumer == full_name
        )
    ).all()
    parked = connection.execute(
        select(
            _parked.c.event_uuid,
            _parked.c.position,
            _parked.c.key_hash,
            _parked.c.next_attempt_at.is_not(None),
            _parked.c.held,
        ).where(_parked.c.consumer == full_name)
    ).all()
    dead = connection.execute(select(_dead.c.event_uuid).where(_dead.c.consumer == full_name))
    return ConsumerHistory(
        name=name,
        effects=tuple(Effect(str(uuid), customer, number) for uuid, customer, number in effects),
        settled=tuple(SettledRow(str(uuid), at, outcome) for uuid, at, outcome in settled),
        checkpoints=(_read_checkpoints(connection)[name],),
        parked=tuple(ParkedRow(str(uuid), *rest) for uuid, *rest in parked),
        dead=frozenset(map(str, dead.scalars())),
    )
