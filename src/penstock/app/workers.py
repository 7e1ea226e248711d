"""Runs roles of a pipeline in this process: threads of a crew, the leases kept by one more."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from penstock.app.registry import RegisteredConsumer
from penstock.core.leases import JANITOR, PUBLISHER
from penstock.core.outgoing import Limits, OutgoingEvent, Unset, batch_json, encode_event
from penstock.core.require import require
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.core.trouble import Trouble
from penstock.core.wire import Entry
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.effects import Effects
from penstock.pipeline.gate import Gate
from penstock.pipeline.janitor import Janitor
from penstock.pipeline.publisher import Publisher
from penstock.pipeline.rehearsal import Rehearsal, RehearsalRoom
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.sending import take_pending
from penstock.runtime.crew import Crew
from penstock.runtime.heartbeat import Pulse
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Stage
from penstock.runtime.time_limit import TimeLimit
from penstock.stores.announcements import Announcements
from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.contracts import promises_of, require_kept
from penstock.stores.control_connection import ControlConnection
from penstock.stores.hot_log import HotLog, NoHotLog
from penstock.stores.identity import new_event_uuid
from penstock.stores.queries import Queries
from penstock.stores.redis_log import RedisLog
from penstock.stores.worker_connection import SyncWorkerConnection, WorkerConnection
from penstock.telemetry import failpoints, signals
from penstock.telemetry.bus import emit

CONSUMER_PREFIX = "consumer:"
GARBAGE_THRESHOLDS = (50_000, 20, 100)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the stages of one process share."""

    keeper: LeaseKeeper
    crew: Crew
    gate: Gate
    deployed_at: datetime


