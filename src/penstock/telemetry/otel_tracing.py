"""Spans through OpenTelemetry: send, publish, batch, handle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation import set_span_in_context

from penstock.core.trace_context import TraceContext, from_metadata
from penstock.core.wire import Entry, Hole, decode_record
from penstock.errors import AlreadyHandled, ContractError, LockContention, MalformedEntry
from penstock.telemetry.tracing import LINKS_MAX, SYSTEM, Call

OUTCOME: Final = "penstock.outcome"
SETTLED: Final = "settled"
FAILED: Final = "failed"
UNSETTLED: Final = "unsettled"
UNKNOWN: Final = "unknown"

_SERVICE_NAMES = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


class OpenTelemetryTracer:
    """Makes spans of whatever provider the process has."""

    def __init__(self) -> None:
        self._provider: object = None
        self._tracer: trace.Tracer = trace.NoOpTracer()

    def _start(self, name: str, kind: SpanKind, **options: Any) -> Span:
        provider = trace.get_tracer_provider()
        if provider is not self._provider:
            self._tracer, self._provider = provider.get_tracer(SYSTEM), provider
        # What an error says may quote the event it happened on: of errors, spans tell the kind.
        return self._tracer.start_span(
            name, kind=kind, record_exception=False, set_status_on_exception=False, **options
        )

    @contextmanager
    def sending(self, stream_name: str, count: int) -> Iterator[None]:
        """Around a send."""
        span = self._start(
            f"send {stream_name}",
            SpanKind.PRODUCER,
            attributes=_about(stream_name, "send") | {"messaging.batch.message_count": count},
        )
        with _current(span):
            yield

    def current_metadata(self) -> dict[str, str]:
        """What an event that is sent now carries."""
        span = trace.get_current_span().get_span_context()
        if not span.is_valid:
            return {}
        return TraceContext(
            trace.format_trace_id(span.trace_id),
            trace.format_span_id(span.span_id),
            int(span.trace_flags),
            span.trace_state.to_header(),
        ).as_metadata()

    @contextmanager
    def publishing(
        self, stream_name: str, rows: Sequence[tuple[int, str]], *, is_fresh: bool
    ) -> Iterator[None]:
        """Around the append of a batch; fresh events have a span in their own traces, too."""
        attributes = _about(stream_name, "publish")
        causes = _causes(stream_name, rows)
        began_at = time.time_ns()
        span = self._start(
            f"publish {stream_name}",
            SpanKind.INTERNAL,
            context=contexts.Context(),
            attributes=attributes
            | {"messaging.batch.message_count": len(rows), "penstock.is_refill": not is_fresh},
            links=[Link(cause) for _, cause in causes],
            start_time=began_at,
        )
        with _current(span):
            yield
        if not is_fresh:
            return
        ended_at = time.time_ns()
        for position, cause in causes:
            self._start(
                f"publish {stream_name}",
                SpanKind.PRODUCER,
                context=_below(cause),
                attributes=attributes | {"penstock.position": position},
                links=[Link(span.get_span_context())],
                start_time=began_at,
            ).end(ended_at)

    @contextmanager
    def batch(
        self, consumer: str, entries: Sequence[Entry], attempt: int
    ) -> Iterator[OpenTelemetryBatch]:
        """Around one attempt to settle a batch; a trace of its own, which those of events link."""
        attributes = _about(entries[0].stream_name, "process")
        span = self._start(
            f"batch {consumer}",
            SpanKind.INTERNAL,
            context=contexts.Context(),
            attributes=attributes
            | {
                "messaging.consumer.group.name": consumer,
                "messaging.batch.message_count": len(entries),
                "penstock.first": entries[0].position,
                "penstock.last": entries[-1].position,
                "penstock.attempt": attempt,
            },
        )
        batch = OpenTelemetryBatch(span)
        token = _batch.set(batch)
        attached = contexts.attach(set_span_in_context(span))
        try:
            yield batch
        finally:
            contexts.detach(attached)
            _batch.reset(token)
            batch.end()

    @contextmanager
    def handling(self, call: Call) -> Iterator[None]:
        """Around one call of a handler. How it came out is known when its batch has ended."""
        batch = _batch.get()
        links = [] if batch is None else [Link(batch.span.get_span_context())]
        first = call.entries[0]
        attributes = _about(first.stream_name, "process") | {
            "messaging.consumer.group.name": call.consumer,
            "penstock.attempt": call.attempt,
            "penstock.is_replay": call.is_replay,
            "penstock.position": first.position,
        }
        if call.is_list:
            parent = contexts.get_current()
            links += [Link(cause) for cause in map(_cause, call.entries[:LINKS_MAX]) if cause]
            attributes["messaging.batch.message_count"] = len(call.entries)
        else:
            parent = _below(_cause(first))
            attributes["messaging.message.id"] = first.event_uuid
            attributes["penstock.event_type"] = first.event_type
        span = self._start(
            f"handle {call.consumer}",
            SpanKind.CONSUMER,
            context=parent,
            attributes=attributes,
            links=links,
        )
        attached = contexts.attach(set_span_in_context(span))
        try:
            yield
        except BaseException as error:
            _fail(span, error)
            span.set_attribute(OUTCOME, FAILED)
            span.end()
            raise
        else:
            if batch is None:
                span.end()
            else:
                batch.calls.append((span, time.time_ns()))
        finally:
            contexts.detach(attached)

    @contextmanager
    def timer(
        self, consumer: str, topic: str, headers: Mapping[str, str], attempt: int
    ) -> Iterator[None]:
        """Around one attempt at a timer of Redis."""
        span = self._start(
            f"handle {consumer}",
            SpanKind.CONSUMER,
            context=_below(_remote(from_metadata(headers))),
            attributes=_about(topic, "process")
            | {"messaging.consumer.group.name": consumer, "penstock.attempt": attempt},
        )
        # What was handled before, or is in other hands, has not failed.
        with _current(span, expected=(AlreadyHandled, LockContention)):
            yield


class OpenTelemetryBatch:
    """A batch's span, and those of its handlers' calls until it is known what became of them."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.calls: list[tuple[Span, int]] = []
        """Calls that returned, and when."""
        self._outcome = SETTLED

    def fail(self, error: BaseException, *, is_known: bool = True) -> None:
        """Nothing of it is settled; where that is not known, the checkpoint tells."""
        _fail(self.span, error)
        self._outcome = UNSETTLED if is_known else UNKNOWN

    def end(self) -> None:
        """Say what became of the batch and of every call in it."""
        for span, ended_at in [*self.calls, (self.span, None)]:
            span.set_attribute(OUTCOME, self._outcome)
            span.end(ended_at)


