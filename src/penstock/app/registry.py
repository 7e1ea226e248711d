"""What an application has declared: its streams and consumers, checked as they come in."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.app.streams import Stream
from penstock.core.contract_schema import contract_of
from penstock.core.contracts import Promise, known_classes
from penstock.core.events import Event, RawEvent
from penstock.core.options import ConsumerOptions, Guarantee, Start, require_pipeline_name
from penstock.core.outgoing import UNSET, Unset
from penstock.core.replays import Replay
from penstock.core.require import require
from penstock.core.retry import DEFAULT_RETRY, Retry, RetryFunction
from penstock.core.schema.catalogue import Catalogue, StreamEntry
from penstock.core.sources import Source
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.signature import HandlerPlan, View

_LENT = {View.SESSION: "session", View.CONNECTION: "connection", View.CURSOR: "cursor"}


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer as the application wrote it."""

    name: str
    """The full name, `{pipeline}.{name}`: its identity for ever."""
    options: ConsumerOptions
    plan: HandlerPlan
    replay: Replay | None = None
    """The range that it is for, if it is the temporary consumer of a replay."""

    @property
    def identity(self) -> str:
        """In whose name it calls the outside and is admitted: in a replay, the original's."""
        return self.name if self.replay is None else self.replay.original

    def replaying(self, replay: Replay) -> RegisteredConsumer:
        """The temporary consumer of a replay: the same handler, with the same options."""
        options = dataclasses.replace(self.options, start=replay.first)
        return RegisteredConsumer(replay.name, options, self.plan, replay)


