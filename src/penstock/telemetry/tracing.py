"""The seam for traces: nothing at all until OpenTelemetry is there and somebody provides for it.

A span cannot be made of a signal alone: it has to be current while a handler runs, so that whatever
the handler does is found below it. `SPANS` says which signals tell of the same things.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

from penstock.core.wire import Entry
from penstock.telemetry import signals
from penstock.telemetry.signals import Signal

SYSTEM: Final = "penstock"
LINKS_MAX: Final = 128
"""How many events a span about many of them is linked to."""
LOOK_SECONDS: Final = 1.0
"""How soon a provider is noticed that an application sets late."""
FLUSH_SECONDS: Final = 2.0
"""How long a worker that ends waits for its last spans to be taken."""
NOTHING: Final[AbstractContextManager[Any]] = nullcontext()
"""What to enter where there is no tracer."""
SPANS: Final[dict[type[Signal], str]] = {
    signals.EventsInserted: "`send <stream>`, which began earlier: with the call of `send`",
    signals.BatchAppended: "`publish <stream>`, one of the batch and one of each of its events",
    signals.BatchConfirmed: "without a hot log: `publish <stream>`",
    signals.EventHandled: "`handle <consumer>`, below the event's `send`",
    signals.EventFailed: "`handle <consumer>` with the status ERROR",
    signals.BatchCommitted: "`batch <consumer>`, outcome `settled`",
    signals.BatchRolledBack: "`batch <consumer>`, outcome `unsettled`, status ERROR",
    signals.TimerHandled: "`handle <consumer>`, below whatever has published the timer",
    signals.TimerFailed: "`handle <consumer>` with the status ERROR",
}

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_API = "opentelemetry.trace"
_logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a handler."""

    consumer: str
    entries: Sequence[Entry]
    """What it is called with, opened where it was sealed."""
    attempt: int
    is_replay: bool
    is_list: bool = False
    """Whether the handler takes lists: such a span has links, and not one event as its parent."""


class TracedBatch(Protocol):
    """The span of a batch that is being handled."""

    def fail(self, error: BaseException, *, is_known: bool = True) -> None:
        """Nothing of it is settled; where that is not known, the checkpoint tells."""


class Tracer(Protocol):
    """Makes spans. None of them tells a value of an event, or what an error says."""

    def sending(self, stream_name: str, count: int) -> AbstractContextManager[Any]:
        """Around a send."""

    def current_metadata(self) -> dict[str, str]:
        """What an event that is sent now carries: the current span as its parent; or nothing."""

    def publishing(
        self, stream_name: str, rows: Sequence[tuple[int, str]], *, is_fresh: bool
    ) -> AbstractContextManager[Any]:
        """Around the append of a batch; fresh events have a span in their own traces, too."""

    def batch(
        self, consumer: str, entries: Sequence[Entry], attempt: int
    ) -> AbstractContextManager[TracedBatch]:
        """Around one attempt to settle a batch."""

    def handling(self, call: Call) -> AbstractContextManager[Any]:
        """Around one call of a handler, inside of its batch."""

    def timer(
        self, consumer: str, topic: str, headers: Mapping[str, str], attempt: int
    ) -> AbstractContextManager[Any]:
        """Around one attempt at a timer of Redis, below whatever has published it."""


class _Found:
    """Whether somebody provides for traces, as last seen: who does, does for good."""

    def __init__(self) -> None:
        self.tracer: Tracer | None = None
        self.look_at = 0.0


_found = _Found()


def active() -> Tracer | None:
    """The tracer, if this process has a use for one; otherwise asking costs next to nothing."""
    if _found.tracer is not None:
        return _found.tracer
    # Other libraries import the API where it is installed, whether or not anybody uses it.
    api = sys.modules.get(_API)
    if api is None or (now := time.monotonic()) < _found.look_at:
        return None
    _found.look_at = now + LOOK_SECONDS
    if not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        _found.tracer = _tracer()
    return _found.tracer


def carried_metadata() -> dict[str, str]:
    """What an event that is sent now carries: the current span, be it somebody else's; or nothing.

    A span that came from outside is passed on also by a process that records none.
    """
    api = sys.modules.get(_API)
    if api is None or api.get_current_span() is api.INVALID_SPAN:
        return {}
    return _tracer().current_metadata()


def forget_provider() -> None:
    """Look anew at the next occasion, as in a new process."""
    _found.tracer, _found.look_at = None, 0.0


@contextmanager
def exported(service_name: str) -> Iterator[None]:
    """Export spans while the block lasts, and have the last of them taken at its end."""
    configure(service_name)
    try:
        yield
    finally:
        flush()


def configure(service_name: str) -> None:
    """Export spans if the environment says where to; an application's own provider is kept.

    Never raises: a worker without traces is still a worker.
    """
    if not any(map(os.environ.get, _ENDPOINTS)) or not _is_wanted():
        return
    try:
        from penstock.telemetry import otel_tracing  # noqa: PLC0415 - an extra
    except ImportError:
        _logger.warning(
            "An OTLP endpoint is set, but OpenTelemetry is not installed. No traces are exported, "
            "everything else goes on. Install penstock[otel]."
        )
        return
    try:
        otel_tracing.provide(service_name)
        _found.look_at = 0.0
    except ValueError as error:
        _logger.warning("The OTEL_* variables cannot be used, so no traces are exported: %s", error)


def flush() -> None:
    """Have the last spans taken, unless whoever takes them is too slow for that."""
    api = sys.modules.get(_API)
    provider = None if api is None else api.get_tracer_provider()
    force_flush = getattr(provider, "force_flush", None)
    if force_flush is not None:
        # The SDK waits as long as its exporter does, whatever timeout it is given.
        thread = threading.Thread(target=force_flush, name="penstock-trace-flush", daemon=True)
        thread.start()
        thread.join(FLUSH_SECONDS)


def _is_wanted() -> bool:
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not is_off and os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() != "none"


@cache
def _tracer() -> Tracer:
    from penstock.telemetry.otel_tracing import OpenTelemetryTracer  # noqa: PLC0415 - an extra

    return OpenTelemetryTracer()
