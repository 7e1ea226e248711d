"""Penstock: events sent in your transaction, handled exactly once by every consumer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.app import Pipeline
    from penstock.app.discovery import autodiscover
    from penstock.app.timer_queue import TimerQueue
    from penstock.core.events import Event, RawEvent, StreamEvent
    from penstock.core.options import Guarantee
    from penstock.core.retry import Retry
    from penstock.core.timer_messages import TimerMessage
    from penstock.core.timers import PendingTimer
    from penstock.errors import (
        AlreadyHandled,
        CommitInTransactionError,
        ContractError,
        EffectUnknown,
        FatalError,
        HandlerTimeout,
        LockContention,
        OutcomeUnknown,
        PenstockError,
        RetryableError,
        RollbackInTransactionError,
    )
    from penstock.pipeline.context import Context

__all__ = [
    "AlreadyHandled",
    "CommitInTransactionError",
    "Context",
    "ContractError",
    "EffectUnknown",
    "Event",
    "FatalError",
    "Guarantee",
    "HandlerTimeout",
    "LockContention",
    "OutcomeUnknown",
    "PendingTimer",
    "PenstockError",
    "Pipeline",
    "RawEvent",
    "Retry",
    "RetryableError",
    "RollbackInTransactionError",
    "StreamEvent",
    "TimerMessage",
    "TimerQueue",
    "autodiscover",
]

_MODULES = {
    "Context": "penstock.pipeline.context",
    "Event": "penstock.core.events",
    "Guarantee": "penstock.core.options",
    "PendingTimer": "penstock.core.timers",
    "Pipeline": "penstock.app",
    "RawEvent": "penstock.core.events",
    "Retry": "penstock.core.retry",
    "StreamEvent": "penstock.core.events",
    "TimerMessage": "penstock.core.timer_messages",
    "TimerQueue": "penstock.app.timer_queue",
    "autodiscover": "penstock.app.discovery",
}


if not TYPE_CHECKING:
    # Type checkers are not told: a name that does not exist is to be an error for them.
    def __getattr__(name: str) -> Any:
        """A public name, imported when it is used: a command that only looks loads no more."""
        if name not in __all__:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = getattr(import_module(_MODULES.get(name, "penstock.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
