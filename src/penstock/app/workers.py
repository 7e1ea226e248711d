"""Runs roles of a pipeline in this process: threads of a crew, the leases kept by one more."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg

from penstock.app.handler_sends import HandlerSends
from penstock.app.hot_logs import HotLogs
from penstock.app.key_sources import KeySources
from penstock.app.registry import RegisteredConsumer
from penstock.app.time_limits import limited
from penstock.app.timer_registry import RegisteredTimer
from penstock.app.timer_workers import TimerWorkers
from penstock.app.worker_connections import SessionFactory, open_worker_connection
from penstock.core.leases import ARCHIVER, JANITOR, PUBLISHER, TIMERS
from penstock.core.replays import Replay, ReplayProgress
from penstock.core.require import require
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.core.timer_options import ROLE_PREFIX as TIMER_PREFIX
from penstock.core.wire import Entry
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.admission import require_admitted
from penstock.pipeline.archiver import Archiver
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.effects import Effects
from penstock.pipeline.gate import Gate
from penstock.pipeline.janitor import Janitor
from penstock.pipeline.losses import Losses
from penstock.pipeline.publisher import Publisher
from penstock.pipeline.rehearsal import Rehearsal, RehearsalRoom
from penstock.pipeline.replaying import ReplayWatch
from penstock.pipeline.resources import Holdings
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.timekeeper import Timekeeper
from penstock.runtime.crew import Crew
from penstock.runtime.heartbeat import Pulse
from penstock.runtime.leases import LeaseKeeper
from penstock.runtime.loop import Stage
from penstock.stores.control_connection import ControlConnection
from penstock.stores.replays import Replays
from penstock.stores.stream_keys import StreamKeys
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import failpoints, signals
from penstock.telemetry.bus import emit
from penstock.telemetry.logs import withhold_errors_of

CONSUMER_PREFIX = "consumer:"
GARBAGE_THRESHOLDS = (50_000, 20, 100)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the stages of one process share."""

    keeper: LeaseKeeper
    crew: Crew
    gate: Gate
    deployed_at: datetime
    losses: defaultdict[str, Losses] = field(default_factory=lambda: defaultdict(Losses))
    """By consumer."""


_Opener = Callable[[_Surroundings, threading.Event, Any], Stage]
"""Opens the stage of one role; see `Crew`."""


