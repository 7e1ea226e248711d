"""What is made a span, below which, and what no span ever tells."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState
from opentelemetry.trace.propagation import set_span_in_context

from penstock import FatalError, Pipeline, RawEvent, Retry, StreamEvent
from penstock.app.timer_queue import _headers
from penstock.core.isolation import Batch
from penstock.core.options import Guarantee
from penstock.core.timer_messages import TimerMessage
from penstock.core.wire import Entry
from penstock.errors import AlreadyHandled, LeaseLost, LockContention, ServerUnavailable
from penstock.pipeline.sending import Sender
from penstock.pipeline.traced import traced
from penstock.telemetry import tracing
from tests.bench_of_one import Workbench, run_until_idle
from tests.timers_at_work import working
from tests.vault import STREAM, Vault, new_key_file
from tests.waiting import wait_until

OTHERS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CANARY = "canary-81ac"
SENDER = Sender(schema="events", payload_bytes_max=10_000, metadata_bytes_max=10_000)


class Spans:
    """What was recorded in this process."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def text(self) -> str:
        return "".join(span.to_json() for span in self._exporter.get_finished_spans())


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """A provider that is gone after the test; the API itself lets none go."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    tracing.forget_provider()
    yield Spans(exporter)
    provider.shutdown()
    tracing.forget_provider()


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    yield bench
    bench.close()


def send(bench: Workbench, *numbers: int, **options: Any) -> None:
    """One call of send for each, in one transaction."""
    with bench.connection.transaction():
        for n in numbers:
            event = RawEvent("placed", {"n": n, "secret": CANARY})
            SENDER.send(bench.connection, "orders", event, key=str(n), **options)


def metadata(bench: Workbench, n: int = 1) -> dict[str, Any]:
    row = bench.connection.execute(
        "SELECT metadata FROM events.outbox_event ORDER BY id OFFSET %s", (n - 1,)
    ).fetchone()
    assert row is not None
    stored: dict[str, Any] = row[0]
    return {name: value for name, value in stored.items() if not name.startswith("__")}


def header_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def span_id(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def outcomes(spans: list[ReadableSpan]) -> list[tuple[Any, Any]]:
    told = [span.attributes or {} for span in spans]
    return sorted((each["penstock.position"], each["penstock.outcome"]) for each in told)


# ── sending ────────────────────────────────────────────────────────────────────────────────────


def test_without_a_provider_nothing_is_traced(bench: Workbench) -> None:
    assert tracing.active() is None
    send(bench, 1)
    assert metadata(bench) == {}


def test_an_event_carries_the_span_that_sends_it(bench: Workbench, spans: Spans) -> None:
    with trace.get_tracer("app").start_as_current_span("checkout") as checkout:
        send(bench, 1)
    (sent,) = spans.named("send orders")
    assert parent_of(sent) == checkout.get_span_context().span_id
    assert metadata(bench) == {"traceparent": header_of(sent)}


def test_what_the_caller_says_about_the_trace_is_kept_whole(bench: Workbench, spans: Spans) -> None:
    state = TraceState([("vendor", "x")])
    outside = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1), trace_state=state)
    token = contexts.attach(set_span_in_context(NonRecordingSpan(outside)))
    try:
        send(bench, 1, metadata={"traceparent": OTHERS, "note": "mine"})
        send(bench, 2, metadata={"note": "mine"})
    finally:
        contexts.detach(token)
    assert metadata(bench, 1) == {"traceparent": OTHERS, "note": "mine"}
    sent = spans.named("send orders")[1]
    assert metadata(bench, 2) == {
        "traceparent": header_of(sent),
        "tracestate": "vendor=x",
        "note": "mine",
    }


def test_a_span_from_outside_is_passed_on_also_where_nobody_records(bench: Workbench) -> None:
    outside = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1))
    token = contexts.attach(set_span_in_context(NonRecordingSpan(outside)))
    try:
        send(bench, 1)
    finally:
        contexts.detach(token)
    assert metadata(bench) == {"traceparent": f"00-{7:032x}-{8:016x}-01"}


def test_a_send_that_is_refused_says_so_without_its_values(bench: Workbench, spans: Spans) -> None:
    with pytest.raises(Exception, match="Nothing was sent"):
        SENDER.send_many(bench.connection, "orders", [RawEvent(CANARY, {"n": 1})], event_uuids=[])
    (sent,) = spans.named("send orders")
    assert not sent.status.is_ok
    assert CANARY not in spans.text()


# ── publishing ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("has_log", [True, False])
def test_a_published_batch_is_linked_with_those_who_sent_it(
    database_url: str, redis_url: str, spans: Spans, *, has_log: bool
) -> None:
    bench = Workbench(database_url, redis_url if has_log else None)
    send(bench, 1, 2)
    send(bench, 3, metadata={"traceparent": "of no trace"})
    bench.publish()
    bench.close()
    sent = spans.named("send orders")
    (batch, *each) = sorted(spans.named("publish orders"), key=lambda span: len(span.links) != 2)
    assert [link.context.span_id for link in batch.links] == [span_id(one) for one in sent[:2]]
    assert batch.parent is None
    assert [parent_of(one) for one in each] == [span_id(one) for one in sent[:2]]
    assert {link.context.span_id for one in each for link in one.links} == {span_id(batch)}


def test_a_batch_has_a_bounded_number_of_links(
    bench: Workbench, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.telemetry.otel_tracing.LINKS_MAX", 4)
    send(bench, *range(1, 8))

    def handler(events: list[StreamEvent[Any]]) -> None: ...

    bench.publish()
    run_until_idle(bench.consumer(handler))
    assert max(len(span.links) for span in spans.named("publish orders")) == 4
    (listed,) = spans.named("handle test.consumer")
    assert len(listed.links) == 1 + 4


# ── handling ───────────────────────────────────────────────────────────────────────────────────


def test_a_handler_runs_below_the_send_of_its_event(bench: Workbench, spans: Spans) -> None:
    seen: list[int] = []

    def handler(event: StreamEvent[Any], connection: psycopg.Connection[Any]) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)
        SENDER.send(connection, "invoices", RawEvent("invoiced", {}))

    send(bench, 1, 2)
    bench.publish()
    run_until_idle(bench.consumer(handler))
    calls = spans.named("handle test.consumer")
    assert [span_id(call) for call in calls] == seen
    assert [parent_of(call) for call in calls] == [
        span_id(one) for one in spans.named("send orders")
    ]
    assert outcomes(calls) == [(1, "settled"), (2, "settled")]
    assert [parent_of(one) for one in spans.named("send invoices")] == seen
    (batch,) = spans.named("batch test.consumer")
    assert {link.context.span_id for call in calls for link in call.links} == {span_id(batch)}
    assert metadata(bench, 3)["traceparent"] == header_of(spans.named("send invoices")[0])
    attributes = dict(calls[0].attributes or {})
    assert len(str(attributes.pop("messaging.message.id"))) == 36
    assert attributes == {
        "messaging.system": "penstock",
        "messaging.destination.name": "orders",
        "messaging.operation.name": "process",
        "messaging.consumer.group.name": "test.consumer",
        "penstock.attempt": 1,
        "penstock.is_replay": False,
        "penstock.position": 1,
        "penstock.event_type": "placed",
        "penstock.outcome": "settled",
    }


def test_an_event_without_a_trace_begins_one(bench: Workbench, spans: Spans) -> None:
    def handler(event: StreamEvent[Any]) -> None: ...

    bench.send()
    bench.publish()
    run_until_idle(bench.consumer(handler))
    (call,) = spans.named("handle test.consumer")
    assert call.parent is None


def test_a_replayed_batch_tells_what_was_rolled_back(bench: Workbench, spans: Spans) -> None:
    def handler(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        if event.position == 2:
            raise FatalError(f"of {event.payload}")

    send(bench, 1, 2, 3)
    bench.publish()
    run_until_idle(bench.consumer(handler))
    calls = spans.named("handle test.consumer")
    assert outcomes(calls) == [
        (1, "settled"),
        (1, "unsettled"),
        (2, "failed"),
        (2, "failed"),
        (3, "settled"),
    ]
    sends = [span_id(one) for one in spans.named("send orders")]
    for call in calls:
        position = (call.attributes or {})["penstock.position"]
        assert parent_of(call) == sends[int(str(position)) - 1]
        assert call.status.is_ok is (position != 2)
    assert CANARY not in spans.text()


async def _awaiting(event: StreamEvent[Any]) -> None:
    with trace.get_tracer("app").start_as_current_span("own"):
        if event.position == 2:
            raise ValueError(CANARY)


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_every_guarantee_and_a_coroutine_are_traced(
    bench: Workbench, spans: Spans, guarantee: Guarantee
) -> None:
    send(bench, 1, 2, 3)
    bench.publish()
    run_until_idle(bench.consumer(_awaiting, guarantee=guarantee, start="earliest"))
    calls = spans.named("handle test.consumer")
    assert {(1, "settled"), (2, "failed"), (3, "settled")} <= set(outcomes(calls))
    own = [parent_of(one) for one in spans.named("own")]
    assert own == [span_id(call) for call in sorted(calls, key=lambda call: call.start_time or 0)]
    assert tracing.active() is not None
    assert not trace.get_current_span().get_span_context().is_valid


@pytest.mark.parametrize("error", [AlreadyHandled, LockContention])
def test_a_timer_that_others_have_in_hand_has_not_failed(
    spans: Spans, error: type[Exception]
) -> None:
    tracer = tracing.active()
    assert tracer is not None
    with suppress(error), tracer.timer("shop.timer:late", "late", {}, 1):
        raise error("elsewhere")
    (handled,) = spans.named("handle shop.timer:late")
    assert handled.status.status_code.name == "UNSET"


def test_a_timer_carries_a_trace_whole() -> None:
    state = TraceState([("vendor", "x")])
    outside = SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1), trace_state=state)
    token = contexts.attach(set_span_in_context(NonRecordingSpan(outside)))
    try:
        carried = _headers(None, None, "c", "")
        given = _headers({"traceparent": OTHERS}, None, "c", "")
    finally:
        contexts.detach(token)
    assert carried.keys() == {"correlation_id", "traceparent", "tracestate"}
    assert given == {"correlation_id": "c", "traceparent": OTHERS}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_timer_of_redis_is_handled_below_what_published_it(
    database_url: str, redis_url: str, spans: Spans, is_async: bool
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)
    inside: list[str] = []

    def handle(message: TimerMessage) -> None:
        inside.append(tracing.carried_metadata()["traceparent"])
        if message.attempt == 1:
            raise ValueError(CANARY)

    async def handle_async(message: TimerMessage) -> None:
        handle(message)

    retry = Retry.fixed(seconds=0.01, attempts_max=2)
    pipeline.timer("late", retry=retry)(handle_async if is_async else handle)
    with trace.get_tracer("test").start_as_current_span("asked") as asked:
        pipeline.timers.publish({"n": 1}, topic="late")
        pipeline.timers.publish({"n": 2}, topic="late", headers={"traceparent": OTHERS})
    with working(pipeline, "late"), closing(pipeline.timers):
        wait_until(lambda: len(spans.named("handle shop.timer:late")) == 4, what="both are handled")
    handled = spans.named("handle shop.timer:late")
    assert {header_of(span) for span in handled} == set(inside)
    parents = [asked.get_span_context().span_id, int(OTHERS.split("-")[2], 16)]
    assert Counter(map(parent_of, handled)) == dict.fromkeys(parents, 2)
    assert Counter(span.status.status_code.name for span in handled) == {"ERROR": 2, "UNSET": 2}
    assert CANARY not in spans.text()


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(ServerUnavailable("gone"), "unknown"), (LeaseLost("another has it"), "unsettled")],
)
def test_a_batch_whose_end_nobody_saw_is_not_called_undone(
    spans: Spans, error: Exception, outcome: str
) -> None:
    class Attempt:
        _consumer = "test.consumer"

        @traced
        def run(self, batch: Batch) -> None:
            tracer = tracing.active()
            assert tracer is not None
            with tracer.handling(tracing.Call("test.consumer", batch.entries, 1, is_replay=False)):
                pass
            raise error

    entry = Entry("orders", 1, "o", "u", "placed", 1, (b"1", b"1", b"", b"0", b"null", b"{}"), b"")
    with pytest.raises(type(error)):
        Attempt().run(Batch((entry,), 1))
    assert outcomes(spans.named("handle test.consumer")) == [(1, outcome)]
    (batch,) = spans.named("batch test.consumer")
    assert (batch.attributes or {})["penstock.outcome"] == outcome
    assert not batch.status.is_ok


# ── what stays secret ──────────────────────────────────────────────────────────────────────────


def test_the_trace_of_a_sealed_event_is_sealed_with_it(
    database_url: str, redis_url: str, tmp_path: Path, spans: Spans
) -> None:
    vault = Vault(database_url, redis_url, new_key_file(tmp_path))
    vault.make_confidential()
    vault_state = TraceState([("vendor", CANARY)])
    outside = SpanContext(7, 8, is_remote=True, trace_flags=TraceFlags(1), trace_state=vault_state)
    token = contexts.attach(set_span_in_context(NonRecordingSpan(outside)))
    try:
        vault.send("measles")
    finally:
        contexts.detach(token)
    stored = str(vault.row("SELECT o::text FROM events.outbox_event o"))
    assert f"{7:032x}" not in stored
    inherited: list[dict[str, str]] = []

    def handler(event: StreamEvent[Any]) -> None:
        tracer = tracing.active()
        assert tracer is not None
        inherited.append(tracer.current_metadata())

    with vault.working(handler):
        vault.wait_for_outcomes("handled")
    vault.close()
    (sent,) = spans.named(f"send {STREAM}")
    (call,) = spans.named("handle clinic.read")
    assert parent_of(call) == span_id(sent)
    # What a person may have written does not go on into streams that everybody reads.
    assert inherited == [{"traceparent": header_of(call)}]
    assert all(not span.links for span in spans.named(f"publish {STREAM}"))


# ── workers ────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_without_the_extra_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "penstock.telemetry.otel_tracing", None)
    monkeypatch.delattr("penstock.telemetry.otel_tracing", raising=False)
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    tracing.configure("shop")
    assert "penstock[otel]" in caplog.text


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_exported_unless_somebody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tracing.configure("shop")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_variables_that_cannot_be_used_stop_no_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    monkeypatch.setattr(logging.getLogger("penstock"), "propagate", True)
    tracing.configure("shop")
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    assert "no traces are exported" in caplog.text


def test_a_collector_that_is_slow_holds_up_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    class Slow(TracerProvider):
        def force_flush(self, timeout_millis: int = 30_000) -> bool:  # noqa: ARG002
            return release.wait(30)

    monkeypatch.setattr(trace, "_TRACER_PROVIDER", Slow(shutdown_on_exit=False))
    monkeypatch.setattr(tracing, "FLUSH_SECONDS", 0.05)
    began_at = time.monotonic()
    try:
        tracing.flush()
        assert time.monotonic() - began_at < 10
    finally:
        release.set()
