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
from penstock.core.books import (
    Anomaly,
    Books,
    ConsumerHistory,
    Effect,
    History,
    SentRow,
    SettledRow,
    audit,
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
        """Whether the books balance and nothing is left to do."""
        return self.books.balance and self.books.pending == 0 and self.books.sent > 0

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
            pending = f"{consumer.pending:,} are still pending" if consumer.pending else ""
            rows.add_row(f"handled by {consumer.name}", f"{consumer.handled:,}", pending)
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
    """How far everybody is, in two cheap questions."""
    published = connection.execute(
        select(_stream.c.published).where(_stream.c.name == STREAM)
    ).scalar_one_or_none()
    checkpoints = dict(
        connection.execute(
            select(_lease.c.role, _lease.c.checkpoint).where(_lease.c.stream_name == STREAM)
        )
        .tuples()
        .all()
    )
    handled = {name: checkpoints.get(consumer_role(f"demo.{name}"), 0) for name in EFFECTS}
    return Counts(published or 0, handled)


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
    return ConsumerHistory(
        name=name,
        effects=tuple(Effect(str(uuid), customer, number) for uuid, customer, number in effects),
        settled=tuple(SettledRow(str(uuid), at, outcome) for uuid, at, outcome in settled),
        checkpoints=(read_counts(connection).handled[name],),
    )
