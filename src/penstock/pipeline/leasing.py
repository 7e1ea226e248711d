"""What stages need of leases, whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psycopg

from penstock.core.leases import Lease
from penstock.errors import LeaseLost
from penstock.stores.hot_log import HotLogTermOver

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

    def release(self, connection: Connection, lease: Lease, *, term_seen: int = 0) -> None:
        """Give a lease back; whoever takes it next gets a term past the one that was seen."""

    def join(self, connection: Connection, consumer: str) -> None:
        """Take a share of a consumer's lanes from now on."""

    def leave(self, connection: Connection, consumer: str) -> None:
        """Leave a consumer's lanes to the other workers."""


def let_go_of_lost(leases: Leases, connection: Connection, lease: Lease, error: LeaseLost) -> None:
    """Forget a lease that another has; give back one that is ours and of no use on the hot log."""
    if leases.read(connection, lease) is None:
        return
    term_seen = error.term if isinstance(error, HotLogTermOver) else 0
    if term_seen:
        # PostgreSQL has lost commits, or somebody else wrote there. Whoever had that term has no
        # lease any more; the next one is past it at once, and so keeps him from the log.
        leases.forget(
            lease, f"the hot log was opened for term {term_seen}, which PostgreSQL does not know"
        )
    leases.release(connection, lease, term_seen=term_seen)
