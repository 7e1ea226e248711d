"""Reads a stream without a gap: from the hot log, and what that lacks from the outbox."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import psycopg

from penstock.core.wire import Entry, decode_body, decode_entry
from penstock.errors import (
    MalformedEntry,
    PositionMissing,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.stores.hot_log import HotLog
from penstock.stores.outage import Outage
from penstock.stores.outbox import Outbox
from penstock.stores.streams import Streams
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

HEAD_CHECK_SECONDS = 1.0


class TierReader:
    """Entries after a position, contiguous, from whichever tier has them."""

    def __init__(
        self, consumer: str, stream_name: str, hot_log: HotLog, outbox: Outbox, streams: Streams
    ) -> None:
        self._consumer = consumer
        self._stream_name = stream_name
        self._hot_log = hot_log
        self._outbox = outbox
        self._streams = streams
        self._origin: str | None = None
        self._head_seen = 0
        self._head_checked_at = 0.0
        self._redis = Outage(consumer, "Redis")

    @property
    def is_polling(self) -> bool:
        """Whether the hot log is away, so that nobody wakes this reader."""
        return self._redis.is_going_on

    def read(
        self, connection: psycopg.Connection[Any], *, after: int, count: int, wait_seconds: float
    ) -> list[Entry]:
        """Up to `count` entries that follow `after`. Raises PositionMissing, never skips."""
        if not self._hot_log.keeps_entries:
            if wait_seconds:
                self._hot_log.read(
                    self._stream_name, after=after, count=count, wait_seconds=wait_seconds
                )
            return self._read_warm(connection, after, count)
        raw = self._read_hot(after, count, wait_seconds)
        if raw is None:
            return self._read_warm(connection, after, count)
        if raw:
            entries, problem = self._decode_hot(connection, after, raw)
            if entries:
                return entries
            emit(signals.GapFound(self._consumer, after + 1, problem))
            return self._read_warm(connection, after, count)
        if self._is_overdue(connection, after):
            emit(signals.GapFound(self._consumer, after + 1, "it is not in the hot log"))
            return self._read_warm(connection, after, count)
        return []

    def _read_hot(
        self, after: int, count: int, wait_seconds: float
    ) -> list[tuple[int, bytes]] | None:
        """What the hot log has; None where it is away. Said once, then asked now and then."""
        if not self._redis.is_worth_trying:
            return None
        try:
            raw = self._hot_log.read(
                self._stream_name,
                after=after,
                count=count,
                wait_seconds=0.0 if self.is_polling else wait_seconds,
            )
        except (ServerUnavailable, ServerUnsuitable) as error:
            self._redis.begin(error)
            return None
        self._redis.end()
        return raw

    def _decode_hot(
        self, connection: psycopg.Connection[Any], after: int, raw: Iterable[tuple[int, bytes]]
    ) -> tuple[list[Entry], str]:
        """The contiguous beginning of what the hot log gave, and why it ends there."""
        origin = self._own_origin(connection)
        entries: list[Entry] = []
        expected = after + 1
        for position, data in raw:
            if position != expected:
                return entries, f"the hot log goes on at {position}"
            try:
                entry = decode_entry(self._stream_name, position, data)
            except MalformedEntry as error:
                return entries, str(error)
            if entry.origin != origin:
                return entries, f"its entry comes from another database ({entry.origin})"
            entries.append(entry)
            expected += 1
        return entries, ""

    def _own_origin(self, connection: psycopg.Connection[Any]) -> str:
        if self._origin is None:
            self._origin = self._streams.read(connection, self._stream_name).origin
        return self._origin

    def _is_overdue(self, connection: psycopg.Connection[Any], after: int) -> bool:
        """Whether the next position was given out a while ago and still is not in the hot log."""
        now = time.monotonic()
        if now - self._head_checked_at < HEAD_CHECK_SECONDS:
            return False
        self._head_checked_at = now
        was_seen_before = self._head_seen > after
        self._head_seen = self._streams.read(connection, self._stream_name).head
        return was_seen_before

    def _read_warm(
        self, connection: psycopg.Connection[Any], after: int, count: int
    ) -> list[Entry]:
        rows = self._outbox.read(connection, self._stream_name, after, count)
        if not rows and self._streams.read(connection, self._stream_name).head > after:
            # Numbered a moment ago, or gone with everything behind it.
            rows = self._outbox.read(connection, self._stream_name, after, count)
            if not rows:
                raise PositionMissing(
                    f"{self._stream_name}/{after + 1} is in no tier, nor is anything behind it. "
                    f"{self._consumer} has skipped nothing and waits."
                )
        entries: list[Entry] = []
        for position, body in rows:
            if position != after + 1 + len(entries):
                break
            entries.append(decode_body(self._stream_name, position, body.encode()))
        if rows and not entries:
            raise PositionMissing(
                f"{self._stream_name}/{after + 1} is in no tier; the outbox goes on at "
                f"{rows[0][0]}. {self._consumer} has skipped nothing and waits."
            )
        if entries:
            emit(signals.WarmTierRead(self._consumer, after + 1, entries[-1].position))
        return entries
