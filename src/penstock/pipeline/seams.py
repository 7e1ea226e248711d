"""What an application wires into a consumer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from penstock.stores.worker_connection import WorkerConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsumerSeams:
    """The worker's transaction, and what happens in and around it."""

    open_worker: Callable[[], WorkerConnection]
    insert_sends: Callable[[WorkerConnection, Any], None]
    """Inserts what handlers sent through their session, in the worker's transaction."""
    caller: Callable[[WorkerConnection], Callable[[Callable[..., Any], list[Any]], Any]] = field(
        default=lambda worker: worker.call
    )
    """What calls a handler on a worker, within its time limit."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each batch."""
    stop_requested: Callable[[], bool] = field(default=lambda: False)
    """Whether a batch should end after the event in hand."""
