"""Metrics through OpenTelemetry: the application's own provider, or one that exports over OTLP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from opentelemetry import metrics as api
from opentelemetry.metrics import CallbackOptions, Observation

from penstock.telemetry.metric_export import MetricExport
from penstock.telemetry.metrics import INSTRUMENTS, Distribution, Instrument, Kind, Reading

FLUSH_SECONDS: Final = 2.0
RECORDS_MAX: Final = 100
"""So many values of a histogram are recorded at once with an application's own provider, which
takes them one by one at some ten microseconds each; of more, these stand for the rest."""
NAME: Final = "penstock"

_SERVICE_NAMES = ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES")


def provided(service_name: str, instance: str, *, is_told: bool) -> MetricExport | None:
    """The application's own provider comes first; `is_told`: there is an endpoint to export to."""
    provider = api.get_meter_provider()
    # What the API gives until somebody sets a provider is its own, and records nothing.
    if not type(provider).__module__.startswith("opentelemetry.metrics"):
        return ProviderExport(provider)
    if not is_told:
        return None
    # Here and not above: an application's own provider need not be the SDK's.
    from penstock.telemetry.otel_exporter import exporting_provider  # noqa: PLC0415 - an extra

    named, described = (os.environ.get(name, "") for name in _SERVICE_NAMES)
    is_named = bool(named) or "service.name=" in described
    attributes = {"service.instance.id": instance}
    if not is_named:
        attributes["service.name"] = service_name
    exporting, histograms = exporting_provider(attributes)
    api.set_meter_provider(exporting)
    return ProviderExport(exporting, histograms)


class ProviderExport:
    """Counts and gauges as instruments of a provider; histograms too, unless they go elsewhere."""

    def __init__(
        self,
        provider: api.MeterProvider,
        histograms: Callable[[Sequence[Reading]], None] | None = None,
    ) -> None:
        self._provider = provider
        self._meter = provider.get_meter(NAME)
        self._add_histograms = histograms or self._record
        self._made: dict[Instrument, Any] = {}

    def add(self, readings: Sequence[Reading]) -> None:
        """Add what was counted since the last time."""
        distributions = []
        for reading in readings:
            if isinstance(reading.value, Distribution):
                distributions.append(reading)
            else:
                self._counter(reading.instrument).add(reading.value, _attributes(reading))
        if distributions:
            self._add_histograms(distributions)

    def observe(self, read: Callable[[], Sequence[Reading]]) -> None:
        """Ask for the values of all gauges, and of the supervisor's counters, when collected."""
        for instrument in INSTRUMENTS:
            callbacks = [_callback(instrument, read)]
            described = (instrument.name, callbacks, instrument.unit, instrument.help)
            if instrument.kind is Kind.GAUGE:
                self._meter.create_observable_gauge(*described)
            elif instrument.name.startswith("supervisor."):
                self._meter.create_observable_counter(*described)

    def close(self) -> None:
        """Have the last of them taken, unless whoever takes them is too slow for that."""
        force_flush = getattr(self._provider, "force_flush", None)
        if force_flush is not None:
            # The SDK waits as long as its exporter does, whatever timeout it is given.
            thread = threading.Thread(target=force_flush, name="penstock-flush", daemon=True)
            thread.start()
            thread.join(FLUSH_SECONDS)

    def _counter(self, instrument: Instrument) -> api.Counter:
        if instrument not in self._made:
            self._made[instrument] = self._meter.create_counter(
                instrument.name, instrument.unit, instrument.help
            )
        counter: api.Counter = self._made[instrument]
        return counter

    def _record(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            instrument, seen = reading.instrument, reading.value
            assert isinstance(seen, Distribution)
            if instrument not in self._made:
                self._made[instrument] = self._meter.create_histogram(
                    instrument.name,
                    instrument.unit,
                    instrument.help,
                    explicit_bucket_boundaries_advisory=instrument.buckets,
                )
            for value in _representatives(instrument, seen):
                self._made[instrument].record(value, _attributes(reading))


def _representatives(instrument: Instrument, seen: Distribution) -> Iterable[float]:
    """Values that fall into the same buckets; none of these is left out, however rare."""
    share = min(1.0, RECORDS_MAX / max(1, sum(seen.counts)))
    limits = (0.0, *instrument.buckets, instrument.buckets[-1])
    for index, count in enumerate(seen.counts):
        middle = (limits[index] + limits[index + 1]) / 2
        is_last = index == len(instrument.buckets)
        value = 2 * instrument.buckets[-1] if is_last else middle
        yield from [value] * (max(1, round(count * share)) if count else 0)


def _callback(
    instrument: Instrument, read: Callable[[], Sequence[Reading]]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def observed(_options: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(reading.value, _attributes(reading))
            for reading in read()
            if reading.instrument is instrument and not isinstance(reading.value, Distribution)
        ]

    return observed


def _attributes(reading: Reading) -> dict[str, str]:
    return dict(zip(reading.instrument.labels, reading.labels, strict=True))
