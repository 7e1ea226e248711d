"""A collector: takes metrics over OTLP/HTTP, decodes the protobuf and keeps the latest of each."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from tests.otlp import receiving

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
    answer = ExportMetricsServiceResponse().SerializeToString()
    with receiving("/v1/metrics", collector.take, answer) as collector.endpoint:
        yield collector
