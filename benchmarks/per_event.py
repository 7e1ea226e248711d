"""The other side of every comparison: one transaction per event, as it is usually written.

Runs in a process of its own that never imports Penstock; see `workload`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import psycopg
import redis
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from benchmarks.children import serve, wait_for_parent
from benchmarks.workload import (
    EVENT_TYPE,
    METADATA,
    User,
    add_row,
    insert_row,
    tame_garbage_collection,
    user_fields,
)

STREAM_KEY = "bench:users"
READ_COUNT = 100
BLOCK_MS = 500
POLL_SECONDS = 5.0

IS_PROCESSED = text(
    "SELECT 1 FROM bench.processed_event WHERE consumer = :consumer AND event_uuid = :event_uuid"
)
REMEMBER = text(
    "INSERT INTO bench.processed_event (consumer, event_uuid) VALUES (:consumer, :event_uuid)"
)
ADVANCE = text("UPDATE bench.checkpoint SET entry_id = :entry_id WHERE consumer = :consumer")

START_CONSUMER = (
    "INSERT INTO bench.checkpoint (consumer, entry_id) VALUES (%s, '0-0') ON CONFLICT DO NOTHING"
)
INSERT_EVENT = (
    "INSERT INTO bench.outbox_event (event_uuid, event_type, payload, metadata)"
    " VALUES (%s, %s, %s, %s)"
)
SELECT_UNPUBLISHED = (
    "SELECT id, event_uuid::text, event_type, payload, metadata FROM bench.outbox_event"
    " WHERE published_at IS NULL ORDER BY id LIMIT %s"
)
MARK_PUBLISHED = "UPDATE bench.outbox_event SET published_at = now() WHERE id = %s"

LISTEN = "LISTEN bench_outbox"
NOTIFY = "NOTIFY bench_outbox"

Handle = Callable[[User, Session], None]


class PerEventConsumer:
    """Reads the Redis stream a hundred at a time and gives every event its own transaction."""

    def __init__(
        self, database_url: str, redis_url: str, stream_key: str, name: str, handle: Handle
    ) -> None:
        self._stream_key = stream_key
        self._engine = create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
        self._redis = redis.Redis.from_url(redis_url)
        self._name = name
        self._handle = handle
        self._last = "0-0"
        with psycopg.connect(database_url) as connection:
            connection.execute(START_CONSUMER, (name,))

    def step(self, count: int = READ_COUNT, *, block_ms: int | None = None) -> int:
        """Handle what one read returns."""
        reply: Any = self._redis.xread({self._stream_key: self._last}, count=count, block=block_ms)
        entries = stream_entries(reply)
        for entry_id, fields in entries:
            self._handle_one(entry_id.decode(), fields)
        return len(entries)

    def _handle_one(self, entry_id: str, fields: Mapping[bytes, bytes]) -> None:
        event = User.model_validate_json(fields[b"payload"])
        event_uuid = fields[b"event_uuid"].decode()
        identity = {"consumer": self._name, "event_uuid": event_uuid}
        with Session(self._engine) as session:
            if session.execute(IS_PROCESSED, identity).first() is None:
                session.execute(REMEMBER, identity)
                self._handle(event, session)
            session.execute(ADVANCE, {"consumer": self._name, "entry_id": entry_id})
            session.commit()
        self._last = entry_id

    def close(self) -> None:
        """Give the connections back."""
        self._engine.dispose()
        self._redis.close()


class PerEventPublisher:
    """Selects a hundred unpublished rows, then appends and marks them row by row."""

    def __init__(self, database_url: str, redis_url: str, stream_key: str) -> None:
        self._stream_key = stream_key
        self._connection = psycopg.connect(database_url)
        self._redis = redis.Redis.from_url(redis_url)

    def step(self, count: int = READ_COUNT) -> int:
        """Publish what one SELECT returns."""
        rows = self._connection.execute(SELECT_UNPUBLISHED, (count,)).fetchall()
        for outbox_id, event_uuid, event_type, payload, metadata in rows:
            self._redis.xadd(
                self._stream_key,
                {
                    "outbox_id": outbox_id,
                    "event_uuid": event_uuid,
                    "event_type": event_type,
                    "payload": json.dumps(payload),
                    "metadata": json.dumps(metadata),
                },
            )
            self._connection.execute(MARK_PUBLISHED, (outbox_id,))
        self._connection.commit()
        return len(rows)

    def close(self) -> None:
        """Give the connections back."""
        self._connection.close()
        self._redis.close()


def send(connection: psycopg.Connection[Any], number: int) -> None:
    """Insert an event and notify the publisher; the caller commits."""
    user = User(**user_fields(number))
    values = (uuid4(), EVENT_TYPE, user.model_dump_json(), json.dumps(METADATA))
    connection.execute(INSERT_EVENT, values)
    connection.execute(NOTIFY)


def stream_entries(reply: Any) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
    """The entries of one stream, out of either protocol's shape of a reply."""
    if not reply:
        return []
    if isinstance(reply, dict):
        return [entry for pages in reply.values() for page in pages for entry in page]
    return [entry for _, entries in reply for entry in entries]


