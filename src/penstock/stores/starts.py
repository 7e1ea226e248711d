"""Where a new consumer starts: at what it asks for, or at the first event that is retained."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

Connection = psycopg.Connection[Any]


class Starts:
    """Chooses start positions, in the transaction that enters the consumer into the books."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("start.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)
        self._cleanup_sql = Queries("cleanup.sql", schema)

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Nothing is pruned until the caller's transaction ends."""
        stream = {"stream_name": options.stream_name}
        connection.execute(self._cleanup_sql["hold_pruning"], stream)
        found = connection.execute(self._sql["first_retained"], stream).fetchone()
        first, head = found if found is not None else (1, 0)
        start = options.start
        if start == "latest":
            return int(head) + 1
        if isinstance(start, datetime):
            moment = {**stream, "moment": start}
            row = connection.execute(self._outbox_sql["position_at_time"], moment).fetchone()
            position = int(row[0]) if row is not None and row[0] is not None else int(head) + 1
            # Whether what was pruned is older than the moment cannot be told any more.
            is_late = position == first > 1
        else:
            asked = start if isinstance(start, int) else 1
            position = max(asked, int(first))
            is_late = position > asked
        if is_late:
            emit(
                signals.ConsumerStartedLate(
                    consumer, options.stream_name, str(start), int(position)
                )
            )
        return int(position)
