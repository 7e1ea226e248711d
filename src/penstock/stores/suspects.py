"""Attempts that may end their process, in PostgreSQL: started and finished."""

from __future__ import annotations

import socket
from typing import Any

import psycopg

from penstock.core.wire import Entry
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.worker_connection import WorkerConnection

Connection = psycopg.Connection[Any]


class Suspects:
    """The table `suspect`; callers bring their connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("suspect.sql", schema)

    def unfinished(self, connection: Connection, consumer: str) -> frozenset[int]:
        """The positions of events whose attempts may have ended their processes."""
        rows = connection.execute(self._sql["unfinished"], {"consumer": consumer}).fetchall()
        return frozenset(position for (position,) in rows)

    def start(
        self, connection: Connection, consumer: str, entry: Entry, worker_id: str
    ) -> list[dict[str, Any]]:
        """Record that an attempt begins. Returns the earlier ones that never finished."""
        row = connection.execute(
            self._sql["start"],
            {
                "consumer": consumer,
                "position": entry.position,
                "event_uuid": entry.event_uuid,
                "worker_id": worker_id,
                "host": socket.gethostname(),
            },
        ).fetchone()
        assert row is not None
        starts: list[dict[str, Any]] = row[0]
        return starts[:-1]

    def finish(self, connection: Connection, consumer: str, position: int) -> None:
        """The attempt ended and left its process alive."""
        connection.execute(self._sql["finish"], {"consumer": consumer, "position": position})

    def finish_within(self, worker: WorkerConnection, consumer: str, position: int) -> None:
        """The same as part of a batch, so that both are true at once."""
        worker.execute(self._sql["finish"], {"consumer": consumer, "position": position})
