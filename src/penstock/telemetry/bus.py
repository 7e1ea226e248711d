"""Delivers signals to whoever asked for them, in the thread that emits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.core.effects import is_async
from penstock.core.handlers import why_no_handler
from penstock.core.require import require
from penstock.errors import RegistrationError
from penstock.telemetry.signals import Signal

SignalT = TypeVar("SignalT", bound=Signal)
Subscriber = Callable[[Any], None]

_logger = logging.getLogger("penstock")
_by_type: dict[type[Signal], list[Subscriber]] = {}
_to_all: list[Subscriber] = []
_EXAMPLE = "Write @pipeline.on(EventBuried) above def alarm(signal: EventBuried) -> None."


def require_signal(signal_type: object) -> None:
    """Raise RegistrationError for what is never emitted: whoever waits for it hears nothing."""
    known = getattr(signal_type, "__name__", "")
    require(
        isinstance(signal_type, type) and Signal.registry.get(known) is signal_type,
        f"Nobody can subscribe to {signal_type!r}: it is none of the signals of docs/SIGNALS.md. "
        f"{_EXAMPLE}",
        RegistrationError,
    )


def require_subscriber(subscriber: object) -> None:
    """Raise RegistrationError for what would do nothing when it is called."""
    why = why_no_handler(subscriber)
    if why is None and is_async(subscriber):
        why = "it is async, and nobody would await it"
    require(
        why is None,
        f"{getattr(subscriber, '__name__', subscriber)} cannot subscribe: {why}. {_EXAMPLE}",
        RegistrationError,
    )


def emit(signal: Signal) -> None:
    """Tell every subscriber. One that raises is logged and never stops the line."""
    for subscriber in (*_by_type.get(type(signal), ()), *_to_all):
        try:
            subscriber(signal)
        except Exception:
            _logger.exception("a subscriber to %s failed", type(signal).__name__)


def is_wanted(signal_type: type[Signal]) -> bool:
    """Whether building this signal is worth it; for signals emitted once per event."""
    return bool(_to_all) or signal_type in _by_type


def subscribe(signal_type: type[SignalT], subscriber: Callable[[SignalT], None]) -> None:
    """Call `subscriber` with every signal of this type from now on."""
    _by_type.setdefault(signal_type, []).append(subscriber)


def subscribe_to_all(subscriber: Callable[[Signal], None]) -> None:
    """Call `subscriber` with every signal from now on."""
    _to_all.append(subscriber)


def unsubscribe(subscriber: Subscriber) -> None:
    """Stop calling `subscriber`."""
    for subscribers in (_to_all, *_by_type.values()):
        if subscriber in subscribers:
            subscribers.remove(subscriber)
    for signal_type in [key for key, value in _by_type.items() if not value]:
        del _by_type[signal_type]