_batch: ContextVar[OpenTelemetryBatch | None] = ContextVar("penstock_traced_batch", default=None)


def provide(service_name: str) -> None:
    """Export to where the environment says, unless the application has its own provider."""
    if not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return
    # Here and not above: an application's own provider need not be the SDK's.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    named, described = (os.environ.get(name, "") for name in _SERVICE_NAMES)
    is_named = bool(named) or "service.name=" in described
    provider = TracerProvider(
        resource=Resource.create({} if is_named else {"service.name": service_name}),
        # Its end would wait for a collector that is away; `flush` has a limit.
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


@contextmanager
def _current(span: Span, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    attached = contexts.attach(set_span_in_context(span))
    try:
        yield
    except expected:
        raise
    except BaseException as error:
        _fail(span, error)
        raise
    finally:
        contexts.detach(attached)
        span.end()


def _about(stream_name: str, operation: str) -> dict[str, Any]:
    return {
        "messaging.system": SYSTEM,
        "messaging.destination.name": stream_name,
        "messaging.operation.name": operation,
    }


def _fail(span: Span, error: BaseException) -> None:
    name = type(error).__name__
    span.set_attribute("error.type", name)
    span.set_status(StatusCode.ERROR, name)


def _causes(stream_name: str, rows: Sequence[tuple[int, str]]) -> list[tuple[int, SpanContext]]:
    """The contexts that events were sent in; of sealed ones nobody here can know."""
    causes: list[tuple[int, SpanContext]] = []
    for position, body in rows:
        if len(causes) == LINKS_MAX:
            break
        if '"traceparent"' not in body:
            continue
        try:
            record = decode_record(stream_name, position, body.encode())
        except MalformedEntry:
            continue
        if not isinstance(record, Hole) and not record.key_id and (cause := _cause(record)):
            causes.append((position, cause))
    return causes


def _cause(entry: Entry) -> SpanContext | None:
    try:
        metadata = entry.metadata()
    except ContractError:
        return None
    # Of a sealed event only what is random goes on, here as in what its handler sends.
    return _remote(from_metadata(metadata, with_state=not entry.key_id))


def _remote(found: TraceContext | None) -> SpanContext | None:
    if found is None:
        return None
    return SpanContext(
        int(found.trace_id, 16),
        int(found.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(found.flags),
        trace_state=trace.TraceState.from_header([found.state]) if found.state else None,
    )


def _below(cause: SpanContext | None) -> contexts.Context:
    """Where a span begins that an event has caused; without a cause, a trace of its own."""
    if cause is None:
        return contexts.Context()
    return set_span_in_context(NonRecordingSpan(cause), contexts.Context())
