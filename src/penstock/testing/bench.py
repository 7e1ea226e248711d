"""An application's pipeline at work on real servers, as far as a test lets it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg
import redis
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.app.moving import moved
from penstock.stores.dead_letters import Criteria, DeadLetters, FullLetter
from penstock.stores.migrations import migrate
from penstock.stores.postgres import connect
from penstock.stores.queries import Queries
from penstock.stores.servers import Servers
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import ConsumerBlocked, ServerLost
from penstock.testing.databases import name_of, new_database
from penstock.testing.timers import fire_timers

LOOK_SECONDS = 0.02
IDLE_SECONDS = 30.0
LETTERS_MAX = 10_000


class Bench:
    """A pipeline, its own empty database and Redis, and workers that run when they are told to."""

    def __init__(self, pipeline: Pipeline, database_url: str, redis_url: str) -> None:
        self.pipeline = pipeline
        self.database_url = database_url
        self.redis_url = redis_url

    def run_until_idle(self, *, seconds: float = IDLE_SECONDS) -> None:
        """Let publisher, timers and all consumers work until there is nothing to do now.

        What has to wait, a retry or a timer, is left for later. Raises what ends a worker, and
        AssertionError where there is still something to do after so long, or where a handler does
        not come to its end within `shutdown_seconds` after that.
        """
        ends_at = time.monotonic() + seconds
        with _obstacles() as obstacles, connect(self.database_url, "penstock test") as connection:
            while True:
                self._work_until(ends_at, connection)
                # What a worker has in hand when it is stopped, it finishes; more may follow of it.
                unfinished = self._unfinished(connection)
                if not unfinished or time.monotonic() >= ends_at:
                    break
        told = "; ".join([*unfinished, *obstacles])
        assert not unfinished, f"Not idle after {seconds:g} s: {told}."

    def fire_timers(self, until: datetime | None = None) -> list[UUID]:
        """Send what is due by a moment (None: now), as if it had come; returns the event_uuids."""
        with Session(self.pipeline.engine) as session, session.begin():
            return fire_timers(self.pipeline, session, until)

    @property
    def dead_letters(self) -> list[FullLetter]:
        """Every event that was given up, the oldest first; what is parked is not, or not yet."""
        with connect(self.database_url, "penstock test") as connection:
            letters = DeadLetters(connection, self.pipeline.settings.schema)
            _, found = letters.list(Criteria(), LETTERS_MAX)
            return list(letters.read([letter.id for letter in found]))

    def _work_until(self, ends_at: float, connection: psycopg.Connection[Any]) -> None:
        """A worker for as long as it finds something to do. Raises what has ended it."""
        stop, ended = threading.Event(), list[BaseException]()
        # A handler that hangs must not keep the whole run of tests alive.
        worker = threading.Thread(
            target=self._work, args=(stop, ended), name="penstock-test", daemon=True
        )
        worker.start()
        try:
            while worker.is_alive() and self._unfinished(connection):
                if time.monotonic() >= ends_at:
                    break
                worker.join(LOOK_SECONDS)
        finally:
            stop.set()
            worker.join(self.pipeline.settings.shutdown_seconds)
        if ended:
            raise ended[0]
        assert not worker.is_alive(), (
            "A handler has not come to its end, "
            f"{self.pipeline.settings.shutdown_seconds:g} s after its worker was to stop: "
            f"{'; '.join(self._unfinished(connection)) or 'its event is settled already'}."
        )

    def _work(self, stop: threading.Event, ended: list[BaseException]) -> None:
        consumers = [f"consumer:{name}" for name in self.pipeline.consumers]
        try:
            self.pipeline.run_worker(["publisher", "timers", *consumers], stop)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            ended.append(error)

    def _unfinished(self, connection: psycopg.Connection[Any]) -> list[str]:
        """What workers could do now."""
        query = Queries("idle.sql", self.pipeline.settings.schema)["unfinished"]
        names = [consumer.name for consumer in self.pipeline.consumers.values()]
        return [words for (words,) in connection.execute(query, {"consumers": names})]


@contextmanager
def _obstacles() -> Iterator[list[str]]:
    """What kept workers from their work meanwhile, each once."""
    told: list[str] = []

    def tell(words: str) -> None:
        if words not in told:
            told.append(words)

    def on_lost(signal: ServerLost) -> None:
        tell(f"{signal.server} was not to be had ({signal.error})")

    def on_blocked(signal: ConsumerBlocked) -> None:
        tell(f"{signal.consumer} was blocked at {signal.position} ({signal.reason})")

    subscribe(ServerLost, on_lost)
    subscribe(ConsumerBlocked, on_blocked)
    try:
        yield told
    finally:
        unsubscribe(on_lost)
        unsubscribe(on_blocked)


@contextmanager
def migrated_template(servers: Servers, pipeline: Pipeline) -> Iterator[str]:
    """The name of a migrated database that every test's own is copied from."""
    with new_database(servers.database_url) as url:
        with moved(pipeline, database_url=url):
            migrate(url, pipeline.settings.schema)
        yield name_of(url)


@contextmanager
def bench_on(servers: Servers, template: str, pipeline: Pipeline) -> Iterator[Bench]:
    """The pipeline on a database of its own and an empty Redis."""
    with closing(redis.Redis.from_url(servers.redis_url)) as client:
        client.flushdb()
    with (
        new_database(servers.database_url, template) as database_url,
        moved(
            pipeline,
            database_url=database_url,
            redis_url=servers.redis_url,
            timer_redis_url=servers.redis_url,
            archive_url=None,
        ),
    ):
        yield Bench(pipeline, database_url, servers.redis_url)