# ── handlers, as this side calls them ──────────────────────────────────────────────────────────


def _ignore(_event: User, _session: Session) -> None:
    """Nothing but the transaction itself."""


def _insert_row(event: User, session: Session) -> None:
    insert_row(event, session.connection().connection.cursor())  # type: ignore[arg-type]


HANDLERS: Mapping[str, Handle] = {
    "nothing": _ignore,
    "orm": add_row,
    "psycopg": _insert_row,
}


# ── the process ────────────────────────────────────────────────────────────────────────────────


class Requests:
    """What the measuring process may ask for, one stage at a time."""

    def __init__(self, database_url: str, redis_url: str, stream_key: str) -> None:
        self._place = (database_url, redis_url, stream_key)
        self._step: Callable[[int], int] | None = None
        self._close: Callable[[], None] = lambda: None

    def answer(self, what: str, handler: str = "", count: int = 0) -> dict[str, Any]:
        """Do it; the answer says how long it took."""
        match what:
            case "open consumer":
                consumer = PerEventConsumer(*self._place, handler, HANDLERS[handler])
                self._step, self._close = consumer.step, consumer.close
            case "open publisher":
                publisher = PerEventPublisher(*self._place)
                self._step, self._close = publisher.step, publisher.close
            case "work":
                return {"seconds": self._work(count)}
            case "close":
                self._close()
            case _:
                raise AssertionError(what)
        tame_garbage_collection()
        return {}

    def _work(self, count: int) -> float:
        assert self._step is not None
        started = time.perf_counter()
        done = 0
        while done < count:
            done += self._step(min(READ_COUNT, count - done))
        return time.perf_counter() - started


def publish_for_ever(database_url: str, redis_url: str, stream_key: str) -> None:
    """Publish whenever a sender notifies."""
    publisher = PerEventPublisher(database_url, redis_url, stream_key)
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute(LISTEN)
        while True:
            while publisher.step():
                pass
            for _ in listener.notifies(timeout=POLL_SECONDS, stop_after=1):
                pass


def consume_for_ever(database_url: str, redis_url: str, stream_key: str, handler: str) -> None:
    """Handle whatever arrives."""
    consumer = PerEventConsumer(database_url, redis_url, stream_key, handler, HANDLERS[handler])
    while True:
        consumer.step(block_ms=BLOCK_MS)


def main(what: str, *arguments: str) -> None:
    """Arguments: `serve | publisher | consumer`, DATABASE, REDIS, STREAM KEY, [HANDLER]."""
    if what == "serve":
        serve(Requests(*arguments).answer)
        return
    work = publish_for_ever if what == "publisher" else consume_for_ever
    tame_garbage_collection()
    # A daemon: whatever it waits for, it ends with the process.
    threading.Thread(target=work, args=arguments, daemon=True).start()
    wait_for_parent()


if __name__ == "__main__":
    main(*sys.argv[1:])
