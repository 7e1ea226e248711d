"""Runs roles of a pipeline in this process: a thread each, the leases kept by one more."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from penstock.app.registry import RegisteredConsumer
from penstock.core.leases import PUBLISHER
from penstock.core.outgoing import batch_json
from penstock.core.settings import Settings
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.publisher import Publisher
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.sending import take_pending
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Loop, Stage
from penstock.stores.hot_log import HotLog, NoHotLog
from penstock.stores.queries import Queries
from penstock.stores.redis_log import RedisLog
from penstock.stores.worker_connection import (
    AsyncWorkerConnection,
    SyncWorkerConnection,
    WorkerConnection,
)
from penstock.telemetry import failpoints, signals
from penstock.telemetry.bus import emit

CONSUMER_PREFIX = "consumer:"
GARBAGE_THRESHOLDS = (50_000, 20, 100)
JOIN_SECONDS = 5.0


class Workers:
    """Builds stages and runs each in a loop of its own."""

    def __init__(
        self,
        settings: Settings,
        consumers: Mapping[str, RegisteredConsumer],
        *,
        session_factory: sessionmaker[Any] | async_sessionmaker[Any] | None,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._settings = settings
        self._consumers = consumers
        self._session_factory = session_factory
        self._around = around
        self._errors: list[BaseException] = []

    def check_hot_log(self) -> None:
        """Raise ServerUnsuitable or ServerUnavailable if the hot log cannot be used now."""
        hot_log = self._open_log()
        try:
            hot_log.check()
        finally:
            hot_log.close()

    def run(self, roles: Sequence[str], stop: threading.Event, worker_id: str | None) -> None:
        """Work until stopped. An error that no waiting can cure stops all roles and comes out."""
        stages = {role: self._opener(role) for role in roles}
        failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
        _tame_garbage_collection()
        keeper = LeaseKeeper(self._settings, worker_id)
        threads = [
            threading.Thread(
                target=self._guarded, args=(role, open_stage, keeper, stop), name=f"penstock-{role}"
            )
            for role, open_stage in stages.items()
        ]
        name = "+".join(roles)
        for thread in threads:
            thread.start()
        emit(signals.WorkerStarted(name, os.getpid()))
        # In slices: the main thread has to come back to Python to notice a signal.
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(timeout=0.1)
        keeper.close()
        emit(signals.WorkerStopped(name))
        if self._errors:
            raise self._errors[0]

    def _guarded(
        self,
        role: str,
        open_stage: Callable[[LeaseKeeper, threading.Event], Stage],
        keeper: LeaseKeeper,
        stop: threading.Event,
    ) -> None:
        try:
            Loop(role, lambda: open_stage(keeper, stop), stop).run()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, raised there
            self._errors.append(error)
            stop.set()

    def _opener(self, role: str) -> Callable[[LeaseKeeper, threading.Event], Stage]:
        if role == PUBLISHER:
            return self._open_publisher
        name = role.removeprefix(CONSUMER_PREFIX)
        if not role.startswith(CONSUMER_PREFIX):
            raise UsageError(f"There is no role {role!r}: write publisher or consumer:NAME.")
        if name not in self._consumers:
            known = ", ".join(self._consumers) or "none"
            raise RegistrationError(f"There is no consumer {name!r}; registered are: {known}.")
        consumer = self._consumers[name]
        return lambda keeper, stop: self._open_consumer(consumer, keeper, stop)

    def _open_publisher(self, keeper: LeaseKeeper, stop: threading.Event) -> Stage:
        return Publisher(self._settings, keeper, self._open_log(), stop_requested=stop.is_set)

    def _open_consumer(
        self, consumer: RegisteredConsumer, keeper: LeaseKeeper, stop: threading.Event
    ) -> Stage:
        return Consumer(
            consumer.name,
            consumer.options,
            consumer.plan,
            self._settings,
            leases=keeper,
            hot_log=self._open_log(),
            seams=ConsumerSeams(
                open_worker=lambda: self._open_worker(consumer),
                insert_sends=self._insert_sends,
                around=self._around,
                stop_requested=stop.is_set,
            ),
        )

    def _open_log(self) -> HotLog:
        settings = self._settings
        if settings.redis_url is None:
            return NoHotLog(settings.database_url)
        return RedisLog(
            settings.redis_url,
            prefix=settings.redis_prefix,
            length_max=settings.hot_log_length_max,
        )

    def _open_worker(self, consumer: RegisteredConsumer) -> WorkerConnection:
        factory = self._session_factory
        url, application = self._settings.database_url, f"penstock {consumer.name}"
        if consumer.plan.is_async:
            return AsyncWorkerConnection(
                url, application, factory if isinstance(factory, async_sessionmaker) else None
            )
        return SyncWorkerConnection(
            url, application, factory if isinstance(factory, sessionmaker) else None
        )

    def _insert_sends(self, worker: WorkerConnection, session: Any) -> None:
        """What handlers remembered is inserted last, before the fence."""
        pending = take_pending(session)
        if pending:
            query = Queries("outbox.sql", self._settings.schema)["send_many"]
            worker.execute(query, {"batch": batch_json(pending)})


def _tame_garbage_collection() -> None:
    """Everything alive now stays alive; looking through it again costs a fifth of the speed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
