"""Two services: one produces a stream in its database, another reads it into its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from penstock import Pipeline
from penstock.core.events import StreamEvent
from tests.bench_of_one import Workbench
from tests.signing import keys_of
from tests.waiting import SOON_SECONDS, wait_until

CONSUMER = "billing.bill"


class Producer(Workbench):
    """Sends and publishes `orders`, when it is told to."""

    @property
    def url(self) -> str:
        return self.settings.database_url

    @property
    def mac_key(self) -> str:
        return keys_of(self.url).as_setting()

    def published(self, count: int) -> None:
        """Send so many events, and publish everything."""
        self.send(count)
        self.publish()

    def remote(self) -> dict[str, int]:
        """How far the consumers of other services are."""
        return dict(self.connection.execute("SELECT name, checkpoint FROM events.remote_consumer"))

    def wait_for_remote(self, checkpoint: int) -> None:
        wait_until(
            lambda: self.remote() == {CONSUMER: checkpoint},
            what=lambda: f"the producer knows of {checkpoint}, not of {self.remote()}",
        )


class Reader:
    """A service with a database of its own, in which it notes each event of `orders`."""

    def __init__(self, database_url: str, own_redis_url: str | None, **source: Any) -> None:
        self.database_url = database_url
        self._own_redis_url = own_redis_url
        self.source = source
        self.failures: list[BaseException] = []
        self.connection = psycopg.connect(database_url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE IF NOT EXISTS effect"
            " (serial bigint GENERATED ALWAYS AS IDENTITY, position bigint, key text)"
        )

    def close(self) -> None:
        self.connection.close()

    def pipeline(self, **options: Any) -> Pipeline:
        pipeline = Pipeline(
            "billing", database_url=self.database_url, redis_url=self._own_redis_url
        )
        pipeline.source("orders", **self.source)
        pipeline.consumer("orders", name="bill", **options)(note)
        return pipeline

    @contextmanager
    def working(self, *roles: str, **options: Any) -> Iterator[None]:
        """A worker in a thread while the block lasts; what ends it comes out."""
        stop = threading.Event()
        failures = self.failures = []
        pipeline = self.pipeline(**options)

        def work() -> None:
            try:
                pipeline.run_worker(roles or ["consumer:bill"], stop)
            except BaseException as error:  # noqa: BLE001 - handed to the test below
                failures.append(error)

        thread = threading.Thread(target=work, name="reader")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(SOON_SECONDS)
            assert not thread.is_alive(), "the worker does not stop"
            if failures:
                raise failures[0]

    def handled(self) -> list[int]:
        """The positions that it has noted, in order of position."""
        rows = self.connection.execute("SELECT position FROM effect ORDER BY position")
        return [position for (position,) in rows]

    def handled_by_key(self) -> dict[str, list[int]]:
        """The positions of each key, in the order in which they were noted."""
        rows = self.connection.execute(
            "SELECT key, array_agg(position ORDER BY serial) FROM effect GROUP BY key"
        )
        return dict(rows)

    def wait_until_handled(self, first: int, last: int) -> None:
        """Each of these positions once, and nothing else."""
        expected = list(range(first, last + 1))
        wait_until(
            lambda: bool(self.failures) or len(self.handled()) >= len(expected),
            what=lambda: f"not {self.handled()}",
        )
        assert self.failures or self.handled() == expected

    def seen(self) -> tuple[int, int]:
        """First and head of the stream, as the own books have them."""
        row = self.connection.execute("SELECT first, head FROM events.source").fetchone()
        assert row is not None
        return row[0], row[1]

    def run(self, first: int, last: int, **options: Any) -> None:
        """Work until these are handled."""
        with self.working(**options):
            self.wait_until_handled(first, last)


def note(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(
        "INSERT INTO effect (position, key) VALUES (%s, %s)", (event.position, event.key)
    )