class Workers:
    """Builds stages and runs each in a loop of its own."""

    def __init__(
        self,
        settings: Settings,
        consumers: Mapping[str, RegisteredConsumer],
        *,
        sources: Mapping[str, Source],
        session_factory: sessionmaker[Any] | async_sessionmaker[Any] | None,
        around: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        require(
            settings.dead_letter_stream not in sources,
            f"dead_letter_stream={settings.dead_letter_stream!r} is a stream of another service, "
            "which alone sends to it. Name one of your own.",
        )
        self._settings = settings
        self._consumers = consumers
        self._sources = sources
        self._session_factory = session_factory
        self._around = around
        self._announcements = Announcements(settings.database_url)
        self._announced_elsewhere: dict[str, Announcements] = {}

    def check_hot_log(self) -> None:
        """Raise ServerUnsuitable or ServerUnavailable if the hot log cannot be used now."""
        hot_log = self._open_log()
        try:
            hot_log.check()
        finally:
            hot_log.close()

    def run(
        self,
        roles: Sequence[str],
        stop: threading.Event,
        worker_id: str | None = None,
        *,
        deployed_at: datetime | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Work until stopped. An error that no waiting can cure stops all roles and comes out."""
        openers = {role: self._opener(role) for role in roles}
        failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
        _tame_garbage_collection()
        keeper = LeaseKeeper(self._settings, worker_id)
        crew = Crew(pulse)
        surroundings = _Surroundings(keeper, crew, Gate(), deployed_at or datetime.now(UTC))
        name = "+".join(roles)
        for role, open_stage in openers.items():
            crew.start(role, partial(open_stage, surroundings))
        emit(signals.WorkerStarted(name, os.getpid()))
        # In slices: the main thread has to come back to Python to notice a signal.
        while not crew.join(seconds=0.1):
            if stop.is_set() or keeper.failure is not None:
                crew.stop_all()
        keeper.close()
        for announcements in (self._announcements, *self._announced_elsewhere.values()):
            announcements.close()
        emit(signals.WorkerStopped(name))
        for error in (*crew.errors, keeper.failure):
            if error is not None:
                raise error

    def open_stage(self, role: str, keeper: LeaseKeeper) -> Stage:
        """The stage of one role, to be stepped by whoever asks for it."""
        surroundings = _Surroundings(keeper, Crew(), Gate(), datetime.now(UTC))
        return self._opener(role)(surroundings, threading.Event(), nullcontext())

    def _opener(self, role: str) -> Callable[[_Surroundings, threading.Event, Any], Stage]:
        if role == PUBLISHER:
            return self._open_publisher
        if role == JANITOR:
            return self._open_janitor
        name = role.removeprefix(CONSUMER_PREFIX)
        if not role.startswith(CONSUMER_PREFIX):
            raise UsageError(
                f"There is no role {role!r}: write publisher, janitor or consumer:NAME."
            )
        if name not in self._consumers:
            known = ", ".join(self._consumers) or "none"
            raise RegistrationError(f"There is no consumer {name!r}; registered are: {known}.")
        return partial(self._open_consumer, self._consumers[name])

    def _open_publisher(
        self,
        around: _Surroundings,
        stop: threading.Event,
        _in_handler: AbstractContextManager[Any],
    ) -> Stage:
        return Publisher(
            self._settings, around.keeper, self._open_log(), stop_requested=stop.is_set
        )

    def _open_janitor(
        self,
        around: _Surroundings,
        stop: threading.Event,
        _in_handler: AbstractContextManager[Any],
    ) -> Stage:
        return Janitor(self._settings, around.keeper, stop_requested=stop.is_set)

    def _open_consumer(
        self,
        consumer: RegisteredConsumer,
        around: _Surroundings,
        _stop: threading.Event,
        _in_handler: AbstractContextManager[Any],
    ) -> Stage:
        control = around.keeper.control.get
        source = self._sources.get(consumer.options.stream_name)
        consuming = Consuming(
            name=consumer.name,
            options=consumer.options,
            plan=consumer.plan,
            settings=self._settings,
            leases=around.keeper,
            gate=around.gate,
            control=control,
            seams=self._seams(consumer, control),
            source=source,
        )
        open_log = self._open_log if source is None else partial(self._open_source_log, source)
        return Consumer(consuming, around.crew, open_log, deployed_at=around.deployed_at)

    def _seams(
        self, consumer: RegisteredConsumer, control: Callable[[], psycopg.Connection[Any]]
    ) -> ConsumerSeams:
        return ConsumerSeams(
            open_worker=lambda: self._open_worker(consumer),
            insert_sends=partial(self._insert_sends, control),
            caller=partial(_caller, consumer),
            around=self._around,
            effects=Effects(self._settings.schema, control, consumer.name, socket.gethostname()),
            tell=self._tell,
        )

    def rehearse(self, consumer: RegisteredConsumer, entry: Entry) -> Rehearsal:
        """Try a consumer's handler on an event; everything is rolled back."""
        control = ControlConnection(
            self._settings.database_url,
            f"penstock {consumer.name} rehearsal",
            statement_seconds=self._settings.lease_granted_seconds,
        )
        try:
            return RehearsalRoom(
                consumer.name,
                consumer.options,
                consumer.plan,
                schema=self._settings.schema,
                seams=self._seams(consumer, control.get),
            ).rehearse(entry)
        finally:
            control.close()

    def _open_log(self) -> HotLog:
        settings = self._settings
        if settings.redis_url is None:
            return NoHotLog(self._announcements)
        return RedisLog(
            settings.redis_url,
            prefix=settings.redis_prefix,
            length_max=settings.hot_log_length_max,
            bytes_max=settings.hot_log_bytes_max,
        )

    def _open_source_log(self, source: Source) -> HotLog:
        url = self._settings.redis_url if isinstance(source.redis_url, Unset) else source.redis_url
        if url is not None:
            return RedisLog(url, prefix=source.redis_prefix)
        require(
            source.source_url is not None,
            f"pipeline.source({source.stream_name!r}, …) names no Redis, and the pipeline has "
            "none either. Write redis_url=… or source_url=….",
            RegistrationError,
        )
        known = self._announced_elsewhere
        url = str(source.source_url)
        return NoHotLog(known.setdefault(url, Announcements(url)))

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

    def _insert_sends(
        self,
        control: Callable[[], psycopg.Connection[Any]],
        worker: WorkerConnection,
        session: Any,
    ) -> None:
        """What handlers remembered is inserted last, before the fence."""
        pending = take_pending(session)
        if pending:
            require_kept(control(), self._settings.schema, promises_of(pending))
            self._send(worker, pending)

    def _tell(self, worker: WorkerConnection, trouble: Trouble) -> None:
        """Send an event about it, if there is a stream for that; not about that stream's own."""
        stream_name = self._settings.dead_letter_stream
        if stream_name is None or trouble.stream_name == stream_name:
            return
        limits = Limits(self._settings.payload_bytes_max, self._settings.metadata_bytes_max)
        event = encode_event(
            stream_name, trouble.as_event(), event_uuid=new_event_uuid(), limits=limits
        )
        self._send(worker, [event])

    def _send(self, worker: WorkerConnection, events: list[OutgoingEvent]) -> None:
        query = Queries("outbox.sql", self._settings.schema)["send_many"]
        worker.execute(query, {"batch": batch_json(events)})


def _caller(
    consumer: RegisteredConsumer, worker: WorkerConnection
) -> Callable[[Callable[..., Any], list[Any]], Any]:
    """What calls the handler: directly, or within its time limit."""
    seconds = consumer.options.timeout_seconds
    if seconds is None:
        return worker.call
    limit = TimeLimit(seconds, consumer=consumer.name, on_overdue=worker.cancel)
    if not consumer.plan.is_async:
        return lambda function, arguments: limit.call(worker.call, function, arguments)
    return lambda function, arguments: worker.call(limit.awaited(function), arguments)


def _tame_garbage_collection() -> None:
    """Everything alive now stays alive; looking through it again costs a fifth of the speed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
