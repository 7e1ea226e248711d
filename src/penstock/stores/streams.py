"""The streams of this database: who owns them and how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.errors import UsageError
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


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

    def refill_base(self, connection: Connection, stream_name: str, length_max: int) -> int:
        """The position after which an empty hot log of this stream starts."""
        row = connection.execute(
            self._sql["refill_base"], {"stream_name": stream_name, "length_max": length_max}
        ).fetchone()
        assert row is not None, f"{stream_name} is leased, so it is registered"
        base: int = row[0]
        return base
