"""The public face: one object that an application sends through and registers consumers with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import cached_property, partial
from typing import Any, TypeVar

import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import sessionmaker

from penstock.app.registry import RegisteredConsumer, Registry
from penstock.app.sources import REDIS_PREFIX, checked_source
from penstock.app.streams import Stream, require_stream_name
from penstock.app.timer_handlers import TimerHandlers
from penstock.app.timer_queue import TimerQueue, timer_queue
from penstock.app.timer_surface import TimerSurface
from penstock.app.timer_workers import TimerWorkers
from penstock.app.workers import Workers
from penstock.core.contract_schema import contract_of
from penstock.core.events import Event
from penstock.core.options import (
    Guarantee,
    OnExhausted,
    OnUnknown,
    OnUnknownVersion,
    Order,
    Start,
)
from penstock.core.outgoing import UNSET, Unset
from penstock.core.replays import Replay, ReplayProgress
from penstock.core.retry import Retry, RetryFunction
from penstock.core.schema.catalogue import Catalogue, Contract
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.core.wire import Entry
from penstock.pipeline.rehearsal import Rehearsal
from penstock.pipeline.seams import insisting
from penstock.pipeline.sending import Sender
from penstock.pipeline.signature import read_signature
from penstock.pipeline.transaction_buffer import watch
from penstock.runtime.heartbeat import Pulse
from penstock.stores.configuration import ResolvedSettings, resolve
from penstock.stores.contracts import require_kept
from penstock.stores.engines import adopt
from penstock.stores.postgres import connect, connect_arguments, sqlalchemy_url
from penstock.stores.queries import DEFAULT_SCHEMA
from penstock.stores.stream_keys import StreamKeys
from penstock.telemetry import tracing
from penstock.telemetry.bus import require_signal, require_subscriber, subscribe
from penstock.telemetry.signals import EventBuried, KeyBacklogged, KeyHeld, Signal

Handler = TypeVar("Handler", bound=Callable[..., Any])
SignalT = TypeVar("SignalT", bound=Signal)
TroubleSignal = EventBuried | KeyHeld | KeyBacklogged


class Pipeline(TimerHandlers, TimerSurface):
    """Sends events in your transactions and has them handled exactly once."""

    def __init__(
        self,
        name: str,
        *,
        database_url: Any = UNSET,
        redis_url: Any = UNSET,
        strict: bool = True,
        session_factory: sessionmaker[Any] | async_sessionmaker[Any] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        **settings: Any,
    ) -> None:
        self.name = name
        self._arguments = {"database_url": database_url, "redis_url": redis_url, **settings}
        self._registry = Registry(name, strict=strict)
        self._session_factory = session_factory
        self._around = insisting(around)

    # ── settings and connections, made at first use so that importing costs nothing ───────────

    @cached_property
    def resolved(self) -> ResolvedSettings:
        """The settings, each with its origin."""
        return resolve(self._arguments)

    @property
    def settings(self) -> Settings:
        """The settings of this pipeline."""
        return self.resolved.settings

    @cached_property
    def engine(self) -> Engine:
        """A SQLAlchemy engine on the pipeline's database."""
        engine = create_engine(
            sqlalchemy_url(self.settings.database_url),
            # A server that was away in between has taken the pool's connections with it.
            pool_pre_ping=True,
            connect_args=connect_arguments(f"penstock {self.name}"),
        )
        # Before any thread uses it: listeners must not be added while others are inside them.
        watch(engine)
        adopt(engine)
        return engine

    @cached_property
    def async_engine(self) -> AsyncEngine:
        """The same for asyncio."""
        engine = create_async_engine(
            sqlalchemy_url(self.settings.database_url),
            pool_pre_ping=True,
            connect_args=connect_arguments(f"penstock {self.name}"),
        )
        watch(engine.sync_engine)
        adopt(engine.sync_engine)
        return engine

    @cached_property
    def timers(self) -> TimerQueue:
        """Timers in Redis, for callers without a session; nobody has to name a database."""
        return timer_queue(resolve(self._arguments, needs_database=False).settings)

    @cached_property
    def _sender(self) -> Sender:
        return Sender(
            schema=self.settings.schema,
            payload_bytes_max=self.settings.payload_bytes_max,
            metadata_bytes_max=self.settings.metadata_bytes_max,
            admit=self._registry.admit,
            producer=self.name,
        )

    # ── declaring ─────────────────────────────────────────────────────────────────────────────

    def stream(self, name: str, *events: type[Event]) -> Stream:
        """Declare a stream and the events that it carries."""
        return self._registry.declare(name, events)

    def source(
        self,
        name: str,
        *,
        redis_url: str | Unset | None = UNSET,
        redis_prefix: str = REDIS_PREFIX,
        mac_key: str | None = None,
        source_url: str | None = None,
        source_schema: str = DEFAULT_SCHEMA,
        archive_url: str | None = None,
        brownout: bool = False,
    ) -> None:
        """Declare a stream of another service, for consumers of this one.

        They read its hot log (redis_url; left out: the pipeline's own) and, for what that no longer
        holds, its database (source_url) and its archive (archive_url). Entries of the hot log are
        checked with mac_key, or with the keys that its database tells. `penstock streams share`,
        over there, prints what to write here.
        """
        self._registry.add_source(
            checked_source(
                name,
                redis_url=redis_url,
                redis_prefix=redis_prefix,
                mac_key=mac_key,
                source_url=source_url,
                source_schema=source_schema,
                archive_url=archive_url,
                brownout=brownout,
            )
        )

    def consumer(
        self,
        stream: str,
        *,
        name: str | None = None,
        guarantee: Guarantee | str = Guarantee.EXACTLY_ONCE,
        start: Start | Unset = UNSET,
        order: Order = "key",
        lanes: int = 1,
        batch_size: int = 100,
        batch_seconds: float = 1.0,
        timeout_seconds: float | None = None,
        retry: Retry | RetryFunction | None = None,
        on_exhausted: OnExhausted = "bury",
        on_unknown: OnUnknown = "skip",
        on_unknown_version: OnUnknownVersion = "block",
        allow_reordering: bool = False,
    ) -> Callable[[Handler], Handler]:
        """Register a function as a consumer of a stream; the function stays as it is."""
        require_stream_name(stream)
        options_for = partial(
            self._registry.options,
            stream_name=stream,
            guarantee=guarantee,
            start=start,
            order=order,
            lanes=lanes,
            batch_size=batch_size,
            batch_seconds=batch_seconds,
            timeout_seconds=timeout_seconds,
            retry=retry,
            on_exhausted=on_exhausted,
            on_unknown=on_unknown,
            on_unknown_version=on_unknown_version,
            allow_reordering=allow_reordering,
        )
        named = None if name is None else options_for(name=name)

        def register(function: Handler) -> Handler:
            options = named or options_for(name=self._registry.name_of(function, stream))
            plan = read_signature(function, options.name, self._resources)
            self._registry.add(options, plan)
            return function

        return register

    @property
    def consumers(self) -> Mapping[str, RegisteredConsumer]:
        """The registered consumers, by short name."""
        return self._registry.consumers

    def on(
        self, signal_type: type[SignalT]
    ) -> Callable[[Callable[[SignalT], None]], Callable[[SignalT], None]]:
        """Subscribe a function to a signal."""
        require_signal(signal_type)

        def register(subscriber: Callable[[SignalT], None]) -> Callable[[SignalT], None]:
            require_subscriber(subscriber)
            subscribe(signal_type, subscriber)
            return subscriber

        return register

    def on_dead_letter(
        self, told: Callable[[TroubleSignal], None]
    ) -> Callable[[TroubleSignal], None]:
        """Subscribe a function to everything that needs a person, of this pipeline's consumers.

        An event buried, a key held, or a key with more than parked_per_key_max waiting. It is
        called in the worker, after the commit. Set dead_letter_stream to have events instead,
        sent in that very transaction.
        """
        require_subscriber(told)

        def tell_own(signal: Any) -> None:
            if signal.consumer.startswith(f"{self.name}."):
                told(signal)

        for kind in (EventBuried, KeyHeld, KeyBacklogged):
            subscribe(kind, tell_own)
        return told

    def register_contracts(self) -> None:
        """Record what the declared streams carry. Raises ContractError where that breaks a promise.

        `penstock run` does it when it starts, and every first send for its own event; an
        application that only sends may call it when it starts, to find out before it does.
        """
        if promises := self._registry.promises:
            with connect(self.settings.database_url, f"penstock {self.name}") as connection:
                require_kept(connection, self.settings.schema, promises)

    def contracts(self) -> list[Contract]:
        """The contracts of this application's event classes, by type and version."""
        return [contract_of(event_class) for event_class in self._registry.own_classes]

    def catalogue(self) -> Catalogue:
        """The streams of this application with their contracts, producers and consumers."""
        return self._registry.catalogue()

    @property
    def sources(self) -> Mapping[str, Source]:
        """The streams of other services, by name."""
        return self._registry.sources

    # ── working ───────────────────────────────────────────────────────────────────────────────

    def run_worker(
        self,
        roles: Sequence[str],
        stop: threading.Event,
        worker_id: str | None = None,
        *,
        deployed_at: datetime | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        """Work in this process until stopped: `publisher`, `consumer:{name}`."""
        with tracing.exported(self.name):
            self._workers().run(roles, stop, worker_id, deployed_at=deployed_at, pulse=pulse)

    def run_replay(
        self,
        replay: Replay,
        stop: threading.Event,
        *,
        on_look: Callable[[ReplayProgress], None] = lambda _progress: None,
    ) -> None:
        """Work in this process on a replay that is in the books, until stopped or at its end.

        `on_look` is told now and then, in another thread, how far it is.
        """
        consumer = self._registry.named(replay.original)
        with tracing.exported(self.name):
            self._workers().run_replay(replay, consumer, stop, on_look=on_look)

    def rehearse(self, consumer: str, entry: Entry) -> Rehearsal:
        """Try the handler of an exactly-once consumer, by its full name, on an event.

        It is called as in a worker; its transaction is rolled back, and `once` calls nothing.
        """
        return self._workers().rehearse(self._registry.named(consumer), entry)

    def stream_keys(
        self, stream_name: str, control: Callable[[], psycopg.Connection[Any]]
    ) -> StreamKeys:
        """The wrapped data keys of a stream, this service's or another's."""
        return self._workers().stream_keys(stream_name, control)

    def check_hot_log(self) -> None:
        """Raise ServerUnsuitable or ServerUnavailable if the hot log cannot be used now."""
        self._workers().check_hot_log()

    def _workers(self) -> Workers:
        return Workers(
            self.settings,
            self._registry.consumers,
            sources=self._registry.sources,
            session_factory=self._session_factory,
            around=self._around,
            timers=TimerWorkers(
                self.settings,
                self.timer_handlers,
                open_store=self._open_timer_store,
                session_factory=self._session_factory,
                around=self._around,
            ),
        )
