"""The outbox: events wait here for their positions, and stay as the warm tier of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from penstock.core.leases import Lease
from penstock.stores.direct import Direct, Row, Value
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.streams import refusals

Connection = psycopg.Connection[Any]


class Outbox:
    """The table `outbox_event` as publisher and readers see it; callers bring connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("outbox.sql", schema)

    def number(
        self,
        connection: Connection,
        lease: Lease,
        batch_size: int,
        *,
        sweep: bool = False,
        direct: Direct | None = None,
        meanwhile: Callable[[list[Row]], None] | None = None,
    ) -> list[tuple[int, str]]:
        """Give the next events their positions, durably. Returns positions and bodies, in order.

        With `sweep` it looks below the id floor too. With `direct` that is used, which is quicker,
        and `meanwhile` is called with the rows, in any order, while the server makes them durable.
        Raises LeaseLost or TimelineChanged, having done nothing.
        """
        parameters: dict[str, Value] = {
            "stream_name": lease.stream_name,
            "owner_id": lease.owner_id,
            "term": lease.term,
            "batch_size": batch_size,
            "sweep": sweep,
        }
        try:
            with refusals():
                if direct is None:
                    rows = connection.execute(self._sql["number"], parameters).fetchall()
                else:
                    rows = direct.ask(self._sql["number"], parameters, meanwhile)
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            # Nobody's fault and nothing done; the rows are still there in the next round.
            return []
        return sorted(rows)

    def announce(self, connection: Connection) -> None:
        """Tell readers without a hot log that there is something new."""
        connection.execute(self._sql["announce"])

    def read(
        self, connection: Connection, stream_name: str, after: int, count: int
    ) -> list[tuple[int, str]]:
        """Positions and bodies behind `after`, in order: numbered events, and holes."""
        return connection.execute(
            self._sql["read"], {"stream_name": stream_name, "after": after, "count": count}
        ).fetchall()

    def unnumbered_streams(self, connection: Connection) -> list[str]:
        """Every stream with events to number, known or not, whatever the floor says."""
        rows = connection.execute(self._sql["unnumbered_streams"]).fetchall()
        return [stream_name for (stream_name,) in rows]

    def has_unnumbered(self, connection: Connection, stream_names: Sequence[str]) -> set[str]:
        """Which of these streams have events to number above their floor. Takes no lock."""
        if not stream_names:
            return set()
        rows = connection.execute(
            self._sql["has_unnumbered"], {"stream_names": list(stream_names)}
        ).fetchall()
        return {stream_name for (stream_name,) in rows}
