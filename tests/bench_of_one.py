"""One consumer on a workbench: real servers, one thread, step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.core.progress import Progress
from penstock.core.settings import Settings
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.gate import Gate
from penstock.pipeline.lane import Lane
from penstock.pipeline.publisher import Publisher
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.sending import take_pending
from penstock.pipeline.signature import read_signature
from penstock.runtime.leases import LeaseKeeper
from penstock.stores.announcements import Announcements
from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.hot_log import HotLog, NoHotLog
from penstock.stores.redis_log import RedisLog
from penstock.stores.worker_connection import SyncWorkerConnection, WorkerConnection

STEPS_MAX = 500


class Workbench:
    """Sends, publishes and handles in this thread, so that a test sees every step."""

    def __init__(self, database_url: str, redis_url: str | None, **settings: Any) -> None:
        self.settings = Settings(database_url=database_url, redis_url=redis_url, **settings)
        self.connection = psycopg.connect(database_url, autocommit=True)
        self.keepers: list[LeaseKeeper] = []
        self.announcements = Announcements(database_url)
        self._stages: list[Consumer | Lane | Publisher] = []

    def close(self) -> None:
        for stage in self._stages:
            stage.close()
        for keeper in self.keepers:
            keeper.close()
        self.announcements.close()
        self.connection.close()

    def hot_log(self) -> HotLog:
        settings = self.settings
        if settings.redis_url is None:
            return NoHotLog(self.announcements)
        return RedisLog(
            settings.redis_url,
            length_max=settings.hot_log_length_max,
            bytes_max=settings.hot_log_bytes_max,
        )

    def send(self, count: int = 1, *, stream: str = "orders", event_type: str = "placed") -> None:
        self.connection.execute(
            "SELECT events.send(%s, %s, jsonb_build_object('n', n), key => 'k' || n %% 3)"
            "  FROM generate_series(1, %s) AS n",
            (stream, event_type, count),
        )

    def publisher(self) -> Publisher:
        return Publisher(self.settings, self._keeper(), self.hot_log())

    def publish(self) -> None:
        """Publish until nothing is left."""
        publisher = self.publisher()
        try:
            steps = 0
            while self.unpublished():
                publisher.step()
                steps += 1
                assert steps < STEPS_MAX, "the publisher does not come to an end"
        finally:
            publisher.close()

    def head(self, stream: str = "orders") -> int:
        row = self.connection.execute(
            "SELECT head FROM events.stream WHERE name = %s", (stream,)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def unpublished(self) -> bool:
        row = self.connection.execute(
            "SELECT EXISTS (SELECT 1 FROM events.outbox_event WHERE position IS NULL)"
            " OR EXISTS (SELECT 1 FROM events.stream WHERE published < head)"
        ).fetchone()
        return row is not None and row[0]

    def consumer(
        self,
        handler: Callable[..., Any],
        *,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        stop: threading.Event | None = None,
        **options: Any,
    ) -> Lane:
        """The first lane of a consumer, registered, as a stage to step through."""
        plan = read_signature(handler, "test")

        def open_worker() -> WorkerConnection:
            kind = AsyncWorkerConnection if plan.is_async else SyncWorkerConnection
            return kind(self.settings.database_url, "penstock test worker")

        keeper = self._keeper()
        consuming = Consuming(
            name=f"test.{options.get('name', 'consumer')}",
            options=ConsumerOptions(**{"stream_name": "orders", "name": "consumer", **options}),
            plan=plan,
            settings=self.settings,
            leases=keeper,
            gate=Gate(),
            control=keeper.control.get,
            seams=ConsumerSeams(
                open_worker=open_worker,
                insert_sends=lambda worker, session: _insert(worker, take_pending(session)),
                around=around,
            ),
        )
        consumer = Consumer(
            consuming,
            NoCrew(),
            self.hot_log,
            deployed_at=datetime(2020, 1, 1, tzinfo=UTC),
            excused=nullcontext(),
        )
        lane = consumer.lane_opener(0)(stop or threading.Event(), nullcontext())
        self._stages += [lane, consumer]
        return lane

    def _keeper(self) -> LeaseKeeper:
        keeper = LeaseKeeper(self.settings)
        self.keepers.append(keeper)
        return keeper

    def checkpoint(self, consumer: str = "test.consumer") -> int:
        row = self.connection.execute(
            "SELECT checkpoint FROM events.stream_lease WHERE role = %s", (f"consumer:{consumer}",)
        ).fetchone()
        assert row is not None
        return int(row[0])

    def rows(self, query: str) -> list[Any]:
        return [row[0] for row in self.connection.execute(query.encode()).fetchall()]

    def settled(self) -> list[tuple[int, str]]:
        return self.connection.execute(
            "SELECT position, outcome FROM events.processed_event ORDER BY position"
        ).fetchall()


def _insert(worker: WorkerConnection, pending: dict[str, list[Any]]) -> None:
    from penstock.core.outgoing import batch_json

    if events := pending.get("events"):
        worker.execute("SELECT events.send_many(%(b)s::jsonb)", {"b": batch_json(events)})


class NoCrew:
    """Starts nothing: a test steps through the lanes itself."""

    def start(self, name: str, open_stage: Callable[..., Any]) -> None: ...

    def stop(self, name: str) -> None: ...

    def wait(self, names: set[str]) -> None: ...


def run_until_idle(consumer: Lane) -> list[Progress]:
    """Step until there is nothing to do; pauses are not waited for."""
    done: list[Progress] = []
    while not (progress := consumer.step()).is_idle:
        done.append(progress)
        assert len(done) < STEPS_MAX, "the consumer does not come to an end"
    return done
