"""What an application wires into a consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from penstock.core.trouble import Trouble
from penstock.pipeline.effects import OnceCaller
from penstock.stores.stream_keys import StreamKeys
from penstock.stores.worker_connection import WorkerConnection, nothing


def insisting(
    around: Callable[[], AbstractContextManager[Any]],
) -> Callable[[], AbstractContextManager[Any]]:
    """The same surroundings; whatever goes wrong inside comes out, also if they swallow it.

    What was rolled back would count as handled otherwise.
    """
    if around is nullcontext:
        return around

    @contextmanager
    def surroundings() -> Iterator[None]:
        failure: BaseException | None = None
        with around():
            try:
                yield
            except BaseException as error:
                failure = error
                raise
        if failure is not None:
            raise failure

    return surroundings


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
    effects: OnceCaller | None = None
    """Calls to the outside, for contexts."""
    keys: StreamKeys | None = None
    """The data keys of the stream; None: sealed events cannot be opened here."""
    tell: Callable[[WorkerConnection, Trouble], None] = field(
        default=lambda _worker, _trouble: None
    )
    """Tells of dead letters and the like, in the transaction in which they come about."""
    stop_requested: Callable[[], bool] = field(default=lambda: False)
    """Whether a batch should end after the event in hand."""
    meanwhile: Callable[[], None] = nothing
    """Called while the server is at work on a batch, whatever becomes of that."""
