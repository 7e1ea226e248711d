"""Workers of one consumer in threads of this process, on real servers, and what they have done."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from penstock import Event, Pipeline
from penstock.core.lanes import LaneView
from penstock.stores.lanes import Lanes
from tests.waiting import wait_until

CONSUMER = "shop.count"
FIRST_DEPLOY = datetime(2026, 1, 1, tzinfo=UTC)


class Counted(Event, type="lanes.counted", version=1, key="key"):
    key: str
    number: int


Handler = Callable[[Counted, Any], None]


def insert(event: Counted, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect (key, number) VALUES (%s, %s)", (event.key, event.number))


class Shop:
    """A database with a stream of counted events, and as many workers as a test likes."""

    def __init__(self, database_url: str, redis_url: str | None, **settings: Any) -> None:
        self.database_url = database_url
        self._arguments = {"database_url": database_url, "redis_url": redis_url, **settings}
        self.connection = psycopg.connect(database_url, autocommit=True)
        self.connection.execute(
            "CREATE TABLE effect (id bigint GENERATED ALWAYS AS IDENTITY, key text, number int)"
        )
        self._sent: Counter[str] = Counter()
        self._deploys = 0

    def close(self) -> None:
        self.connection.close()

    def pipeline(self, handler: Handler = insert, **options: Any) -> Pipeline:
        pipeline = Pipeline("shop", **self._arguments)
        pipeline.consumer("counts", name="count", **options)(handler)
        return pipeline

    @contextmanager
    def worker(
        self, *, roles: tuple[str, ...] = ("consumer:count",), deploy: int = 1, **options: Any
    ) -> Iterator[threading.Event]:
        """A worker that runs until the block ends or its event is set."""
        pipeline = self.pipeline(**options)
        stop = threading.Event()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                deployed_at = FIRST_DEPLOY + timedelta(hours=deploy)
                pipeline.run_worker(roles, stop, deployed_at=deployed_at)
            except BaseException as error:
                errors.append(error)
                raise

        thread = threading.Thread(target=run, name="worker")
        thread.start()
        try:
            yield stop
        finally:
            stop.set()
            thread.join()
            assert not errors

    @contextmanager
    def publisher(self) -> Iterator[None]:
        with self.worker(roles=("publisher",)):
            yield

    def send(self, count: int, keys: int = 10) -> None:
        """Events 1, 2, 3 … of every key."""
        rows = []
        for index in range(count):
            key = f"key {index % keys}"
            self._sent[key] += 1
            rows.append((key, self._sent[key]))
        with self.connection.cursor() as cursor:
            cursor.executemany(
                "SELECT events.send('counts', 'lanes.counted', "
                "jsonb_build_object('key', %s::text, 'number', %s::int), key => %s)",
                [(key, number, key) for key, number in rows],
            )

    def effects(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for key, number in self.connection.execute("SELECT key, number FROM effect ORDER BY id"):
            found.setdefault(key, []).append(number)
        return found

    def expected(self) -> dict[str, list[int]]:
        return {key: list(range(1, count + 1)) for key, count in self._sent.items()}

    def wait_until_handled(self) -> None:
        """Every key's events have their effects: each once, in order."""
        total = sum(self._sent.values())
        wait_until(lambda: self._count() >= total, what=lambda: f"{self._count()} of {total}")
        assert self.effects() == self.expected()

    def _count(self) -> int:
        return sum(map(len, self.effects().values()))

    def wait_until_published(self) -> None:
        """The publisher has everything behind it and sleeps."""
        total = sum(self._sent.values())
        published = "SELECT coalesce(max(published), 0) FROM events.stream"
        wait_until(
            lambda: self.connection.execute(published).fetchone() == (total,), what="published"
        )

    def view(self) -> LaneView:
        view = Lanes().watch(self.connection, CONSUMER, "a test")
        # Empty until a worker has registered the consumer.
        return view or LaneView(0, 0, False, frozenset(), ())

    def shares(self) -> list[int]:
        """How many lanes each worker holds, most first."""
        view = self.view()
        held = Counter(view.holders)
        return sorted((held[worker] for worker in view.workers), reverse=True)

    def wait_for_shares(self, *shares: int) -> None:
        wait_until(
            lambda: self.shares() == list(shares), what=lambda: f"{shares}, not {self.shares()}"
        )

    def wait_for_lanes(self, lanes: int) -> None:
        wait_until(lambda: self.view().lanes == lanes, what=f"there are {lanes} lanes")

    def checkpoints(self) -> list[int]:
        return [
            row[0]
            for row in self.connection.execute(
                "SELECT checkpoint FROM events.stream_lease WHERE role LIKE 'consumer:%' "
                "ORDER BY lane"
            )
        ]
