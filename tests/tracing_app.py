"""An application that is traced, whole: it sends in a process of its own (`python -m`)."""

from __future__ import annotations

import json
from typing import Any

import psycopg
from opentelemetry import trace

from penstock import FatalError, Pipeline, RawEvent, StreamEvent
from penstock.core.options import Guarantee

STREAM = "orders"
EVENTS = 5
BAD = 3
CANARY = "canary-5f1c"

pipeline = Pipeline("shop")


@pipeline.consumer(STREAM, name="bill", batch_size=10)
def bill(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
    """Fails for good on one event in the middle of the batch."""
    with trace.get_tracer("app").start_as_current_span("INSERT invoice"):
        cursor.execute("SELECT 1")
    if event.payload["n"] == BAD:
        raise FatalError(f"{CANARY}: {event.payload}")


@pipeline.consumer(STREAM, name="digest", batch_size=10)
def digest(events: list[StreamEvent[Any]]) -> None:
    """Takes them all at once."""


@pipeline.consumer(
    STREAM, name="relay", batch_size=10, guarantee=Guarantee.AT_LEAST_ONCE, start="earliest"
)
async def relay(event: StreamEvent[Any]) -> None:
    """Sends another event from inside of its event loop."""
    with trace.get_tracer("app").start_as_current_span("call"):
        if event.payload["n"] == 1:
            await pipeline.send_now_async("invoices", RawEvent("invoiced", {"n": 1}))


@pipeline.consumer("invoices", name="tell")
def tell(event: StreamEvent[Any]) -> None:
    """The end of the line."""


def send() -> None:
    """Send all events in one transaction, below a span of the application's own provider."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "web"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    tracer = trace.get_tracer("app")
    with psycopg.connect(pipeline.settings.database_url) as connection:
        for n in range(1, EVENTS + 1):
            with tracer.start_as_current_span("checkout") as span:
                pipeline.send(connection, STREAM, RawEvent("placed", {"n": n}))
                context = span.get_span_context()
                print(  # noqa: T201 - it is what the parent process reads
                    json.dumps([trace.format_trace_id(context.trace_id), f"{context.span_id:016x}"])
                )


if __name__ == "__main__":
    send()
