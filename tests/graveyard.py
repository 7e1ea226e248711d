"""Dead letters as workers leave them, and a worker that settles parked events as it is agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.core.lanes import key_hash
from tests.bookkeeper import BILL, Bookkeeper

BATCH = 200
LETTERS = """
    WITH letter AS (
        SELECT e.position, gen_random_uuid() AS event_uuid, e.key, e.key_hash
          FROM unnest(%(positions)s::bigint[], %(keys)s::text[], %(key_hashes)s::bigint[])
               AS e(position, key, key_hash)
    ), entered AS (
        INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
        SELECT %(consumer)s, event_uuid, position,
               CASE WHEN %(held)s THEN 'parked' ELSE 'dead' END FROM letter
    ), body AS (
        SELECT letter.*, concat_ws(E'\\n', 'event', gen_random_uuid(), 1, position, event_uuid,
               'orders.placed', 1, %(key_id)s::text, 1767225600000000, to_json(key)::text,
               '{"source": "web"}', '{"cents": 990}') AS entry
          FROM letter
    ), parked AS (
        INSERT INTO events.parked_event (consumer, stream_name, position, event_uuid, key_hash,
               entry, attempts, held, last_error, history, parked_at)
        SELECT %(consumer)s, 'orders', position, event_uuid, key_hash, entry, 3, true, 'boom',
               '[{}, {}, {}]', clock_timestamp() - interval '1 hour'
          FROM body WHERE %(held)s
    )
    INSERT INTO events.dead_letter (consumer, stream_name, position, event_uuid, event_type,
           version, key_hash, entry, reason, error_type, error_message, traceback, fingerprint,
           handler, attempts, host, buried_at)
    SELECT %(consumer)s, 'orders', position, event_uuid, 'orders.placed', 1, key_hash, entry,
           %(reason)s, %(error_type)s, 'no order ' || position, %(traceback)s, %(fingerprint)s,
           'shop.bill_order', %(attempts)s::jsonb, 'web02',
           clock_timestamp() - %(age)s::interval + make_interval(secs => position * 0.001)
      FROM body ORDER BY position
    RETURNING id
"""
ATTEMPTS = """[{"at": "2030-01-31T06:00:00+00:00", "host": "web02", "error": "KeyError: 7"},
               {"at": "2030-01-31T06:01:00+00:00", "host": "web03", "error": "KeyError: 8"}]"""
TRACEBACK = 'Traceback (most recent call last):\n  File "shop.py", line 7\nKeyError: 7\n'


class Graveyard(Bookkeeper):
    """Buries events, and keeps count of those that were handled after all."""

    def __init__(self, database_url: str) -> None:
        super().__init__(database_url)
        self.database_url = database_url
        self.connection.execute(
            "CREATE TABLE handled (consumer text, position bigint, n bigint GENERATED ALWAYS AS"
            " IDENTITY, PRIMARY KEY (consumer, position))"
        )

    def bury(
        self,
        positions: Sequence[int],
        *,
        consumer: str = BILL,
        key: Callable[[int], str] = lambda position: f"k{position}",
        held: bool = False,
        reason: str = "exhausted",
        error_type: str = "builtins.KeyError",
        fingerprint: str = "f00d",
        traceback: str = TRACEBACK,
        age: str = "1 hour",
        key_id: str = "",
    ) -> list[int]:
        """Dead letters at these positions; returns their numbers."""
        keys = [key(position) for position in positions]
        rows = self.connection.execute(
            LETTERS,
            {
                "positions": list(positions),
                "keys": keys,
                "key_hashes": [key_hash(each, "") for each in keys],
                "consumer": consumer,
                "held": held,
                "reason": reason,
                "error_type": error_type,
                "fingerprint": fingerprint,
                "traceback": traceback,
                "attempts": ATTEMPTS,
                "age": age,
                "key_id": key_id,
            },
        )
        return sorted(row[0] for row in rows)

    def park(self, position: int, key: str, *, consumer: str = BILL, due: str | None) -> None:
        """A parked event whose next attempt is due then; None: it waits behind another."""
        row = self.connection.execute(
            "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
            " VALUES (%s, gen_random_uuid(), %s, 'parked') RETURNING event_uuid",
            (consumer, position),
        ).fetchone()
        assert row is not None
        hashed = key_hash(key, "")
        self.connection.execute(
            "INSERT INTO events.parked_event (consumer, stream_name, position, event_uuid,"
            " key_hash, entry, attempts, next_attempt_at, last_error, history, depth)"
            " SELECT %(consumer)s, 'orders', %(position)s, %(uuid)s, %(hash)s,"
            "  concat_ws(E'\\n', 'event', %(uuid)s::uuid, 1, 1, %(uuid)s::uuid, 'orders.placed',"
            "   1, '', 1767225600000000, to_json(%(key)s::text)::text, '{}', '{}'),"
            "  2, clock_timestamp() + %(due)s::interval, 'KeyError: 7', %(history)s::jsonb,"
            "  1 + coalesce((SELECT max(depth) FROM events.parked_event"
            "                 WHERE consumer = %(consumer)s AND key_hash = %(hash)s), 0)",
            {
                "consumer": consumer,
                "position": position,
                "uuid": row[0],
                "hash": hashed,
                "key": key,
                "due": due,
                "history": ATTEMPTS,
            },
        )

    def parked(self, consumer: str = BILL) -> dict[int, tuple[bool, bool, int | None]]:
        """Position → (has a due time, is held, operation)."""
        rows = self.connection.execute(
            "SELECT position, next_attempt_at IS NOT NULL, held, operation_id"
            "  FROM events.parked_event WHERE consumer = %s ORDER BY position",
            (consumer,),
        )
        return {position: (is_due, held, op) for position, is_due, held, op in rows}

    def dead(self, consumer: str = BILL) -> list[int]:
        rows = self.connection.execute(
            "SELECT position FROM events.dead_letter WHERE consumer = %s ORDER BY position",
            (consumer,),
        )
        return [row[0] for row in rows]

    def handled(self, consumer: str = BILL) -> list[int]:
        """Positions in the order in which they were handled."""
        rows = self.connection.execute(
            "SELECT position FROM handled WHERE consumer = %s ORDER BY n", (consumer,)
        )
        return [row[0] for row in rows]

    def operations(self) -> list[tuple[Any, ...]]:
        return self.connection.execute(
            "SELECT kind, events, failed, ended_as, requested_by, reason"
            "  FROM events.operation ORDER BY id"
        ).fetchall()

    def touched(self) -> int:
        row = self.connection.execute("SELECT count(*) FROM events.operation_event").fetchone()
        assert row is not None
        return int(row[0])

    @contextmanager
    def in_hand(self, *positions: int) -> Iterator[None]:
        """A worker tries these at this moment."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute(
                "SELECT 1 FROM events.parked_event WHERE position = ANY(%s) FOR UPDATE",
                (list(positions),),
            )
            yield
            connection.rollback()


