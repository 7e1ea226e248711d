"""Removes rows that nobody needs any more: short transactions that wait for nobody."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args

import psycopg

from penstock.core.settings import DAY_SECONDS
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
LOCK_TIMEOUT = "200ms"
"""How long a batch waits for a row that somebody has locked."""
AgedTable = Literal["inbox_event", "trail"]
"""Tables whose rows nothing but time makes needless."""
AGED_TABLES: tuple[AgedTable, ...] = get_args(AgedTable)
BEGINNING = "-infinity"
"""Before every row, as PostgreSQL writes it."""


@dataclass(frozen=True, slots=True)
class SettledPruned:
    """What one batch of settled rows came to."""

    deleted: int
    effects: int
    """The records of context.once that went with them."""
    looked_at: int
    last: datetime | None
    """The age of the last row looked at; the next batch starts behind it."""


@dataclass(frozen=True, slots=True)
class EffectsPruned:
    """What one batch of records of context.once came to."""

    deleted: int
    looked_at: int
    last: datetime | None
    """The age of the last row looked at; the next batch starts behind it."""


@dataclass(frozen=True, slots=True)
class OutboxPruned:
    """What one batch of a stream's outbox came to."""

    deleted: int
    last: int | None
    """The last position deleted; the next batch starts behind it."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A reader that keeps a stream's outbox from being pruned."""

    stream_name: str
    by: str
    position: int
    oldest_seconds: float


class Cleanup:
    """The tables that grow with every event, as the janitor sees them.

    Callers bring connections in autocommit. Every batch is a transaction of its own.
    """

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("cleanup.sql", schema)

    def prune_settled(
        self,
        connection: Connection,
        *,
        since: datetime | None,
        retention_days: float,
        batch_size: int,
    ) -> SettledPruned:
        """Look at the next settled rows behind `since` and delete those that may go."""
        limits = _limits(retention_days, batch_size)
        [row] = self._batch(connection, {"since": since or BEGINNING, **limits}, "prune_settled")
        return SettledPruned(*row)

    def prune_effects(
        self,
        connection: Connection,
        *,
        since: datetime | None,
        retention_days: float,
        batch_size: int,
    ) -> EffectsPruned:
        """Look at the next records behind `since` and delete those that nobody will ask for."""
        limits = _limits(retention_days, batch_size)
        [row] = self._batch(connection, {"since": since or BEGINNING, **limits}, "prune_effects")
        return EffectsPruned(*row)

    def prune_aged(
        self, connection: Connection, table: AgedTable, *, retention_days: float, batch_size: int
    ) -> int:
        """Delete the oldest rows of a table. Returns how many went."""
        limits = _limits(retention_days, batch_size)
        [row] = self._batch(connection, limits, f"prune_{table}")
        return int(row[0])

    def prune_operations(
        self, connection: Connection, *, retention_days: float, batch_size: int
    ) -> tuple[int, int]:
        """Delete the events of old operations, then those that have none left; how many of each."""
        limits = _limits(retention_days, batch_size)
        events, operations = self._batch(
            connection, limits, "prune_operation_events", "prune_operations"
        )
        return int(events[0]), int(operations[0])

    def streams(self, connection: Connection) -> list[str]:
        """The streams that may have something to prune."""
        return [name for (name,) in connection.execute(self._sql["streams"]).fetchall()]

    def prune_outbox(
        self,
        connection: Connection,
        stream_name: str,
        *,
        after: int,
        retention_days: float,
        batch_size: int,
    ) -> OutboxPruned:
        """Delete the first rows of a stream behind `after` that every reader has passed."""
        with connection.transaction():
            self._prepare(connection)
            held = connection.execute(
                self._sql["try_hold_readers"], {"stream_name": stream_name}
            ).fetchone()
            if held is None or not held[0]:
                # Somebody is just registering; the rows are still there in the next round.
                return OutboxPruned(0, None)
            row = connection.execute(
                self._sql["prune_outbox"],
                {
                    "stream_name": stream_name,
                    "after": after,
                    **_limits(retention_days, batch_size),
                },
            ).fetchone()
        assert row is not None
        return OutboxPruned(*row)

    def held(self, connection: Connection, *, retention_days: float) -> list[Hold]:
        """The streams that a reader has held back for a whole retention beyond the first."""
        with connection.transaction():
            self._prepare(connection)
            rows = connection.execute(
                self._sql["held"], {"retention_seconds": retention_days * DAY_SECONDS}
            ).fetchall()
        return [
            Hold(stream_name, name if kind == name else f"{kind} {name}", position, oldest_seconds)
            for stream_name, kind, name, position, oldest_seconds in rows
        ]

    def _batch(
        self, connection: Connection, parameters: dict[str, Any], *names: str
    ) -> list[tuple[Any, ...]]:
        """Statements of one short transaction, and the row of each."""
        rows = []
        with connection.transaction():
            self._prepare(connection)
            for name in names:
                row = connection.execute(self._sql[name], parameters).fetchone()
                assert row is not None
                rows.append(row)
        return rows

    def _prepare(self, connection: Connection) -> None:
        """Make this transaction one that nobody has to wait for."""
        connection.execute(self._sql["prepare"], {"lock_timeout": LOCK_TIMEOUT})


def _limits(retention_days: float, batch_size: int) -> dict[str, Any]:
    return {"retention_seconds": retention_days * DAY_SECONDS, "batch_size": batch_size}
