"""Delivers signals to whoever asked for them, in the thread that emits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.telemetry.signals import Signal

SignalT = TypeVar("SignalT", bound=Signal)
Subscriber = Callable[[Any], None]

_logger = logging.getLogger("penstock")
_by_type: dict[type[Signal], list[Subscriber]] = {}
_to_all: list[Subscriber] = []


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