class Workers:
    """Builds stages and runs each in a loop of its own."""

    def __init__(
        self,
        settings: Settings,
        consumers: Mapping[str, RegisteredConsumer],
        *,
        sources: Mapping[str, Source],
        session_factory: SessionFactory,
        around: Callable[[], AbstractContextManager[Any]],
        timers: TimerWorkers | None = None,
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
        self._timers = timers
        self._hot_logs = HotLogs(settings)
        self._holdings = Holdings()

    def check_hot_log(self) -> None:
        """Raise ServerUnsuitable or ServerUnavailable if the hot log cannot be used now."""
        hot_log = self._hot_logs.own()
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
        self._run(openers, stop, worker_id, deployed_at=deployed_at, pulse=pulse)

    def run_replay(
        self,
        replay: Replay,
        consumer: RegisteredConsumer,
        stop: threading.Event,
        *,
        on_look: Callable[[ReplayProgress], None],
    ) -> None:
        """Work on a replay of a consumer until it is stopped, or there is nothing left to do.

        `on_look` is told now and then, in another thread, how far it is.
        """

        def watch(around: _Surroundings, _stop: threading.Event, _in_handler: Any) -> Stage:
            control = around.keeper.control.get
            replays = Replays(self._settings.schema)
            return ReplayWatch(replay, replays, control, on_look=on_look, on_rest=stop.set)

        openers: dict[str, _Opener] = {
            # Not as a consumer's role: by that its single lane is called.
            f"replay:{replay.name}": partial(self._open_consumer, consumer.replaying(replay)),
            f"replay-watch:{replay.name}": watch,
        }
        self._run(openers, stop)

    def _run(
        self,
        openers: Mapping[str, _Opener],
        stop: threading.Event,
        worker_id: str | None = None,
        *,
        deployed_at: datetime | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
        _tame_garbage_collection()
        keeper = LeaseKeeper(self._settings, worker_id)
        crew = Crew(pulse)
        surroundings = _Surroundings(keeper, crew, Gate(), deployed_at or datetime.now(UTC))
        name = "+".join(openers)
        for role, open_stage in openers.items():
            crew.start(role, partial(open_stage, surroundings))
        emit(signals.WorkerStarted(name, os.getpid()))
        # In slices: the main thread has to come back to Python to notice a signal.
        while not crew.join(seconds=0.1):
            if stop.is_set() or keeper.failure is not None:
                crew.stop_all()
        keeper.close()
        self._holdings.close()
        self._hot_logs.close()
        emit(signals.WorkerStopped(name))
        for error in (*crew.errors, keeper.failure):
            if error is not None:
                raise error

    def open_stage(self, role: str, keeper: LeaseKeeper) -> Stage:
        """The stage of one role, to be stepped by whoever asks for it."""
        surroundings = _Surroundings(keeper, Crew(), Gate(), datetime.now(UTC))
        return self._opener(role)(surroundings, threading.Event(), nullcontext())

    def _opener(self, role: str) -> _Opener:
        if role == PUBLISHER:
            return self._open_publisher
        if role == JANITOR:
            return lambda around, stop, _in_handler: Janitor(
                self._settings, around.keeper, stop_requested=stop.is_set
            )
        if role == TIMERS:
            return lambda _around, _stop, _in_handler: Timekeeper(self._settings)
        if role == ARCHIVER:
            require(
                self._settings.archive_url is not None,
                "There is nothing to archive into. Set PENSTOCK_ARCHIVE_URL=s3://bucket/prefix, or "
                "the path of a folder.",
            )
            return self._open_archiver
        if role.startswith(TIMER_PREFIX) and self._timers is not None:
            timer = self._timers.named(role.removeprefix(TIMER_PREFIX))
            return partial(self._open_timer, self._timers, timer)
        name = role.removeprefix(CONSUMER_PREFIX)
        if not role.startswith(CONSUMER_PREFIX):
            raise UsageError(
                f"There is no role {role!r}: write publisher, timers, archiver, janitor, "
                "consumer:NAME or timer:TOPIC."
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
            self._settings, around.keeper, self._hot_logs.own(), stop_requested=stop.is_set
        )

    def _open_archiver(
        self,
        around: _Surroundings,
        stop: threading.Event,
        in_handler: AbstractContextManager[Any],
    ) -> Stage:
        return Archiver(
            self._settings, around.keeper, stop_requested=stop.is_set, excused=in_handler
        )

    def _open_timer(
        self,
        timers: TimerWorkers,
        timer: RegisteredTimer,
        around: _Surroundings,
        _stop: threading.Event,
        in_handler: AbstractContextManager[Any],
    ) -> Stage:
        with in_handler:
            self._holdings.hold(timer.plan.resources)
        return timers.open(timer, around.keeper.control.get)

    def _open_consumer(
        self,
        consumer: RegisteredConsumer,
        around: _Surroundings,
        _stop: threading.Event,
        in_handler: AbstractContextManager[Any],
    ) -> Stage:
        with in_handler:
            self._holdings.hold(consumer.plan.resources)
        control = around.keeper.control.get
        stream_name = consumer.options.stream_name
        source = self._sources.get(stream_name)
        policy = require_admitted(consumer.identity, stream_name, self._settings, control(), source)
        if policy is not None and not policy.is_open:
            withhold_errors_of(consumer.name)
        consuming = Consuming(
            name=consumer.name,
            options=consumer.options,
            plan=consumer.plan,
            settings=self._settings,
            leases=around.keeper,
            gate=around.gate,
            losses=around.losses[consumer.name],
            control=control,
            seams=self._seams(consumer, control),
            source=source,
            replay=consumer.replay,
        )
        logs = self._hot_logs
        open_log = logs.own if source is None else partial(logs.of_source, source)
        return Consumer(
            consuming, around.crew, open_log, deployed_at=around.deployed_at, excused=in_handler
        )

    def _seams(
        self, consumer: RegisteredConsumer, control: Callable[[], psycopg.Connection[Any]]
    ) -> ConsumerSeams:
        sends = HandlerSends(self._settings, control)
        return ConsumerSeams(
            open_worker=lambda: self._open_worker(consumer),
            insert_sends=sends.insert,
            caller=lambda worker: limited(
                worker.call,
                worker.cancel,
                name=consumer.name,
                seconds=consumer.options.timeout_seconds,
                is_async=consumer.plan.is_async,
            ),
            around=self._around,
            effects=Effects(
                self._settings.schema, control, consumer.identity, socket.gethostname()
            ),
            tell=sends.tell,
            keys=self.stream_keys(consumer.options.stream_name, control),
        )

    def stream_keys(
        self, stream_name: str, control: Callable[[], psycopg.Connection[Any]]
    ) -> StreamKeys:
        """The wrapped data keys of a stream, this service's or another's."""
        key_sources = KeySources(self._settings, self._hot_logs)
        source = self._sources.get(stream_name)
        if source is None:
            return key_sources.own(stream_name, control)
        return key_sources.of_source(source)

    def rehearse(self, consumer: RegisteredConsumer, entry: Entry) -> Rehearsal:
        """Try a consumer's handler on an event; everything is rolled back."""
        control = ControlConnection(
            self._settings.database_url,
            f"penstock {consumer.name} rehearsal",
            statement_seconds=self._settings.lease_granted_seconds,
        )
        try:
            self._holdings.hold(consumer.plan.resources)
            return RehearsalRoom(
                consumer.name,
                consumer.options,
                consumer.plan,
                schema=self._settings.schema,
                seams=self._seams(consumer, control.get),
            ).rehearse(entry)
        finally:
            self._holdings.close()
            control.close()

    def _open_worker(self, consumer: RegisteredConsumer) -> WorkerConnection:
        return open_worker_connection(
            self._settings.database_url,
            consumer.name,
            is_async=consumer.plan.is_async,
            factory=self._session_factory,
        )


def _tame_garbage_collection() -> None:
    """Everything alive now stays alive; looking through it again costs a fifth of the speed."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
