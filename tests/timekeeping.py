"""What the timekeeper's tests are told in: timers by SQL, and who fires them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.pipeline.timekeeper import Timekeeper
from penstock.runtime.loop import Loop
from tests.waiting import SOON_SECONDS, wait_until

SCHEDULE = """
SELECT events.schedule(%(timer_id)s, %(stream)s, 'T', %(payload)s::jsonb,
                       due_at => %(at)s::timestamptz, delay => %(delay)s::interval,
                       key => %(key)s, recurrence => %(recurrence)s::jsonb)
"""
SENT = """
SELECT metadata ->> '__timer_id__', payload, key, (metadata ->> '__timer_due_ms__')::bigint
  FROM events.outbox_event ORDER BY id
"""


class Clockwork:
    """A database with timers, and a timekeeper that the test steps."""

    def __init__(self, database_url: str, **settings: Any) -> None:
        self.settings = Settings(database_url=database_url, **settings)
        self.connection: psycopg.Connection[Any] = psycopg.connect(database_url, autocommit=True)
        self.timekeeper = Timekeeper(self.settings)

    def close(self) -> None:
        self.timekeeper.close()
        self.connection.close()

    def schedule(
        self,
        timer_id: str,
        delay: str | None = "-1 second",
        *,
        connection: psycopg.Connection[Any] | None = None,
        **fields: Any,
    ) -> None:
        """A timer by SQL: due a second ago, unless told otherwise."""
        recurrence = fields.pop("recurrence", None)
        at = fields.pop("at", None)
        parameters = {
            "timer_id": timer_id,
            "stream": "reminders",
            "payload": json.dumps(fields.pop("payload", 1)),
            "at": at,
            "delay": None if at is not None else delay,
            "key": None,
            "recurrence": None if recurrence is None else json.dumps(recurrence),
            **fields,
        }
        (connection or self.connection).execute(SCHEDULE, parameters)

    def fire(self) -> list[str]:
        """Step until nothing is left to do now; returns what was fired meanwhile."""
        before = len(self.sent())
        for _ in range(1000):
            progress = self.timekeeper.step()
            if progress.is_idle:
                return [str(row[0]) for row in self.sent()[before:]]
        raise AssertionError("the timekeeper never comes to an end")

    def sent(self) -> list[tuple[Any, ...]]:
        """Timer id, payload, key and due time of every event, in the order of the outbox."""
        return self.connection.execute(SENT).fetchall()

    def fired(self) -> list[str]:
        return [row[0] for row in self.sent()]

    def row(self, query: str, *parameters: Any) -> Any:
        return self.connection.execute(query.encode(), parameters).fetchone()


@contextmanager
def clockwork(database_url: str, **settings: Any) -> Iterator[Clockwork]:
    made = Clockwork(database_url, **settings)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def ticking(settings: Settings, name: str = "timers") -> Iterator[threading.Event]:
    """A timekeeper that runs in a thread until the block ends, or its event is set."""
    stop = threading.Event()
    loop = Loop(name, lambda: Timekeeper(settings), stop)
    thread = threading.Thread(target=loop.run, name=name)
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(SOON_SECONDS)
        assert not thread.is_alive(), f"{name} does not stop"


def wait_for_sleep(database_url: str, sleepers: int = 1) -> None:
    """Wait until so many timekeepers listen and one of them makes schedulers notify."""
    listening = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name = 'penstock timer wake-up'"
    )
    held = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 1"
        " AND classid = (hashtext('penstock timers')::bigint & 4294967295)::oid"
        " AND mode = 'ExclusiveLock'"
        " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    )
    with psycopg.connect(database_url, autocommit=True) as connection:

        def count(query: str) -> int:
            row = connection.execute(query.encode()).fetchone()
            assert row is not None
            return int(row[0])

        wait_until(
            lambda: count(listening) == sleepers and count(held) == 1,
            what="the timekeepers sleep",
        )
