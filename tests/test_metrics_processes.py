"""Metrics of real processes: scraped from their supervisor, and exported over OTLP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from penstock.telemetry import metrics
from penstock.telemetry.meters import Sums
from penstock.telemetry.otel_metrics import RECORDS_MAX, ProviderExport
from tests.otlp_metrics import MetricsCollector, collecting_metrics
from tests.waiting import SOON_SECONDS, wait_until

ROOT = Path(__file__).parent.parent
HANDLED = 'events_pipeline_consumer_handled_total{consumer="shop.bill",stream="orders"}'
LAG = 'events_pipeline_consumer_lag_events_count{consumer="shop.bill",stream="orders"}'
SEND = """
SELECT events.send('orders', 'placed', jsonb_build_object('n', n))
  FROM generate_series(1, %s) AS n
"""


class Supervisor:
    """`penstock run`, and what it says over HTTP."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "penstock", "--app", "tests.metrics_app:pipeline"]
        command += ["run", "--metrics-port", "0", "--no-spare"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=output)

    def get(self, path: str) -> str:
        found = re.search(r"Metrics on (http://127\.0\.0\.1:\d+)/", self.log.read_text())
        if found is None:
            raise LookupError("nothing is served yet")
        try:
            url = f"{found[1]}/{path}"
            with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - our own server
                return str(answer.read().decode())
        except OSError as error:
            raise LookupError(str(error)) from error

    def told(self, series: str) -> float:
        for line in self.get("metrics").splitlines():
            name, _, value = line.rpartition(" ")
            if name == series:
                return float(value)
        raise LookupError(series)

    def pid_of(self, worker: str) -> int:
        workers = json.loads(self.get("healthz"))["workers"]
        return int(next(each["pid"] for each in workers if each["name"] == worker))


@contextmanager
def supervised(environment: dict[str, str], log: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(environment, log)
    with supervisor.process as process:
        try:
            yield supervisor
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(SOON_SECONDS) == 0, log.read_text()


@pytest.mark.long
def test_counts_survive_the_worker_that_made_them_and_are_exported(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with collecting_metrics() as collector, psycopg.connect(database_url) as connection:
        connection.autocommit = True
        environment = {
            **os.environ,
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_REDIS_URL": redis_url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_TRACES_EXPORTER": "none",
        }
        connection.execute(SEND, (50,))
        with supervised(environment, tmp_path / "log") as supervisor:
            wait_until(lambda: supervisor.told(HANDLED) == 50, what="50 are counted")
            # What is exported is the worker's own: the last moment before its death is not.
            wait_until(lambda: _calls(collector) == 50, what="50 are exported")
            os.kill(supervisor.pid_of("consumer:bill"), signal.SIGKILL)
            connection.execute(SEND, (30,))
            wait_until(lambda: supervisor.told(HANDLED) == 80, what="80 are counted")
            assert supervisor.told('supervisor_worker_restarts_total{worker="consumer:bill"}') == 1
            assert supervisor.told(LAG) >= 0
            wait_until(lambda: _is_exported(collector), what=lambda: _exported(collector))
        assert collector.services == {"shop"}
        seconds = collector.points(metrics.HANDLER_SECONDS.name)
        assert all(point.sum > 0 for point in seconds.values())
        assert {len(point.bucket_counts) for point in seconds.values()} == {
            len(metrics.SECONDS_BUCKETS) + 1
        }


def _is_exported(collector: MetricsCollector) -> bool:
    return (
        collector.total(metrics.HANDLED.name) == 80
        and _calls(collector) == 80
        and len(collector.points(metrics.LAG_EVENTS.name)) == 1
        and collector.total(metrics.WORKERS_RUNNING.name) == 2
    )


def _calls(collector: MetricsCollector) -> int:
    return sum(point.count for point in collector.points(metrics.HANDLER_SECONDS.name).values())


def _exported(collector: MetricsCollector) -> str:
    return f"80 are exported; there are {collector.points(metrics.HANDLED.name)}"


def test_an_applications_own_provider_gets_the_same() -> None:
    reader = InMemoryMetricReader()
    export = ProviderExport(MeterProvider([reader]))
    labels = ("shop.bill", "orders")
    sums = Sums()
    sums.count(metrics.HANDLED, labels, 3)
    for _ in range(RECORDS_MAX * 10):
        sums.observe(metrics.HANDLER_SECONDS, labels, 0.002)
    sums.observe(metrics.HANDLER_SECONDS, labels, 1000.0)
    export.add(sums.take())
    export.observe(lambda: [metrics.Reading(metrics.LAG_MS, labels, 7)])
    found = _collected(reader)
    assert found[metrics.HANDLED.name].value == 3
    assert found[metrics.LAG_MS.name].value == 7
    calls = found[metrics.HANDLER_SECONDS.name]
    assert tuple(calls.explicit_bounds) == metrics.SECONDS_BUCKETS
    assert calls.bucket_counts[-1] == 1, "the rare one is never left out"
    assert RECORDS_MAX <= calls.count <= RECORDS_MAX + 1


def _collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    collected = reader.get_metrics_data()
    assert collected is not None
    return {
        metric.name: metric.data.data_points[0]
        for resource in collected.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.data.data_points
    }
