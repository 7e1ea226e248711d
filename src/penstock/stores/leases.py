"""Leases in PostgreSQL: taken, renewed and given back by its clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from penstock.core.leases import Lease
from penstock.errors import ServerUnsuitable
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


class LeaseTable:
    """The table `stream_lease`; callers bring their connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("lease.sql", schema)

    def ensure(
        self,
        connection: Connection,
        stream_name: str,
        role: str,
        *,
        checkpoint: int = 0,
        epoch: int = 1,
        lane: int = 0,
    ) -> None:
        """Make sure that the lease can be taken."""
        connection.execute(
            self._sql["ensure"],
            {
                "stream_name": stream_name,
                "role": role,
                "checkpoint": checkpoint,
                "epoch": epoch,
                "lane": lane,
            },
        )

    def acquire(
        self,
        connection: Connection,
        stream_name: str,
        role: str,
        *,
        owner_id: str,
        worker_id: str,
        lease_seconds: float,
        abandoned_owner_ids: Sequence[str] = (),
    ) -> Lease | None:
        """Take the lease if nobody holds it, or if its holder is this process's own past."""
        row = connection.execute(
            self._sql["acquire"],
            {
                "stream_name": stream_name,
                "role": role,
                "owner_id": owner_id,
                "worker_id": worker_id,
                "lease_seconds": lease_seconds,
                "abandoned_owner_ids": list(abandoned_owner_ids),
            },
        ).fetchone()
        if row is None:
            return None
        term, checkpoint, was_clean = row
        return Lease(stream_name, role, owner_id, term, checkpoint, was_clean)

    def renew(
        self, connection: Connection, leases: Sequence[Lease], lease_seconds: float
    ) -> dict[tuple[str, str], int]:
        """Extend leases; returns the checkpoints of those that are still ours by (stream, role)."""
        rows = connection.execute(
            self._sql["renew"],
            {
                "lease_seconds": lease_seconds,
                "stream_names": [lease.stream_name for lease in leases],
                "roles": [lease.role for lease in leases],
                "owner_ids": [lease.owner_id for lease in leases],
                "terms": [lease.term for lease in leases],
            },
        ).fetchall()
        return {(stream_name, role): checkpoint for stream_name, role, checkpoint in rows}

    def release(self, connection: Connection, lease: Lease, *, term_seen: int = 0) -> None:
        """Give the lease back at once, if it is still ours; the next is past the term seen."""
        connection.execute(
            self._sql["release"],
            {
                "stream_name": lease.stream_name,
                "role": lease.role,
                "owner_id": lease.owner_id,
                "term": lease.term,
                "term_seen": term_seen,
            },
        )

    def release_worker(self, connection: Connection, worker_id: str) -> list[tuple[str, str]]:
        """Give back everything that a dead process held."""
        return connection.execute(self._sql["release_worker"], {"worker_id": worker_id}).fetchall()

    def read(self, connection: Connection, lease: Lease) -> Lease | None:
        """The lease as the database has it; None where it is not ours any more."""
        row = connection.execute(
            self._sql["read"], {"stream_name": lease.stream_name, "role": lease.role}
        ).fetchone()
        if row is None or (row[0], row[1]) != (lease.owner_id, lease.term):
            return None
        return lease.at(row[2])

    def end_predecessor(
        self, connection: Connection, lease: Lease, former_groups: Sequence[str] = ()
    ) -> int:
        """End open transactions of former holders; returns how many there were."""
        try:
            rows = connection.execute(
                self._sql["end_predecessor"],
                {
                    "stream_name": lease.stream_name,
                    "role": lease.role,
                    "former_groups": list(former_groups),
                },
            ).fetchall()
        except psycopg.errors.InsufficientPrivilege as error:
            raise ServerUnsuitable(
                f"A former holder of {lease.role} on {lease.stream_name} still has a transaction "
                "open, and this role may not end it. Nothing was lost; grant pg_signal_backend, "
                "or run all workers under one database role."
            ) from error
        return len(rows)
