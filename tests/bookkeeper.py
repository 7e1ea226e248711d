"""Consumers and streams as rows, where a test is about the books and not about workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

BILL = "shop.bill_order"

TRACES = (
    """INSERT INTO events.parked_event
           (consumer, stream_name, position, event_uuid, key_hash, entry)
       VALUES (%(name)s, 'orders', 2, gen_random_uuid(), 7, '')""",
    """INSERT INTO events.dead_letter
           (consumer, stream_name, position, event_uuid, event_type, version, key_hash, entry,
            reason)
       VALUES (%(name)s, 'orders', 3, gen_random_uuid(), 'placed', 1, 7, '', 'fatal')""",
    """INSERT INTO events.suspect (consumer, position, event_uuid, worker_id)
       VALUES (%(name)s, 9, gen_random_uuid(), 'w')""",
    """INSERT INTO events.seek (consumer, old_checkpoint, new_checkpoint, sought_by)
       VALUES (%(name)s, 1, 2, 'me')""",
    """INSERT INTO events.effect (consumer, event_uuid, effect, host, is_done, result)
       VALUES (%(name)s, gen_random_uuid(), 'mail', 'web02', true, '"sent"')""",
    """WITH done AS (INSERT INTO events.operation (kind, consumer, requested_by)
                     VALUES ('redrive', %(name)s, 'me') RETURNING id)
       INSERT INTO events.operation_event (operation_id, consumer, event_uuid, position)
       SELECT id, %(name)s, gen_random_uuid(), 3 FROM done""",
    """WITH done AS (INSERT INTO events.operation (kind, requested_by)
                     VALUES ('redrive', 'me') RETURNING id)
       INSERT INTO events.operation_event (operation_id, consumer, event_uuid, position)
       SELECT id, %(name)s, gen_random_uuid(), 4 FROM done""",
)


class Bookkeeper:
    """Writes the rows that workers would have written, and reads all books."""

    def __init__(self, database_url: str) -> None:
        self.connection = psycopg.connect(database_url, autocommit=True)

    def stream(self, events: int, *, name: str = "orders", first: int = 1) -> None:
        """A stream with so many numbered events, one a minute, the last just now."""
        self.connection.execute(
            "INSERT INTO events.stream (name, origin, head, published)"
            " SELECT %s, id, %s, %s FROM events.origin",
            (name, events, events),
        )
        self.connection.execute(
            "INSERT INTO events.outbox_event"
            " (event_uuid, stream_name, event_type, payload, position, term, created_at)"
            " SELECT gen_random_uuid(), %s, 'placed', '{}', n, 1,"
            "        clock_timestamp() - make_interval(mins => %s::int - n)"
            "   FROM generate_series(%s::int, %s::int) AS n",
            (name, events, first, events),
        )

    def consumer(
        self, name: str = BILL, *, checkpoints: Sequence[int] = (0,), stream: str = "orders"
    ) -> None:
        """A consumer whose lanes have come so far, and have settled every event up to there."""
        lanes = len(checkpoints)
        self.connection.execute(
            "INSERT INTO events.consumer (name, stream_name, start_position, lanes, epoch)"
            " VALUES (%s, %s, 1, %s, 3)",
            (name, stream, lanes),
        )
        for lane, checkpoint in enumerate(checkpoints):
            self.connection.execute(
                "INSERT INTO events.stream_lease (stream_name, role, checkpoint, epoch, lane)"
                " VALUES (%s, %s, %s, 3, %s)",
                (stream, f"consumer:{name}/3/{lane}", checkpoint, lane),
            )
            self.connection.execute(
                "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
                " SELECT %s, event_uuid, position, 'handled' FROM events.outbox_event"
                "  WHERE stream_name = %s AND position <= %s"
                "    AND (position %% %s = %s OR position <= %s)"
                " ON CONFLICT DO NOTHING",
                (name, stream, checkpoint, lanes, lane, min(checkpoints)),
            )

    def settle(self, position: int, outcome: str, name: str = BILL) -> None:
        """Give a position another outcome."""
        self.connection.execute(
            "UPDATE events.processed_event SET outcome = %s WHERE consumer = %s AND position = %s",
            (outcome, name, position),
        )

    def hold(self, name: str = BILL) -> None:
        """Somebody holds its lanes."""
        self.connection.execute(
            "UPDATE events.stream_lease SET owner_id = 'me', worker_id = 'w', clean = false,"
            " lease_until = clock_timestamp() + interval '1 minute'"
            " WHERE split_part(role, '/', 1) = %s",
            (f"consumer:{name}",),
        )

    def release(self) -> None:
        """Nobody holds any."""
        self.connection.execute(
            "UPDATE events.stream_lease SET owner_id = NULL, lease_until = '-infinity'"
        )

    def worker(self, name: str = BILL, *, alive_seconds: float = 60) -> None:
        """A process that serves it, alive or not."""
        self.connection.execute(
            "INSERT INTO events.worker (consumer, worker_id, host, pid, alive_until)"
            " VALUES (%s, gen_random_uuid()::text, 'web02', 8812,"
            "         clock_timestamp() + make_interval(secs => %s))",
            (name, alive_seconds),
        )

    def quarantine(self, name: str = BILL) -> None:
        self.connection.execute(
            "INSERT INTO events.quarantine (name, reason) VALUES (%s, 'it crashed 5 times')",
            (name,),
        )

    def leave_traces(self, name: str = BILL) -> None:
        """A row in every table that knows consumers by name."""
        self.quarantine(name)
        self.worker(name, alive_seconds=-1)
        for statement in TRACES:
            self.connection.execute(statement, {"name": name})

    def lanes(self, name: str = BILL) -> list[tuple[str, int, int, int]]:
        return self.connection.execute(
            "SELECT role, epoch, lane, checkpoint FROM events.stream_lease"
            " WHERE split_part(role, '/', 1) = %s ORDER BY lane",
            (f"consumer:{name}",),
        ).fetchall()

    def settled(self, name: str = BILL) -> dict[int, str]:
        rows = self.connection.execute(
            "SELECT position, outcome FROM events.processed_event WHERE consumer = %s", (name,)
        ).fetchall()
        return dict(rows)

    def row(self, columns: str, name: str = BILL) -> Any:
        """Columns of the consumer's row; one alone comes without a tuple around it."""
        query = sql.SQL("SELECT {} FROM events.consumer WHERE name = %s").format(
            sql.SQL(", ").join(map(sql.Identifier, columns.split()))
        )
        found = self.connection.execute(query, (name,)).fetchone()
        assert found is not None
        return found[0] if len(found) == 1 else found

    def seeks(self) -> list[tuple[Any, ...]]:
        return self.connection.execute(
            "SELECT consumer, old_checkpoint, new_checkpoint, reason FROM events.seek ORDER BY id"
        ).fetchall()

    def mentions(self, name: str) -> dict[str, int]:
        """How many rows of each table speak of a consumer, in whatever column."""
        tables = self.connection.execute(
            "SELECT table_name FROM information_schema.tables"
            " WHERE table_schema = 'events' AND table_type = 'BASE TABLE'"
        ).fetchall()
        found = {}
        for (table,) in tables:
            query = sql.SQL("SELECT count(*) FROM {} AS t WHERE to_jsonb(t)::text ~ %s").format(
                sql.Identifier("events", table)
            )
            row = self.connection.execute(
                query, (rf'"(consumer:)?{name.replace(".", "[.]")}(/[0-9/]*)?"',)
            ).fetchone()
            assert row is not None
            if row[0]:
                found[table] = row[0]
        return found
