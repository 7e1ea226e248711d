"""Attempts that may end their process, in PostgreSQL: started, finished, or buried."""

from __future__ import annotations

import json
import socket
from typing import Any

import psycopg

from penstock.core.lanes import key_hash
from penstock.core.wire import Entry, body_of
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.worker_connection import WorkerConnection

Connection = psycopg.Connection[Any]
REASON = "crash"
ERROR_TYPE = "ProcessDied"


class Suspects:
    """The table `suspect`; callers bring their connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("suspect.sql", schema)

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

    def bury(
        self,
        worker: WorkerConnection,
        consumer: str,
        entry: Entry,
        handler: str,
        starts: list[dict[str, Any]],
    ) -> None:
        """Write the dead letter of an event whose attempts ended their processes."""
        worker.execute(
            self._sql["bury"],
            {
                "consumer": consumer,
                "stream_name": entry.stream_name,
                "position": entry.position,
                "event_uuid": entry.event_uuid,
                "event_type": entry.event_type,
                "version": entry.version,
                "key_hash": key_hash(entry.key, entry.event_uuid),
                "entry": body_of(entry).decode(),
                "reason": REASON,
                "error_type": ERROR_TYPE,
                "error_message": f"{len(starts)} attempts ended their worker process",
                "handler": handler,
                "attempts": json.dumps(starts),
                "host": socket.gethostname(),
            },
        )
