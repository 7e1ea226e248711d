"""The state of a pipeline as readings: what PostgreSQL and Redis say, asked on kept connections."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import redis

from penstock.core.settings import Settings
from penstock.errors import PenstockError
from penstock.ops.status import ConsumerStatus, Status, StreamStatus, read_status
from penstock.stores.hot_log_sizes import HotLogSizes
from penstock.stores.postgres import connect, is_lost
from penstock.stores.queries import Queries
from penstock.telemetry import metrics, signals
from penstock.telemetry.bus import emit
from penstock.telemetry.metrics import Reading

FAR_BEHIND_EVENTS: Final = 100_000
"""From there on a consumer's lag is a warning in the log; said again once it was half of that."""

_logger = logging.getLogger("penstock")
_Answer = tuple[Status, dict[str, int], list[tuple[Any, ...]]]


class MetricsState:
    """Reads all state gauges. For one thread at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: psycopg.Connection[Any] | None = None
        self._hot_logs: HotLogSizes | None = None
        if settings.redis_url is not None:
            self._hot_logs = HotLogSizes(settings.redis_url, settings.redis_prefix)
        self._far_behind: set[str] = set()

    def read(self) -> list[Reading]:
        """Everything that can be known now; of a server that is away, nothing."""
        try:
            status, unpublished, archives = self._asked()
        except (psycopg.Error, PenstockError) as error:
            _logger.debug("no state to tell: %s", error)
            self._close_connection()
            return []
        self._warn(status)
        return [
            *_of_consumers(status),
            *_of_streams(status, unpublished),
            *self._of_hot_logs(status),
            *_of_archives(archives),
            Reading(metrics.TIMERS_PENDING, (), status.timers.pending),
            Reading(metrics.TIMERS_LATE, (), max(0, -(status.timers.next_due_ms or 0))),
            Reading(metrics.TIMERS_HELD, (), status.timers.held),
        ]

    def close(self) -> None:
        """Let go of all connections."""
        self._close_connection()
        if self._hot_logs is not None:
            self._hot_logs.close()

    def _asked(self) -> _Answer:
        was_kept = self._connection is not None
        try:
            return self._ask()
        except psycopg.Error as error:
            # One that lay idle may have been cut by anybody; that says nothing of the server.
            if not (was_kept and is_lost(error)):
                raise
        self._close_connection()
        return self._ask()

    def _ask(self) -> _Answer:
        schema = self._settings.schema
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._settings.database_url, "penstock metrics")
        status = read_status(self._connection, schema)
        queries, preparations = Queries("metrics.sql", schema), Queries("status.sql", schema)
        with self._connection.transaction():
            for name in ("begin", "use_indexes", "limit_time"):
                self._connection.execute(preparations[name])
            unpublished = dict(self._connection.execute(queries["unpublished"]).fetchall())
            archives = self._connection.execute(queries["archives"]).fetchall()
        return status, unpublished, archives

    def _of_hot_logs(self, status: Status) -> Iterator[Reading]:
        names = [stream.name for stream in status.streams if not stream.is_source]
        if self._hot_logs is None or not names:
            return
        try:
            sizes = self._hot_logs.read(names)
        except (redis.RedisError, OSError) as error:
            _logger.debug("no sizes of hot logs to tell: %s", error)
            self._hot_logs.close()
            return
        for size in sizes:
            if size.length is not None:
                yield Reading(metrics.HOT_LOG_LENGTH, (size.stream_name,), size.length)
            if size.size_bytes is not None:
                yield Reading(metrics.HOT_LOG_BYTES, (size.stream_name,), size.size_bytes)

    def _warn(self, status: Status) -> None:
        """Tell of a consumer that is far behind, once until it has caught up by half."""
        for consumer in status.consumers:
            if consumer.lag_events >= FAR_BEHIND_EVENTS and consumer.name not in self._far_behind:
                self._far_behind.add(consumer.name)
                emit(
                    signals.ConsumerFarBehind(
                        consumer.name, consumer.stream_name, consumer.lag_events
                    )
                )
            elif consumer.lag_events < FAR_BEHIND_EVENTS // 2:
                self._far_behind.discard(consumer.name)

    def _close_connection(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _of_consumers(status: Status) -> Iterator[Reading]:
    for consumer in status.consumers:
        # A replay is behind because somebody wants it to be, and each has another name.
        if consumer.replay_of is None:
            labels = (consumer.name, consumer.stream_name)
            for instrument, value in _consumer_values(consumer):
                if value is not None:
                    yield Reading(instrument, labels, value)


def _consumer_values(
    consumer: ConsumerStatus,
) -> tuple[tuple[metrics.Instrument, int | None], ...]:
    return (
        (metrics.LAG_MS, consumer.lag_ms),
        (metrics.LAG_EVENTS, consumer.lag_events),
        (metrics.PARKED_KEYS, consumer.parked_keys),
        (metrics.HELD_KEYS, consumer.held_keys),
        (metrics.PARKED_EVENTS, consumer.parked_events),
        (metrics.DEAD_LETTERS, consumer.dead_letters),
        (metrics.IS_PAUSED, int(consumer.paused_at is not None)),
        (metrics.IS_QUARANTINED, int(consumer.quarantined_at is not None)),
    )


def _of_streams(status: Status, unpublished: dict[str, int]) -> Iterator[Reading]:
    for stream in status.streams:
        labels = (stream.name,)
        yield Reading(metrics.STREAM_HEAD, labels, stream.head)
        yield Reading(metrics.STREAM_PUBLISHED, labels, stream.published)
        # Nobody here publishes what another service sends.
        if not stream.is_source:
            yield Reading(metrics.OUTBOX_BACKLOG, labels, _backlog(stream))
            age_ms = max(stream.oldest_unnumbered_ms, unpublished.get(stream.name, 0))
            yield Reading(metrics.OUTBOX_AGE, labels, age_ms)


def _backlog(stream: StreamStatus) -> int:
    return stream.unnumbered + max(0, stream.head - stream.published)


def _of_archives(rows: list[tuple[Any, ...]]) -> Iterator[Reading]:
    for stream_name, lag_events, lag_ms in rows:
        yield Reading(metrics.ARCHIVE_LAG_EVENTS, (stream_name,), lag_events)
        yield Reading(metrics.ARCHIVE_LAG_MS, (stream_name,), lag_ms)
