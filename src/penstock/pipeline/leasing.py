"""What stages need of leases, whoever keeps them."""

from __future__ import annotations

from typing import Any, Protocol

import psycopg

from penstock.core.leases import Lease

Connection = psycopg.Connection[Any]


class Leases(Protocol):
    """Takes leases and keeps them alive."""

    def acquire(self, connection: Connection, stream_name: str, role: str) -> Lease | None:
        """Take a lease if it is free."""

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease is known to run on."""

    def read(self, connection: Connection, lease: Lease) -> Lease | None:
        """The lease as the database has it; None where it is lost."""

    def forget(self, lease: Lease, reason: str) -> None:
        """Stop renewing a lease that is lost."""

    def abandon(self, lease: Lease, reason: str) -> None:
        """Stop renewing a lease that could not be given back; this process may take it again."""

    def release(self, connection: Connection, lease: Lease) -> None:
        """Give a lease back."""
