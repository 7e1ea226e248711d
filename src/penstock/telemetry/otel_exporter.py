"""A provider of OpenTelemetry's SDK that exports over OTLP, with histograms by their buckets.

The SDK takes a histogram's values one by one, which would cost a handler more than its work. Here
they are added to what is exported as they are: counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk import metrics as sdk
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource

from penstock.telemetry.meters import Sums
from penstock.telemetry.metrics import Distribution, Instrument, Reading

SCOPE = "penstock"


def exporting_provider(
    attributes: dict[str, str],
) -> tuple[sdk.MeterProvider, Callable[[Sequence[Reading]], None]]:
    """A provider that exports to where the environment says, and what takes histograms for it."""
    exporter = _Exporter()
    provider = sdk.MeterProvider(
        [PeriodicExportingMetricReader(exporter)],
        resource=Resource.create(dict(attributes)),
        # Its end would wait for a collector that is away; closing has a limit.
        shutdown_on_exit=False,
    )
    return provider, exporter.sums.add


class _Exporter(OTLPMetricExporter):
    def __init__(self) -> None:
        super().__init__()
        self.sums = Sums()
        self._since_ns = time.time_ns()
        preferred = self._preferred_temporality or {}
        self._temporality = preferred.get(sdk.Histogram, AggregationTemporality.CUMULATIVE)

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **more: Any
    ) -> MetricExportResult:
        """Add the histograms to whatever else there is."""
        resources = [
            replace(
                resource, scope_metrics=[self._with_histograms(s) for s in resource.scope_metrics]
            )
            for resource in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(resources), timeout_millis, **more)

    def _with_histograms(self, scope: ScopeMetrics) -> ScopeMetrics:
        # Counters of this scope exist before the first histogram, and a second scope of the same
        # name would take the place of the first.
        if scope.scope.name != SCOPE:
            return scope
        return replace(scope, metrics=[*scope.metrics, *self._histograms()])

    def _histograms(self) -> list[Metric]:
        now_ns, since_ns = time.time_ns(), self._since_ns
        if self._temporality is AggregationTemporality.DELTA:
            readings, self._since_ns = self.sums.take(), now_ns
        else:
            readings = self.sums.readings()
        points: dict[Instrument, list[HistogramDataPoint]] = {}
        for reading in readings:
            points.setdefault(reading.instrument, []).append(_point(reading, since_ns, now_ns))
        return [
            Metric(each.name, each.help, each.unit, Histogram(found, self._temporality))
            for each, found in points.items()
        ]


def _point(reading: Reading, since_ns: int, now_ns: int) -> HistogramDataPoint:
    instrument, seen = reading.instrument, reading.value
    assert isinstance(seen, Distribution)
    limits = (0.0, *instrument.buckets, instrument.buckets[-1])
    met = [index for index, count in enumerate(seen.counts) if count]
    return HistogramDataPoint(
        attributes=dict(zip(instrument.labels, reading.labels, strict=True)),
        start_time_unix_nano=since_ns,
        time_unix_nano=now_ns,
        count=sum(seen.counts),
        sum=seen.total,
        bucket_counts=seen.counts,
        explicit_bounds=instrument.buckets,
        # As far as the buckets tell.
        min=limits[met[0]],
        max=limits[met[-1] + 1],
    )
