"""The streams of this database: who owns them and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.leases import Lease
from penstock.errors import LeaseLost, TimelineChanged, UsageError
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
# How many positions beyond all that are known to be in use may be in use as well: what was given
# out and lost, before anybody could see it. A publisher numbers less in the time that it takes.
HOLE_MARGIN = 100_000
LEASE_LOST_STATE = "PS003"
TIMELINE_CHANGED_STATE = "PS005"


@contextmanager
def refusals() -> Iterator[None]:
    """What the publisher's functions refuse, as errors of ours."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate == LEASE_LOST_STATE:
            raise LeaseLost(
                f"{error.diag.message_primary}. Nothing was lost or repeated; this worker "
                "lets go of the stream."
            ) from error
        if error.sqlstate == TIMELINE_CHANGED_STATE:
            raise TimelineChanged(str(error.diag.message_primary)) from error
        raise


@dataclass(frozen=True, slots=True)
class StreamState:
    """One stream in the books."""

    name: str
    origin: str
    head: int
    """The last position given out."""
    published: int
    """The last position confirmed in the hot log."""


class Streams:
    """The table `stream`; callers bring connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("stream.sql", schema)

    def register(self, connection: Connection, stream_name: str) -> None:
        """Enter a stream into the books, unless it is there."""
        connection.execute(self._sql["register"], {"stream_name": stream_name})

    def read(self, connection: Connection, stream_name: str) -> StreamState:
        """The stream as it is now. Raises UsageError where it was never registered."""
        row = connection.execute(self._sql["read"], {"stream_name": stream_name}).fetchone()
        if row is None:
            raise UsageError(
                f"There is no stream {stream_name!r} in this database. Streams appear when a "
                "consumer or a sender names them."
            )
        return StreamState(*row)

    def names(self, connection: Connection) -> list[str]:
        """Every stream of this database."""
        return [name for (name,) in connection.execute(self._sql["names"]).fetchall()]

    def unleased(self, connection: Connection, worker_id: str) -> list[str]:
        """The streams that no other publisher holds just now."""
        rows = connection.execute(self._sql["unleased"], {"worker_id": worker_id}).fetchall()
        return [name for (name,) in rows]

    def confirm(self, connection: Connection, stream_name: str, position: int) -> None:
        """Record how far the hot log reaches. May be lost in a crash, harmlessly."""
        connection.execute(self._sql["confirm"], {"stream_name": stream_name, "position": position})

    def incarnation(self, connection: Connection) -> str:
        """Which database this is, in a word that no copy of it shares."""
        row = connection.execute(self._sql["incarnation"]).fetchone()
        assert row is not None
        return str(row[0])

    def step_over(
        self, connection: Connection, lease: Lease, *, reached: int, reason: str
    ) -> tuple[int, int]:
        """Move the head past all positions that may be in use. Returns the hole, first and last.

        Raises LeaseLost, having done nothing.
        """
        with refusals():
            row = connection.execute(
                self._sql["step_over"],
                {
                    "stream_name": lease.stream_name,
                    "owner_id": lease.owner_id,
                    "term": lease.term,
                    "reached": reached,
                    "margin": HOLE_MARGIN,
                    "reason": reason,
                },
            ).fetchone()
        assert row is not None
        first, last = row
        return int(first), int(last)

    def is_in_hole(self, connection: Connection, stream_name: str, position: int) -> bool:
        """Whether no event can stand at a position, nor the sign of a hole."""
        row = connection.execute(
            self._sql["is_in_hole"], {"stream_name": stream_name, "position": position}
        ).fetchone()
        return row == (True,)

    def refill_base(self, connection: Connection, stream_name: str, length_max: int) -> int:
        """The position after which an empty hot log of this stream starts."""
        row = connection.execute(
            self._sql["refill_base"], {"stream_name": stream_name, "length_max": length_max}
        ).fetchone()
        assert row is not None, f"{stream_name} is leased, so it is registered"
        base: int = row[0]
        return base
