"""A collector: takes metrics over OTLP/HTTP, decodes the protobuf and keeps the latest of each."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

Series = tuple[str, str, frozenset[tuple[str, str]]]
"""Which instance of the service, which metric, with which attributes."""


class MetricsCollector:
    """What has come last, from all processes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[Series, Any] = {}
        self.services: set[str] = set()
        self.endpoint = ""

    def take(self, body: bytes) -> None:
        """Decode one request."""
        for of_service in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            about = _texts(of_service.resource.attributes)
            with self._lock:
                self.services.add(about["service.name"])
                for scope in of_service.scope_metrics:
                    for metric in scope.metrics:
                        points = getattr(metric, metric.WhichOneof("data")).data_points
                        for point in points:
                            labels = frozenset(_texts(point.attributes).items())
                            instance = about["service.instance.id"]
                            self._points[instance, metric.name, labels] = point

    def points(self, name: str) -> dict[str, Any]:
        """The latest point of a metric, by instance."""
        with self._lock:
            return {key[0]: point for key, point in self._points.items() if key[1] == name}

    def total(self, name: str) -> float:
        """The sum over all instances."""
        points = self.points(name).values()
        return float(sum(point.as_int + point.as_double for point in points))


def _texts(attributes: Any) -> dict[str, str]:
    return {each.key: each.value.string_value for each in attributes}


@contextmanager
def collecting_metrics() -> Iterator[MetricsCollector]:
    """A collector on a free port while the block lasts."""
    collector = MetricsCollector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/v1/metrics":
                collector.take(body)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(ExportMetricsServiceResponse().SerializeToString())

        def log_message(self, *_arguments: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, name="metrics-collector")
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
