"""How far everything is: streams, consumers and leases at one moment, never by reading the log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg

from penstock.core.top import Trouble, trouble_of
from penstock.ops.timer_status import TimerStatus, read_timer_status
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

UNNUMBERED_COUNT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """One stream: what is numbered, what is in the hot log, what still waits."""

    name: str
    origin: str | None
    """The producing database; None before a publisher has met the stream."""
    head: int
    published: int
    unnumbered: int
    unnumbered_is_capped: bool
    """More wait than were counted."""
    oldest_unnumbered_ms: int
    is_source: bool = False
    """Another service's: head and published are what a worker last saw."""


class ConsumerState(StrEnum):
    """What a consumer does, in one word."""

    PAUSED = "paused"
    QUARANTINED = "quarantined"
    RUNNING = "running"
    WAITING = "waiting for a worker"


@dataclass(frozen=True, slots=True)
class ConsumerStatus:
    """One consumer: where it stands and how far behind that is, in events and in time."""

    name: str
    stream_name: str
    start_position: int
    checkpoint: int
    lag_events: int
    lag_ms: int | None
    """The age of the next unhandled event; 0 when caught up, None when the outbox has it not."""
    lanes: int = 1
    lanes_held: int = 0
    workers: int = 0
    """Processes alive that serve it, on all hosts."""
    paused_at: datetime | None = None
    paused_by: str | None = None
    pause_reason: str | None = None
    quarantined_at: datetime | None = None
    quarantine_reason: str | None = None
    parked_keys: int = 0
    """Keys that wait for another attempt at their first event."""
    held_keys: int = 0
    """Those of them that wait for an operator."""
    parked_events: int = 0
    dead_letters: int = 0
    replay_of: str | None = None
    """The consumer whose handler it calls, if it is a replay."""
    end_position: int | None = None
    """The last position that a replay has to settle: its lag is counted up to there."""

    @property
    def state(self) -> ConsumerState:
        """What an operator decided comes first, then what a supervisor did, then the lanes."""
        if self.paused_at is not None:
            return ConsumerState.PAUSED
        if self.quarantined_at is not None:
            return ConsumerState.QUARANTINED
        return ConsumerState.RUNNING if self.lanes_held else ConsumerState.WAITING

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "state": self.state.value}


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease: who may work on what, and for how long."""

    stream_name: str
    role: str
    owner_id: str | None
    term: int
    expires_in_seconds: float | None
    """Negative when it has run out, None when it was given back."""
    checkpoint: int

    @property
    def is_held(self) -> bool:
        """Whether somebody may work under it now."""
        return self.expires_in_seconds is not None and self.expires_in_seconds > 0


@dataclass(frozen=True, slots=True)
class Status:
    """Everything at one moment."""

    streams: tuple[StreamStatus, ...]
    consumers: tuple[ConsumerStatus, ...]
    leases: tuple[LeaseStatus, ...]
    timers: TimerStatus

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {**asdict(self), "consumers": [consumer.as_json() for consumer in self.consumers]}


def read_status(connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> Status:
    """Read everything in one short transaction of its own, on a connection in autocommit."""
    assert connection.autocommit, "read_status begins a transaction of its own"
    queries = Queries("status.sql", schema)
    with connection.transaction():
        for preparation in ("begin", "use_indexes", "limit_time"):
            connection.execute(queries[preparation])
        stream_rows = connection.execute(
            queries["streams"], {"count_max": UNNUMBERED_COUNT_MAX}
        ).fetchall()
        consumer_rows = connection.execute(queries["consumers"]).fetchall()
        lease_rows = connection.execute(queries["leases"]).fetchall()
        timers = read_timer_status(connection, schema)
    streams = {row[0]: _stream(row) for row in stream_rows}
    return Status(
        streams=tuple(streams.values()),
        consumers=tuple(_consumer(row, streams) for row in consumer_rows),
        leases=tuple(LeaseStatus(*row) for row in lease_rows),
        timers=timers,
    )


def _stream(row: tuple[Any, ...]) -> StreamStatus:
    name, is_source, origin, head, published, count, oldest_ms = row
    return StreamStatus(
        name=name,
        origin=origin,
        head=head,
        published=published,
        unnumbered=min(count, UNNUMBERED_COUNT_MAX),
        unnumbered_is_capped=count > UNNUMBERED_COUNT_MAX,
        oldest_unnumbered_ms=oldest_ms,
        is_source=is_source,
    )


def _consumer(row: tuple[Any, ...], streams: dict[str, StreamStatus]) -> ConsumerStatus:
    name, stream_name, start_position, checkpoint, next_age_ms, *people = row
    stream = streams.get(stream_name)
    *_, end_position = people
    last = stream.head if stream else 0
    if end_position is not None:
        last = min(last, end_position)
    lag_events = max(0, last - checkpoint)
    # Where every position is handled, an event that has none yet is late all the same.
    waiting_ms = stream.oldest_unnumbered_ms if stream and end_position is None else 0
    lag_ms = next_age_ms if lag_events else waiting_ms
    return ConsumerStatus(
        name, stream_name, start_position, checkpoint, lag_events, lag_ms, *people
    )


def trouble_with(consumer: ConsumerStatus) -> Trouble:
    """What is the matter with a consumer, by its status."""
    return trouble_of(
        is_quarantined=consumer.quarantined_at is not None,
        is_paused=consumer.paused_at is not None,
        is_served=consumer.lanes_held > 0,
        lag_events=consumer.lag_events,
        lag_ms=consumer.lag_ms or 0,
        held_keys=consumer.held_keys,
        parked_keys=consumer.parked_keys,
        dead_letters=consumer.dead_letters,
    )
