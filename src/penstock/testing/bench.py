"""An application's pipeline at work on real servers, as far as a test lets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from uuid import UUID

import redis
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.app.moving import moved
from penstock.stores.dead_letters import Criteria, DeadLetters, FullLetter
from penstock.stores.migrations import migrate
from penstock.stores.postgres import connect
from penstock.stores.queries import Queries
from penstock.stores.servers import Servers
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
        AssertionError where there is still something to do after so long.
        """
        stop, ended = threading.Event(), list[BaseException]()
        worker = threading.Thread(target=self._work, args=(stop, ended), name="penstock-test")
        worker.start()
        try:
            unfinished = self._watch(worker, seconds)
        finally:
            stop.set()
            worker.join()
        if ended:
            raise ended[0]
        assert not unfinished, f"Not idle after {seconds:g} s: {'; '.join(unfinished)}."

    def fire_timers(self, until: datetime | None = None) -> list[UUID]:
        """Send what is due by a moment (None: now), as if it had come; returns the event_uuids."""
        with Session(self.pipeline.engine) as session, session.begin():
            return fire_timers(self.pipeline, session, until)

    @property
    def dead_letters(self) -> list[FullLetter]:
        """Every event that was given up, the oldest first."""
        with connect(self.database_url, "penstock test") as connection:
            letters = DeadLetters(connection, self.pipeline.settings.schema)
            _, found = letters.list(Criteria(), LETTERS_MAX)
            return list(letters.read([letter.id for letter in found]))

    def _work(self, stop: threading.Event, ended: list[BaseException]) -> None:
        consumers = [f"consumer:{name}" for name in self.pipeline.consumers]
        try:
            self.pipeline.run_worker(["publisher", "timers", *consumers], stop)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            ended.append(error)

    def _watch(self, worker: threading.Thread, seconds: float) -> list[str]:
        """What there is still to do: nothing, or what was left when the time was over."""
        query = Queries("idle.sql", self.pipeline.settings.schema)["unfinished"]
        names = [consumer.name for consumer in self.pipeline.consumers.values()]
        with connect(self.database_url, "penstock test") as connection:
            for _ in range(max(1, round(seconds / LOOK_SECONDS))):
                rows = connection.execute(query, {"consumers": names}).fetchall()
                if not rows:
                    break
                worker.join(LOOK_SECONDS)
                if not worker.is_alive():
                    break
        return [words for (words,) in rows]


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
        moved(pipeline, database_url=database_url, redis_url=servers.redis_url),
    ):
        yield Bench(pipeline, database_url, servers.redis_url)
