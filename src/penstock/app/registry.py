"""What an application has declared: its streams and consumers, checked as they come in."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.events import Event, RawEvent
from penstock.core.options import ConsumerOptions
from penstock.core.require import require
from penstock.errors import RegistrationError, UsageError
from penstock.pipeline.signature import HandlerPlan


@dataclass(frozen=True, slots=True)
class Stream:
    """A declared stream and the events that it carries; none named: any."""

    name: str
    events: tuple[type[Event], ...]


@dataclass(frozen=True, slots=True)
class RegisteredConsumer:
    """A consumer as the application wrote it."""

    name: str
    """The full name, `{pipeline}.{name}`: its identity for ever."""
    options: ConsumerOptions
    plan: HandlerPlan


class Registry:
    """Streams and consumers of one pipeline."""

    def __init__(self, pipeline_name: str, *, strict: bool) -> None:
        self._pipeline_name = pipeline_name
        self._strict = strict
        self._streams: dict[str, Stream] = {}
        self._consumers: dict[str, RegisteredConsumer] = {}

    @property
    def consumers(self) -> Mapping[str, RegisteredConsumer]:
        """By short name."""
        return self._consumers

    def declare(self, name: str, events: tuple[type[Event], ...]) -> Stream:
        """Declare a stream; once one is declared, strict mode refuses all others."""
        for event in events:
            self._require_version(event)
        stream = self._streams[name] = Stream(name, events)
        return stream

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
        consumer = RegisteredConsumer(f"{self._pipeline_name}.{options.name}", options, plan)
        self._consumers[options.name] = consumer
        return consumer

    def admit(self, stream_name: str, event: Event | RawEvent) -> None:
        """Refuse, in strict mode, to send what was never declared."""
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
        if self._strict and self._streams and name not in self._streams:
            raise RegistrationError(
                f"Stream {name!r} is not declared{_suggestion(name, list(self._streams))} "
                f"Declare it with pipeline.stream({name!r}, …), or build the pipeline with "
                "strict=False."
            )

    def _require_version(self, event: type[Event]) -> None:
        require(
            not self._strict or event.__event_version__ is not None,
            f"Event class {event.__name__} has no version. Write "
            f'class {event.__name__}(Event, type="{event.__event_type__}", version=1).',
            RegistrationError,
        )


def _suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "."
