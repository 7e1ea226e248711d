"""Penstock: events sent in your transaction, handled exactly once by every consumer."""

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