class Registry:
    """Streams and consumers of one pipeline."""

    def __init__(self, pipeline_name: str, *, strict: bool) -> None:
        require_pipeline_name(pipeline_name)
        self._pipeline_name = pipeline_name
        self._strict = strict
        self._streams: dict[str, Stream] = {}
        self._sources: dict[str, Source] = {}
        self._consumers: dict[str, RegisteredConsumer] = {}

    @property
    def consumers(self) -> Mapping[str, RegisteredConsumer]:
        """By short name."""
        return self._consumers

    def named(self, full_name: str) -> RegisteredConsumer:
        """A consumer by its full name. Raises RegistrationError where the application has none."""
        for consumer in self._consumers.values():
            if consumer.name == full_name:
                return consumer
        raise RegistrationError(
            f"The application has no consumer {full_name!r}, so nothing was tried. Name the "
            "application that has it with --app."
        )

    @property
    def promises(self) -> list[Promise]:
        """What the declared streams are going to carry."""
        declared = [(name, event) for name, one in self._streams.items() for event in one.events]
        return [
            Promise(name, event, self._pipeline_name)
            for name, event in declared
            if event.__event_version__ is not None
        ]

    @property
    def own_classes(self) -> list[type[Event]]:
        """Every event class of this process, but for those that only other services send."""
        foreign = {
            event for name in self._sources for event in self._named_by_consumers_of(name)
        } - {event for stream in self._streams.values() for event in stream.events}
        return [event for event in known_classes() if event not in foreign]

    def catalogue(self) -> Catalogue:
        """The streams of this service, as the code has them."""
        names = {*self._streams, *(one.options.stream_name for one in self._consumers.values())}
        return Catalogue(
            title=self._pipeline_name,
            version="code",
            streams=tuple(self._entry(name) for name in sorted(names - self._sources.keys())),
        )

    def _entry(self, name: str) -> StreamEntry:
        declared = self._streams[name].events if name in self._streams else ()
        carried = {*declared, *self._named_by_consumers_of(name)}
        types = {event.__event_type__ for event in carried}
        # Older versions, too: they are in the stream for as long as anybody keeps it.
        contracts = [
            contract_of(event) for event in known_classes() if event.__event_type__ in types
        ]
        return StreamEntry(
            name=name,
            contracts=tuple(contracts),
            producers=(self._pipeline_name,) if declared else (),
            consumers=tuple(
                sorted(
                    one.name for one in self._consumers.values() if one.options.stream_name == name
                )
            ),
        )

    def _named_by_consumers_of(self, stream_name: str) -> list[type[Event]]:
        return [
            event
            for one in self._consumers.values()
            if one.options.stream_name == stream_name
            for named in (one.plan.contracts or {}).values()
            for event in named
        ]

    @property
    def sources(self) -> Mapping[str, Source]:
        """Streams of other services, by name."""
        return self._sources

    def add_source(self, source: Source) -> None:
        """Declare a stream of another service, once."""
        name = source.stream_name
        require(
            name not in self._sources,
            f"pipeline.source({name!r}, …) is written twice. A stream is in one place; keep one.",
            RegistrationError,
        )
        require(name not in self._streams, _both(name), RegistrationError)
        self._sources[name] = source

    @contextmanager
    def owning_sources(self) -> Iterator[None]:
        """Streams of other services as this one's own for a while."""
        sources, streams = self._sources, self._streams
        # Where streams are declared, others may be refused.
        adopted = {name: Stream(name, ()) for name in sources} if streams else {}
        self._sources, self._streams = {}, {**streams, **adopted}
        try:
            yield
        finally:
            self._sources, self._streams = sources, streams

    def declare(self, name: str, events: tuple[type[Event], ...]) -> Stream:
        """Declare a stream; once one is declared, strict mode refuses all others."""
        stream = Stream(name, events)
        require(name not in self._sources, _both(name), RegistrationError)
        for event in events:
            self._require_version(event)
        require(
            self._streams.setdefault(name, stream) == stream,
            f"pipeline.stream({name!r}, …) is written twice, and the events of one of them would "
            "be refused. Name all events of a stream in one place.",
            RegistrationError,
        )
        return stream

    def name_of(self, function: Any, stream_name: str) -> str:
        """The name of a consumer that was given none: its function's, where that is allowed."""
        name = getattr(function, "__name__", "")
        require(
            not self._strict and bool(name),
            f"A consumer of {stream_name!r} has no name. Its name is its identity for ever, so it "
            "must not change with the code: write "
            f'@pipeline.consumer("{stream_name}", name="{name or "bill_order"}").',
            RegistrationError,
        )
        return str(name)

    def options(
        self,
        *,
        start: Start | Unset,
        retry: Retry | RetryFunction | None,
        **chosen: Any,
    ) -> ConsumerOptions:
        """The options as the application wrote them. Raises RegistrationError."""
        options = ConsumerOptions(
            start="earliest" if start is UNSET else start, retry=_policy(retry), **chosen
        )
        require(
            not self._strict or start is not UNSET or options.guarantee is Guarantee.EXACTLY_ONCE,
            f"Consumer {options.name!r} cannot be registered: without EXACTLY_ONCE it has to say "
            "where it begins, since effects on old events cannot be taken back. Write "
            'start="latest" for new events only, or start="earliest" for all that there are.',
            RegistrationError,
        )
        return options

    def add(self, options: ConsumerOptions, plan: HandlerPlan) -> RegisteredConsumer:
        """Register a consumer. Raises RegistrationError with what to change."""
        require(
            options.name not in self._consumers,
            f"Consumer {options.name!r} is registered twice. Its name is its identity: "
            "give each consumer its own.",
            RegistrationError,
        )
        self._require_known_stream(options.stream_name)
        for contracts in (plan.contracts or {}).values():
            for contract in contracts:
                self._require_version(contract)
        _require_nothing_lent(options, plan)
        self._require_order(options, plan)
        consumer = RegisteredConsumer(f"{self._pipeline_name}.{options.name}", options, plan)
        self._consumers[options.name] = consumer
        return consumer

    def admit(self, stream_name: str, event: Event | RawEvent) -> None:
        """Refuse another service's stream and, in strict mode, what was never declared."""
        if stream_name in self._sources:
            raise UsageError(
                f"Stream {stream_name!r} belongs to another service, which alone sends to it. "
                "Nothing was sent; send to a stream of your own, and let that service read it."
            )
        if not self._strict:
            return
        if isinstance(event, Event):
            self._require_version(type(event))
        self._require_known_stream(stream_name)
        stream = self._streams.get(stream_name)
        if stream is not None and stream.events:
            known = [declared.__event_type__ for declared in stream.events]
            event_type = event.__event_type__ if isinstance(event, Event) else event.event_type
            # Not `require`: its message would be made for every event, and looking for similar
            # names costs more than all the rest of a send.
            if event_type not in known:
                raise UsageError(
                    f"Stream {stream_name!r} does not carry {event_type!r}"
                    f"{_suggestion(event_type, known)} Nothing was sent. Declare the type with "
                    f"pipeline.stream({stream_name!r}, …), or build the pipeline with strict=False."
                )

    def _require_known_stream(self, name: str) -> None:
        if name in self._sources:
            return
        if self._strict and self._streams and name not in self._streams:
            known = [*self._streams, *self._sources]
            raise RegistrationError(
                f"Stream {name!r} is not declared{_suggestion(name, known)} "
                f"Declare it with pipeline.stream({name!r}, …), or build the pipeline with "
                "strict=False."
            )

    def _require_order(self, options: ConsumerOptions, plan: HandlerPlan) -> None:
        """A key is there for its order; giving that up is a choice that has to be written."""
        if not self._strict or options.order != "none" or options.allow_reordering:
            return
        stream = self._streams.get(options.stream_name)
        classes = [contract for named in (plan.contracts or {}).values() for contract in named]
        if plan.contracts is None and stream is not None:
            classes = list(stream.events)
        for event in classes:
            require(
                event.__event_key__ is None,
                f"Consumer {options.name!r} cannot be registered: {event.__name__} has "
                f'key="{event.__event_key__}", but order="none" lets its events overtake each '
                'other when one fails. Write order="key", or allow_reordering=True if the order '
                "does not matter to this consumer.",
                RegistrationError,
            )

    def _require_version(self, event: type[Event]) -> None:
        require(
            not self._strict or event.__event_version__ is not None,
            f"Event class {event.__name__} has no version. Write "
            f'class {event.__name__}(Event, type="{event.__event_type__}", version=1).',
            RegistrationError,
        )


