"""A span around each attempt at a batch, where there is a tracer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from penstock.core.isolation import Batch
from penstock.errors import ServerUnavailable
from penstock.pipeline.calling import HandlerFailed
from penstock.telemetry import tracing

P = ParamSpec("P")
T = TypeVar("T")


class _OfConsumer(Protocol):
    _consumer: str


S = TypeVar("S", bound=_OfConsumer)


def traced(
    run: Callable[Concatenate[S, Batch, P], T],
) -> Callable[Concatenate[S, Batch, P], T]:
    """Let the span of a batch last as long as the attempt, and tell how that ended.

    One that does not know its event yet has no span.
    """

    @wraps(run)
    def attempt(self: S, batch: Batch, /, *arguments: P.args, **options: P.kwargs) -> T:
        tracer = tracing.active()
        if tracer is None or not batch.entries:
            return run(self, batch, *arguments, **options)
        with tracer.batch(self._consumer, batch.entries, batch.attempt) as span:
            try:
                return run(self, batch, *arguments, **options)
            except BaseException as error:
                cause = error.error if isinstance(error, HandlerFailed) else error
                span.fail(cause, is_known=not isinstance(error, ServerUnavailable))
                raise

    return attempt
