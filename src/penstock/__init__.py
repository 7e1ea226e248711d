"""Penstock: events sent in your transaction, handled exactly once by every consumer."""

from penstock.app import Pipeline
from penstock.app.discovery import autodiscover
from penstock.core.events import Event, RawEvent, StreamEvent
from penstock.core.options import Guarantee
from penstock.core.retry import Retry
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
    "PenstockError",
    "Pipeline",
    "RawEvent",
    "Retry",
    "RetryableError",
    "RollbackInTransactionError",
    "StreamEvent",
    "autodiscover",
]