def _both(name: str) -> str:
    return (
        f"Stream {name!r} is declared with pipeline.stream, as this service's own, and with "
        "pipeline.source, as another's. A stream has one producing service: keep one of the two."
    )


def _policy(retry: Retry | RetryFunction | None) -> Retry:
    if retry is None:
        return DEFAULT_RETRY
    return retry if isinstance(retry, Retry) or not callable(retry) else Retry.by(retry)


def _require_nothing_lent(options: ConsumerOptions, plan: HandlerPlan) -> None:
    """Only exactly once does a handler run inside of the worker's transaction."""
    lent = next((view for view in plan.parameters if view in _LENT), None)
    if options.guarantee is Guarantee.EXACTLY_ONCE or lent is None:
        return
    if options.guarantee is Guarantee.AT_LEAST_ONCE:
        word = "async with" if plan.is_async else "with"
        write = (
            f"context: Context as a parameter and {word} context.complete() as session: in the "
            "handler, which commits its last writes together with the checkpoint"
        )
    else:
        write = "with Session(pipeline.engine) as session, session.begin(): in the handler"
        if plan.is_async:
            write = (
                "async with AsyncSession(pipeline.async_engine) as session, session.begin(): in "
                "the handler"
            )
    raise RegistrationError(
        f"Consumer {options.name!r} cannot be registered: its handler asks for a {_LENT[lent]}, "
        f"but under {options.guarantee.name} it runs outside of the worker's transaction. Write "
        f"{write}; or choose Guarantee.EXACTLY_ONCE."
    )


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
