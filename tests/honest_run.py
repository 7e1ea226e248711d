"""A stream to which everything that may happen has happened, and whose books balance."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import psycopg

from penstock.errors import FatalError, RetryableError
from penstock.ops.dead_letters import Request, choose, discard
from penstock.ops.seeking import Seeker
from penstock.stores.cleanup import Cleanup
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed

Connection = psycopg.Connection[Any]

BILL, SHIP, LATE = "test.bill", "test.ship", "test.late"
PRUNED, SETTLED_PRUNED = 4, 6
"""Up to here the outbox is pruned, and the settled rows of those who handled them."""
PARKED, DEAD, DISCARDED, SKIPPED = (3, 6, 9, 12, 43), (2, 8), (10,), (13, 14, 15)
SOUGHT = (10, 11, 12)
HOLE = (16, 40)
HEAD = 46

OLD = (
    "UPDATE events.outbox_event SET published_at = now() - '8 days'::interval WHERE position <= %s",
    "UPDATE events.processed_event SET processed_at = now() - '8 d'::interval WHERE position <= %s",
)

TABLES = (
    *("stream", "hole", "outbox_event", "stream_lease", "consumer", "processed_event"),
    *("parked_event", "dead_letter", "seek", "source"),
)
# Quicker than a copy of the database for each test.
SAVE = "CREATE SCHEMA saved;" + ";".join(
    f"CREATE TABLE saved.{name} AS TABLE events.{name}" for name in TABLES
)
RESTORE = ";".join(
    f"TRUNCATE events.{name}; INSERT INTO events.{name} OVERRIDING SYSTEM VALUE TABLE saved.{name}"
    for name in TABLES
) + (
    "; CREATE UNIQUE INDEX IF NOT EXISTS outbox_event_position"
    " ON events.outbox_event (stream_name, position) WHERE position IS NOT NULL"
)


class Unhappy:
    """Buries some, parks the key k0 from its first event on, and handles the rest."""

    def __init__(self) -> None:
        self.is_over = False

    def __call__(self, event: Placed) -> None:
        if self.is_over:
            return
        if event.n in (*DEAD, *DISCARDED):
            raise FatalError(f"no {event.n}")
        if event.n in PARKED:
            raise RetryableError("later", after_seconds=3600)


def tell(database_url: str) -> None:
    """Make it happen, by the real stages."""
    with closing(Workbench(database_url, None)) as bench:
        unhappy = Unhappy()

        def handle_moodily(event: Placed) -> None:
            unhappy(event)

        def handle(event: Placed) -> None: ...

        bill = bench.consumer(handle_moodily, name="bill", batch_size=3)
        ship = bench.consumer(handle, name="ship")
        bench.send(12)
        bench.send(3, event_type="remarked")
        bench.publish()
        late = bench.consumer(handle, name="late", start=8, batch_size=2)
        late.step()
        for lane in (bill, ship):
            run_until_idle(lane)
        unhappy.is_over = True
        _operate(bench.connection)
        _prune(bench.connection)
        _step_over(bench.connection)
        bench.send(6)
        bench.publish()
        while bench.checkpoint(BILL) < PARKED[-1]:
            assert not bill.step().is_idle, "it should step over the hole and handle a batch"
        run_until_idle(ship)
        bench.connection.execute("SELECT events.begin_epoch(%s, 3)", (SHIP,))


def _operate(connection: Connection) -> None:
    seeker = Seeker(connection)
    seeker.seek(seeker.plan(LATE, SOUGHT[-1] + 1), again=False, by="me")
    chosen = choose(connection, Request(references=(f"orders/{DISCARDED[0]}",)))
    assert discard(connection, chosen.criteria, by="me", reason="").discarded == 1


def _prune(connection: Connection) -> None:
    """A week later."""
    for query in OLD:
        connection.execute(query.encode(), (SETTLED_PRUNED,))
    limits: dict[str, Any] = {"retention_days": 7}
    settled = Cleanup().prune_settled(connection, since=None, batch_size=100, **limits)
    outbox = Cleanup().prune_outbox(connection, "orders", after=0, batch_size=PRUNED, **limits)
    assert (settled.deleted, outbox.deleted) == (9, PRUNED)


def _step_over(connection: Connection) -> None:
    """As after the loss of acknowledged commits."""
    connection.execute(
        "INSERT INTO events.hole (stream_name, first, last, reason)"
        " VALUES ('orders', %s, %s, 'a test')",
        HOLE,
    )
    connection.execute("UPDATE events.stream SET head = %s, published = %s", (HOLE[1], HOLE[1]))
