"""A collector: takes spans over OTLP/HTTP, decodes the protobuf and keeps them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span, as it came over the wire."""

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[str, ...]
    attributes: dict[str, Any] = field(hash=False)
    is_error: bool
    raw: bytes = field(repr=False)


class Collector:
    """What has come so far, from all processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Received] = []
        self.endpoint = ""

    def take(self, body: bytes) -> None:
        """Decode one request."""
        request = ExportTraceServiceRequest.FromString(body)
        for of_service in request.resource_spans:
            service = _values(of_service.resource.attributes).get("service.name", "")
            spans = [span for scope in of_service.scope_spans for span in scope.spans]
            with self._lock:
                self._spans += [_received(service, span) for span in spans]

    @property
    def spans(self) -> list[Received]:
        with self._lock:
            return list(self._spans)

    def named(self, name: str, **attributes: Any) -> list[Received]:
        """The spans of this name that have these attributes; `_` stands for a dot."""
        wanted = {f"penstock.{key}": value for key, value in attributes.items()}
        return [
            span
            for span in self.spans
            if span.name == name and wanted.items() <= span.attributes.items()
        ]


def _values(attributes: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in attributes
    }


def _received(service: str, span: Any) -> Received:
    return Received(
        service,
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        tuple(link.span_id.hex() for link in span.links),
        _values(span.attributes),
        span.status.code == span.status.STATUS_CODE_ERROR,
        span.SerializeToString(),
    )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector of spans on a free port while the block lasts."""
    collector = Collector()
    answer = ExportTraceServiceResponse().SerializeToString()
    with receiving("/v1/traces", collector.take, answer) as collector.endpoint:
        yield collector


@contextmanager
def receiving(path: str, take: Callable[[bytes], None], answer: bytes) -> Iterator[str]:
    """Serve OTLP/HTTP on a free port; yields the address to export to."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == path:
                take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
