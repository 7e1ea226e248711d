"""Penstock's side of every comparison: a pipeline, its handlers, its real stages."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from typing import Any

import psycopg
from sqlalchemy.orm import Session

from benchmarks import workload
from benchmarks.children import serve, wait_for_parent
from benchmarks.workload import METADATA, STREAM, User, user_fields
from penstock import Event, Pipeline
from penstock.app.workers import Workers
from penstock.pipeline.consumer import Consumer
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Stage

BATCH_SIZE = 500
COPY_ROWS = "COPY bench.ledger (user_id, email, amount_cents) FROM STDIN"
SEND_CHUNK = 1000
STALL_SECONDS = 60.0
USER_IDS_MAX = 1_000_000_000


class UserCreated(User, Event, type=workload.EVENT_TYPE, version=1, key="user_id"):
    """The same event, as Penstock sends and reads it."""


def user_created(number: int) -> UserCreated:
    """The event with this number."""
    return UserCreated(**user_fields(number))


def ignore(event: UserCreated) -> None:
    """Nothing but the pipeline itself."""


def add_row(event: UserCreated, session: Session) -> None:
    """One row through the ORM."""
    workload.add_row(event, session)


def insert_row(event: UserCreated, cursor: psycopg.Cursor[Any]) -> None:
    """One row through psycopg."""
    workload.insert_row(event, cursor)


def copy_rows(events: list[UserCreated], cursor: psycopg.Cursor[Any]) -> None:
    """One row per event, all of them in one COPY."""
    with cursor.copy(COPY_ROWS) as copy:
        for event in events:
            copy.write_row((event.user_id, event.email, event.amount_cents))


HANDLERS: Mapping[str, Callable[..., None]] = {
    "nothing": ignore,
    "orm": add_row,
    "psycopg": insert_row,
    "copy": copy_rows,
}


def open_pipeline(
    database_url: str,
    redis_url: str,
    *,
    lanes: int = 1,
    batch_size: int = BATCH_SIZE,
    **settings: Any,
) -> Pipeline:
    """A pipeline with every handler as a consumer of its own."""
    settings.setdefault("publish_batch_size", BATCH_SIZE)
    pipeline = Pipeline("bench", database_url=database_url, redis_url=redis_url, **settings)
    for name, handler in HANDLERS.items():
        pipeline.consumer(STREAM, name=name, lanes=lanes, batch_size=batch_size)(handler)
    return pipeline


def send_numbers(pipeline: Pipeline, connection: psycopg.Connection[Any], count: int) -> None:
    """Send the events 1 … count."""
    for first in range(1, count + 1, SEND_CHUNK):
        numbers = range(first, min(first + SEND_CHUNK, count + 1))
        pipeline.send_many(connection, STREAM, map(user_created, numbers), metadata=METADATA)
        connection.commit()


@contextmanager
def opened_stage(pipeline: Pipeline, role: str) -> Iterator[Stage]:
    """A stage exactly as a worker opens it, to be stepped here; of a consumer its only lane."""
    workers = Workers(
        pipeline.settings,
        pipeline.consumers,
        sources={},
        session_factory=None,
        around=nullcontext,
    )
    keeper = LeaseKeeper(pipeline.settings)
    with closing(keeper), ExitStack() as stack:
        stage = workers.open_stage(role, keeper)
        stack.callback(stage.close)
        if isinstance(stage, Consumer):
            stage = stage.lane_opener(0)(threading.Event(), nullcontext())
            stack.callback(stage.close)
        yield stage


def drive(stage: Stage, count: int) -> float:
    """Step a stage until this many events have moved. Returns the seconds that it took."""
    moved = 0
    started = time.perf_counter()
    while moved < count:
        moved += stage.step().moved
        if time.perf_counter() - started > STALL_SECONDS:
            raise RuntimeError(f"only {moved} of {count} events moved in {STALL_SECONDS:g} s")
    return time.perf_counter() - started


# ── processes ──────────────────────────────────────────────────────────────────────────────────


class Senders:
    """One sender of several: commits an event per transaction for a while, on request."""

    def __init__(self, redis_url: str, *database_urls: str) -> None:
        self._pipelines = [open_pipeline(url, redis_url) for url in database_urls]
        self._connections = [psycopg.connect(url) for url in database_urls]
        self._next_user_id = random.SystemRandom().randrange(USER_IDS_MAX)

    def answer(self, variant: int, seconds: float) -> dict[str, Any]:
        """Send for this long through one of the databases; the answer says how many."""
        pipeline, connection = self._pipelines[variant], self._connections[variant]
        sent = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            self._next_user_id += 1
            pipeline.send(connection, STREAM, user_created(self._next_user_id), metadata=METADATA)
            connection.commit()
            sent += 1
        return {"sent": sent, "seconds": elapsed}


def run_worker(
    role: str,
    database_url: str,
    redis_url: str,
    prefix: str,
    shape: str = f"1x{BATCH_SIZE}",
) -> None:
    """A worker process with one role, of so many lanes x batch size, until the parent ends."""
    lanes, batch_size = map(int, shape.split("x"))
    stop = threading.Event()

    def stop_with_parent() -> None:
        wait_for_parent()
        stop.set()

    threading.Thread(target=stop_with_parent, daemon=True).start()
    pipeline = open_pipeline(
        database_url,
        redis_url,
        lanes=lanes,
        batch_size=batch_size,
        redis_prefix=prefix,
    )
    pipeline.run_worker([role], stop)


def main(what: str, *arguments: str) -> None:
    """One of: `sender REDIS DATABASE…`, `worker ROLE DATABASE REDIS PREFIX [SHAPE]`."""
    if what == "sender":
        serve(Senders(*arguments).answer)
    else:
        run_worker(*arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