class Worker:
    """Settles what is due as workers do: in order within a key, one attempt for a redriven one."""

    def __init__(
        self, database_url: str, fails: Callable[[int], bool] = lambda _position: False
    ) -> None:
        self._connection = psycopg.connect(database_url)
        self._fails = fails
        self.tried: list[int] = []

    def step(self) -> int:
        """Try what is due, each in its turn. Returns how many were settled."""
        with self._connection.transaction():
            rows = self._connection.execute(
                "SELECT p.consumer, p.position, p.event_uuid, p.key_hash"
                "  FROM events.parked_event p"
                " WHERE p.next_attempt_at <= clock_timestamp() AND NOT EXISTS ("
                "       SELECT 1 FROM events.parked_event q WHERE q.consumer = p.consumer"
                "          AND q.key_hash = p.key_hash AND q.position < p.position)"
                " ORDER BY p.position LIMIT %s FOR UPDATE",
                (BATCH,),
            ).fetchall()
            for row in rows:
                self._settle(*row)
        return len(rows)

    def _settle(self, consumer: str, position: int, event_uuid: Any, hashed: int) -> None:
        event = {"consumer": consumer, "position": position, "uuid": event_uuid, "hash": hashed}
        self.tried.append(position)
        failed = self._fails(position)
        if failed:
            self._connection.execute(
                "UPDATE events.dead_letter d SET buried_at = clock_timestamp(),"
                " operation_id = p.operation_id, redrives = d.redrives + 1"
                "  FROM events.parked_event p"
                " WHERE d.consumer = %(consumer)s AND d.event_uuid = %(uuid)s"
                "   AND p.consumer = d.consumer AND p.position = d.position",
                event,
            )
        else:
            self._connection.execute(
                "DELETE FROM events.dead_letter"
                " WHERE consumer = %(consumer)s AND event_uuid = %(uuid)s",
                event,
            )
            # Its key refuses an event that is handled twice.
            self._connection.execute(
                "INSERT INTO handled (consumer, position) VALUES (%(consumer)s, %(position)s)",
                event,
            )
        self._connection.execute(
            "DELETE FROM events.parked_event"
            " WHERE consumer = %(consumer)s AND position = %(position)s",
            event,
        )
        self._connection.execute(
            "UPDATE events.processed_event SET outcome = %(outcome)s"
            " WHERE consumer = %(consumer)s AND event_uuid = %(uuid)s",
            {**event, "outcome": "dead" if failed else "handled"},
        )
        self._connection.execute(
            "SELECT events.promote_parked(%(consumer)s, ARRAY[%(hash)s::bigint])", event
        )

    def close(self) -> None:
        self._connection.close()


@contextmanager
def working(
    database_url: str, fails: Callable[[int], bool] = lambda _position: False
) -> Iterator[Worker]:
    """A worker that goes on until the end of the block."""
    worker, over = Worker(database_url, fails), threading.Event()

    def work() -> None:
        while not over.is_set():
            if not worker.step():
                over.wait(0.005)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield worker
    finally:
        over.set()
        thread.join()
        worker.close()
