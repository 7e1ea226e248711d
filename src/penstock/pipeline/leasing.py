"""What stages need of leases, whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg

from penstock.core.leases import Lease

Connection = psycopg.Connection[Any]


class Leases(Protocol):
    """Takes leases and keeps them alive."""

    @property
    def worker_id(self) -> str:
        """The name of this process in the books."""

    def acquire(
        self,
        connection: Connection,
        stream_name: str,
        role: str,
        former_groups: Sequence[str] = (),
    ) -> Lease | None:
        """Take a lease if it is free, and end what former holders left open."""

    def guard(self, lease: Lease, end: Callable[[], None]) -> None:
        """Have `end` called shortly before the lease runs out, if it cannot be renewed."""

    def note(self, lease: Lease) -> None:
        """Remember a checkpoint that was committed."""

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

    def join(self, connection: Connection, consumer: str) -> None:
        """Take a share of a consumer's lanes from now on."""

    def leave(self, connection: Connection, consumer: str) -> None:
        """Leave a consumer's lanes to the other workers."""
