"""Where a new consumer starts: at what it asks for, or at the first event that is retained."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Protocol

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.stores.cold_tier import ColdTier
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.source_tier import SourceTier
from penstock.stores.sources import Bounds, ConsumerProgress, Sources
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

Connection = psycopg.Connection[Any]


class Extent(Protocol):
    """How far a stream can be read. Every method may raise ServerUnavailable."""

    def bounds(self) -> Bounds:
        """The first position that can be read, and the last one given out."""

    def position_at(self, moment: datetime) -> int | None:
        """The first event sent at or after a moment; None where there is none yet."""


class OutboxExtent:
    """A stream of this database, as its outbox holds it; asked on the caller's connection."""

    def __init__(self, connection: Connection, stream_name: str, schema: str) -> None:
        self._connection = connection
        self._stream = {"stream_name": stream_name}
        self._sql = Queries("start.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)

    def bounds(self) -> Bounds:
        """What the outbox holds."""
        found = self._connection.execute(self._sql["first_retained"], self._stream).fetchone()
        return Bounds(1, 0) if found is None else Bounds(*found)

    def position_at(self, moment: datetime) -> int | None:
        """By the time at which it was sent."""
        query = self._outbox_sql["position_at_time"]
        row = self._connection.execute(query, {**self._stream, "moment": moment}).fetchone()
        return None if row is None or row[0] is None else int(row[0])


class ArchivedExtent:
    """A stream with its archive, where that reaches up to what is kept elsewhere."""

    def __init__(self, kept: Extent, cold_tier: ColdTier) -> None:
        self._kept = kept
        self._cold_tier = cold_tier

    def bounds(self) -> Bounds:
        """The archive's first position, if everything from there on can be read."""
        kept, archived = self._kept.bounds(), self._cold_tier.bounds()
        if archived is None or archived[1] + 1 < kept.first:
            return kept
        return Bounds(min(archived[0], kept.first), max(archived[1], kept.head))

    def position_at(self, moment: datetime) -> int | None:
        """From the archive, unless it is certain that the moment came later."""
        first, found = self._kept.bounds().first, self._kept.position_at(moment)
        if (found is not None and found > first) or self.bounds().first == first:
            return found
        return self._cold_tier.position_at(moment) or found


def with_archive(kept: Extent, cold_tier: ColdTier | None) -> Extent:
    """How far a stream can be read with its archive, if it has one."""
    return kept if cold_tier is None else ArchivedExtent(kept, cold_tier)


class StartChooser(Protocol):
    """Chooses start positions, in the transaction that enters the consumer into the books."""

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Nothing is pruned until the consumer is in the books."""


class Starts:
    """Starts in streams of this database."""

    def __init__(self, schema: str = DEFAULT_SCHEMA, cold_tier: ColdTier | None = None) -> None:
        self._schema = schema
        self._cold_tier = cold_tier
        self._cleanup_sql = Queries("cleanup.sql", schema)

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Nothing is pruned until the caller's transaction ends."""
        stream_name = options.stream_name
        connection.execute(self._cleanup_sql["hold_pruning"], {"stream_name": stream_name})
        kept = OutboxExtent(connection, stream_name, self._schema)
        return _chosen(consumer, options, with_archive(kept, self._cold_tier))


class SourceStarts:
    """Starts in a stream of another service."""

    def __init__(self, schema: str, tier: SourceTier, cold_tier: ColdTier | None = None) -> None:
        self._sources = Sources(schema)
        self._tier = tier
        self._cold_tier = cold_tier

    def choose(self, connection: Connection, consumer: str, options: ConsumerOptions) -> int:
        """The first position to settle. Raises ServerUnavailable where nobody can be asked."""
        # First of all the producer learns that somebody needs everything that it still has.
        generation = self._sources.generation(connection)
        self._tier.record(consumer, ConsumerProgress(0, generation), is_new=True)
        return _chosen(consumer, options, with_archive(self._tier, self._cold_tier))


def _chosen(consumer: str, options: ConsumerOptions, extent: Extent) -> int:
    start, (first, head) = options.start, extent.bounds()
    if start == "latest":
        return head + 1
    if isinstance(start, datetime):
        position = extent.position_at(start) or head + 1
        # Whether what was pruned is older than the moment cannot be told any more.
        is_late = position == first > 1
    else:
        asked = start if isinstance(start, int) else 1
        position = max(asked, first)
        is_late = position > asked
    if is_late:
        emit(signals.ConsumerStartedLate(consumer, options.stream_name, str(start), position))
    return position
