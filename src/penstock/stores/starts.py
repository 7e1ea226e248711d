"""Where a new consumer starts: at what it asks for, or at the first event that is retained."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.source_tier import SourceTier
from penstock.stores.sources import Bounds, ConsumerProgress, Sources
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

Connection = psycopg.Connection[Any]


class StartChooser(Protocol):
    """Chooses start positions, in the transaction that enters the consumer into the books."""

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Nothing is pruned until the consumer is in the books."""


class Starts:
    """Starts in streams of this database."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("start.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)
        self._cleanup_sql = Queries("cleanup.sql", schema)

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Nothing is pruned until the caller's transaction ends."""
        stream = {"stream_name": options.stream_name}
        connection.execute(self._cleanup_sql["hold_pruning"], stream)
        found = connection.execute(self._sql["first_retained"], stream).fetchone()

        def position_at(moment: datetime) -> int | None:
            parameters = {**stream, "moment": moment}
            row = connection.execute(self._outbox_sql["position_at_time"], parameters).fetchone()
            return None if row is None or row[0] is None else int(row[0])

        bounds = Bounds(*found) if found is not None else Bounds(1, 0)
        return _chosen(consumer, options, bounds, position_at)


class SourceStarts:
    """Starts in a stream of another service."""

    def __init__(self, schema: str, tier: SourceTier) -> None:
        self._sources = Sources(schema)
        self._tier = tier

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Raises ServerUnavailable where nobody can be asked."""
        # First of all the producer learns that somebody needs everything that it still has.
        generation = self._sources.generation(connection)
        self._tier.record(consumer, ConsumerProgress(0, generation))
        return _chosen(consumer, options, self._tier.bounds(), self._tier.position_at)


def _chosen(
    consumer: str,
    options: ConsumerOptions,
    bounds: Bounds,
    position_at: Callable[[datetime], int | None],
) -> int:
    start, (first, head) = options.start, bounds
    if start == "latest":
        return head + 1
    if isinstance(start, datetime):
        position = position_at(start) or head + 1
        # Whether what was pruned is older than the moment cannot be told any more.
        is_late = position == first > 1
    else:
        asked = start if isinstance(start, int) else 1
        position = max(asked, first)
        is_late = position > asked
    if is_late:
        emit(signals.ConsumerStartedLate(consumer, options.stream_name, str(start), position))
    return position
