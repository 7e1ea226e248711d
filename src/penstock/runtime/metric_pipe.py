"""What workers count, on its way to their supervisor: lines of JSON through a pipe.

Only what has come since the last line is sent, and the supervisor adds it up: counts outlive the
worker that made them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from penstock.runtime.heartbeat import Listener
from penstock.telemetry.meters import Meters
from penstock.telemetry.metric_export import MetricExport, open_export
from penstock.telemetry.metrics import BY_NAME, Distribution, Reading

SEND_SECONDS: Final = 1.0
LAST_SECONDS: Final = 1.0
"""How long a worker that ends waits for a supervisor that does not read."""
_READ_BYTES: Final = 65536

_logger = logging.getLogger("penstock")

Sink = Callable[[Sequence[Reading]], None]


def as_line(readings: Iterable[Reading]) -> bytes:
    """Readings for the other end of a pipe."""
    return json.dumps([_plain(reading) for reading in readings]).encode() + b"\n"


def from_line(line: bytes) -> list[Reading]:
    """What `as_line` was given. Raises ValueError or KeyError for anything else."""
    return [_reading(*plain) for plain in json.loads(line)]


def _plain(reading: Reading) -> list[Any]:
    value = reading.value
    if isinstance(value, Distribution):
        return [reading.instrument.name, reading.labels, value.counts, value.total]
    return [reading.instrument.name, reading.labels, value]


def _reading(name: str, labels: list[str], *value: Any) -> Reading:
    instrument = BY_NAME[name]
    if len(value) == 1:
        return Reading(instrument, tuple(labels), value[0])
    counts, total = value
    return Reading(instrument, tuple(labels), Distribution(tuple(counts), total))


class MetricPipe:
    """A worker's end: a sink that never waits, and forgets nothing that did not fit."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        self._is_open = True
        os.set_blocking(descriptor, False)
        # What a handler starts must not keep the pipe open after this process has died.
        os.set_inheritable(descriptor, False)

    def __call__(self, readings: Sequence[Reading]) -> None:
        """Send these, and what is left of those before."""
        if self._is_open:
            self._rest += as_line(readings) if readings else b""
            self._write()

    @property
    def is_full(self) -> bool:
        """Whether nobody reads: whoever asks had better go on adding up."""
        return bool(self._rest)

    def finish(self) -> None:
        """Send what is left, if somebody reads soon."""
        while self._is_open and self._rest:
            _, ready, _ = select.select([], [self._descriptor], [], LAST_SECONDS)
            if not ready:
                return
            self._write()

    def _write(self) -> None:
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            return
        except OSError:
            # The supervisor is gone, and this process with it in a moment.
            self._is_open, self._rest = False, b""


class MetricListener(Listener):
    """The supervisor's end."""

    def __init__(self, sink: Sink, open_child: Callable[[int], object]) -> None:
        self._sink = sink
        self._rest = b""
        super().__init__(open_child)

    def drain(self) -> None:
        """Take everything that was sent by now."""
        while data := self.read(_READ_BYTES):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            self._sink(from_line(line))
        except (ValueError, KeyError, TypeError) as error:
            _logger.warning("a worker's counts could not be read and are missing: %s", error)


@contextlib.contextmanager
def measured(descriptor: int | None, service_name: str, instance: str) -> Iterator[None]:
    """Count what happens in this process, and tell a supervisor and OpenTelemetry once a second.

    Costs nothing where there is neither a pipe nor a place to export to.
    """
    pipe = None if descriptor is None else MetricPipe(descriptor)
    export = open_export(service_name, instance)
    if pipe is None and export is None:
        yield
        return
    measuring = _Measuring(pipe, export)
    measuring.start()
    try:
        yield
    finally:
        measuring.stop()


class _Measuring:
    """Meters, and a thread that takes what they have counted to wherever it goes."""

    def __init__(self, pipe: MetricPipe | None, export: MetricExport | None) -> None:
        self._pipe = pipe
        self._export = export
        self._meters = Meters()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-metrics", daemon=True)

    def start(self) -> None:
        self._meters.start()
        self._thread.start()

    def stop(self) -> None:
        self._meters.stop()
        self._stop.set()
        self._thread.join(LAST_SECONDS)
        self._tell()
        if self._pipe is not None:
            self._pipe.finish()
        if self._export is not None:
            self._export.close()

    def _run(self) -> None:
        while not self._stop.wait(SEND_SECONDS):
            self._tell()

    def _tell(self) -> None:
        if self._pipe is not None and self._pipe.is_full:
            self._pipe(())
            if self._pipe.is_full:
                # Nobody reads just now: what comes meanwhile is added up, and nothing grows.
                return
        readings = self._meters.sums.take()
        if self._pipe is not None:
            self._pipe(readings)
        if self._export is not None:
            self._export.add(readings)
