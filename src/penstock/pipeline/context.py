"""What a handler may know and ask besides its event."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, overload

from penstock.core import effects as calls
from penstock.core.effects import Interrupted
from penstock.core.events import StreamEvent
from penstock.core.sealing import Box
from penstock.core.wire import Entry
from penstock.errors import UsageError
from penstock.pipeline.effects import OnceCaller

T = TypeVar("T")


class Completer(Protocol):
    """What stands behind `Context.complete`."""

    def begin(self, entry: Entry) -> Any:
        """A context manager, plain or asynchronous, that gives a session."""


@dataclass(frozen=True, slots=True)
class Context:
    """The circumstances of one attempt at handling one event."""

    consumer: str
    """Whose handler it is: in a replay the original, so that once-keys stay the same."""
    entry: Entry
    attempt: int = 1
    is_replay: bool = False
    """Whether an operator delivers the event again; the live consumer has met it before."""
    is_dry_run: bool = False
    effects: OnceCaller | None = field(default=None, repr=False, compare=False)
    box: Box | None = field(default=None, repr=False, compare=False)
    """Where results are kept that a sealed event led to."""
    completion: Completer | None = field(default=None, repr=False, compare=False)

    @property
    def event(self) -> StreamEvent[Any]:
        """The event as it stands in its stream, untyped."""
        return self.entry.as_stream_event(self.entry.plain_payload())

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that knows consumer, position and event."""
        extra = {
            "consumer": self.consumer,
            "position": self.entry.position,
            "event_uuid": self.entry.event_uuid,
        }
        return logging.LoggerAdapter(logging.getLogger(f"penstock.handler.{self.consumer}"), extra)

    def idempotency_key(self, effect: str) -> str:
        """The same for every attempt at this effect of this event by this consumer."""
        return calls.idempotency_key(self.consumer, self.entry.event_uuid, effect)

    @overload
    def once(
        self,
        effect: str,
        fn: Callable[..., Coroutine[Any, Any, Any]],
        /,
        *args: Any,
        interrupted: Interrupted = ...,
        returns: type[T],
        **kwargs: Any,
    ) -> Awaitable[T]: ...

    @overload
    def once(
        self,
        effect: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        interrupted: Interrupted = ...,
        returns: type[T],
        **kwargs: Any,
    ) -> T: ...

    @overload
    def once(
        self,
        effect: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        interrupted: Interrupted = ...,
        returns: Any = ...,
        **kwargs: Any,
    ) -> Any: ...

    def once(
        self,
        effect: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        interrupted: Interrupted = "retry",
        returns: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Call fn(*args, **kwargs), which reaches outside, unless its result is on record.

        The result comes back as JSON gives it, or as `returns`; awaited if fn is async. A call
        that never returned is unknown: interrupted="retry" calls again, "bury" raises
        EffectUnknown. What fn raises comes out, and the next attempt calls again.
        """
        calls.require_call(effect, fn, interrupted)
        if self.effects is None:
            raise UsageError(
                f"once({effect!r}, …) has nowhere to record its call here, so nothing was called. "
                "It works for handlers of single events; in tests, deliver(…) gives a Context "
                "that has it."
            )
        call = functools.partial(fn, *args, **kwargs)
        once = self.effects.once_async if calls.is_async(fn) else self.effects.once
        return once(
            self.entry.event_uuid,
            effect,
            call,
            interrupted=interrupted,
            returns=returns,
            is_dry_run=self.is_dry_run,
            box=self.box,
        )

    def complete(self) -> Any:
        """For AT_LEAST_ONCE: last writes, deduplication and checkpoint, committed together.

        `with context.complete() as session:`, or `async with` in an `async def` handler. When the
        block ends, the event is handled for good; before that, a crash means it is handled again.
        """
        if self.completion is None:
            raise UsageError(
                "context.complete() is for consumers with Guarantee.AT_LEAST_ONCE. Here nothing "
                "was written; ask for a Session instead, which commits with the checkpoint."
            )
        return self.completion.begin(self.entry)
