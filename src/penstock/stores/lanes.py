"""Lanes and the workers that share them, in PostgreSQL."""

from __future__ import annotations

import os
import socket
from typing import Any

import psycopg

from penstock.core.lanes import LaneView
from penstock.core.leases import Lease
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


class Lanes:
    """The table `worker`, and a consumer's lanes; callers bring their connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("lane.sql", schema)

    def watch(self, connection: Connection, consumer: str, worker_id: str) -> LaneView | None:
        """Who holds what just now; None where the consumer is not in the books any more."""
        row = connection.execute(
            self._sql["watch"], {"consumer": consumer, "worker_id": worker_id}
        ).fetchone()
        if row is None:
            return None
        lanes, epoch, is_paused, workers, holders, next_end_seconds = row
        return LaneView(
            lanes, epoch, is_paused, frozenset(workers), tuple(holders), next_end_seconds
        )

    def join(
        self, connection: Connection, consumer: str, worker_id: str, lease_seconds: float
    ) -> None:
        """Take part in the sharing, for as long as a lease lasts."""
        connection.execute(
            self._sql["join"],
            {
                "consumer": consumer,
                "worker_id": worker_id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "lease_seconds": lease_seconds,
            },
        )
        connection.execute(self._sql["forget_expired"], {"consumer": consumer})

    def stay(self, connection: Connection, worker_id: str, lease_seconds: float) -> None:
        """Go on taking part, for every consumer of a worker."""
        connection.execute(
            self._sql["stay"], {"worker_id": worker_id, "lease_seconds": lease_seconds}
        )

    def leave(self, connection: Connection, consumer: str, worker_id: str) -> None:
        """Take part no longer."""
        connection.execute(self._sql["leave"], {"consumer": consumer, "worker_id": worker_id})

    def advance(self, connection: Connection, lease: Lease, checkpoint: int) -> bool:
        """Move a lane's checkpoint over events of other lanes; False: the lease is lost."""
        moved = connection.execute(
            self._sql["advance"],
            {
                "stream_name": lease.stream_name,
                "role": lease.role,
                "owner_id": lease.owner_id,
                "term": lease.term,
                "old_checkpoint": lease.checkpoint,
                "new_checkpoint": checkpoint,
            },
        )
        return moved.rowcount == 1
