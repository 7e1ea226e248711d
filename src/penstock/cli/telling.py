"""What a supervisor tells: answers to probes, metrics for Prometheus and for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from penstock.core.settings import Settings
from penstock.ops.metrics_state import MetricsState
from penstock.runtime.health_server import HealthServer
from penstock.runtime.metric_pipe import Sink
from penstock.runtime.processes import ProcessGroup
from penstock.runtime.state_cache import StateCache
from penstock.stores.identity import new_token
from penstock.telemetry.meters import Sums
from penstock.telemetry.metric_export import open_export
from penstock.telemetry.metrics import Reading

Address = tuple[str, int]


def addresses(**asked: tuple[str, int | None]) -> dict[str, Address]:
    """The hosts and ports that the command line names, by the option that names them."""
    return {
        f"--{what}-port": (host, port) for what, (host, port) in asked.items() if port is not None
    }


def pipeline_parts(state: StateCache, sums: Sums) -> Iterator[Sequence[Reading]]:
    """The counts of workers and the pipeline's state, which is asked for meanwhile."""
    asked_at = state.ask()
    yield sums.readings()
    yield state.get(asked_at)


class Telling:
    """Adds up what workers count, and tells that and the pipeline's state until it is closed."""

    def __init__(
        self, settings: Settings, service_name: str, addresses: Mapping[str, Address]
    ) -> None:
        """`addresses` has a host and a port for each option that asks for them."""
        self._addresses = addresses
        self._sums = Sums()
        self._stack = ExitStack()
        self._export = open_export(service_name, f"supervisor-{new_token()}")
        state = MetricsState(settings)
        self._cache = StateCache(state.read, state.close)
        self._group: ProcessGroup | None = None

    @property
    def on_metrics(self) -> Sink | None:
        """What takes the counts of workers; None where nobody would ask for them here."""
        return self._sums.add if self._addresses else None

    def start(self, group: ProcessGroup) -> list[str]:
        """Tell about these processes. Returns where, for people; raises UsageError."""
        self._group = group
        self._stack.callback(self._cache.close)
        notes = []
        for option, (host, port) in self._addresses.items():
            server = HealthServer(
                host,
                port,
                lambda: group.report,
                more=lambda: pipeline_parts(self._cache, self._sums),
                option=option,
            )
            self._stack.callback(server.close)
            paths = "/metrics" if "metrics" in option else "/healthz and /readyz"
            what = option.removeprefix("--").removesuffix("-port").capitalize()
            notes.append(f"{what} on http://{host}:{server.port}{paths}.")
        if self._export is not None:
            self._export.observe(self._state)
            self._stack.callback(self._export.close)
        return notes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _state(self) -> list[Reading]:
        report = None if self._group is None else self._group.report
        return [*(report.as_readings() if report else ()), *self._cache.get()]
