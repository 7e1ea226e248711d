"""Whether metrics go to OpenTelemetry: without an endpoint or a provider nothing is imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.telemetry.metrics import Reading

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_API = "opentelemetry.metrics"

_logger = logging.getLogger("penstock")


class MetricExport(Protocol):
    """Where a process's metrics go besides its supervisor."""

    def add(self, readings: Sequence[Reading]) -> None:
        """Add what was counted since the last time."""

    def observe(self, read: Callable[[], Sequence[Reading]]) -> None:
        """Ask for gauges whenever metrics are collected."""

    def close(self) -> None:
        """Have the last of them taken, unless whoever takes them is too slow for that."""


def open_export(service_name: str, instance: str) -> MetricExport | None:
    """Where metrics go, if the environment or the application says so.

    Never raises: a worker without metrics is still a worker.
    """
    is_told = any(map(os.environ.get, _ENDPOINTS)) and _is_wanted()
    if not is_told and _API not in sys.modules:
        return None
    try:
        from penstock.telemetry import otel_metrics  # noqa: PLC0415 - an extra
    except ImportError:
        if is_told:
            _logger.warning(
                "An OTLP endpoint is set, but OpenTelemetry is not installed. No metrics are "
                "exported, everything else goes on. Install penstock[otel]."
            )
        return None
    try:
        return otel_metrics.provided(service_name, instance, is_told=is_told)
    except (ImportError, ValueError) as error:
        _logger.warning("OpenTelemetry cannot be used, so no metrics are exported: %s", error)
        return None


def _is_wanted() -> bool:
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_off and os.environ.get("OTEL_METRICS_EXPORTER", "otlp").strip() != "none"
