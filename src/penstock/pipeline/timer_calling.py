"""Calls a timer's handler: by itself, or in a transaction that also says that it is handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from penstock.core.claims import Claim
from penstock.core.failures import describe
from penstock.core.handlers import require_done
from penstock.core.timer_messages import Nack, TimerMessage
from penstock.core.timer_verdict import inbox_id
from penstock.errors import HandlerQuit, HandlerTimeout, ServerUnavailable
from penstock.pipeline.handling import current_handling
from penstock.pipeline.resources import require_open
from penstock.pipeline.timer_signature import Part, TimerPlan
from penstock.stores.async_worker_connection import enter_loop, leave_loop
from penstock.stores.timer_inbox import TimerInbox
from penstock.stores.worker_connection import WorkerConnection, raise_if_read_only

T = TypeVar("T")
Caller = Callable[[Callable[..., Any], list[Any]], Any]
Conclude = Callable[[Any], T]
"""Turns what the handler returned into what is done about it, before anything is committed."""


class BrokenOff(ServerUnavailable):
    """The connection broke in the middle of a timer."""


class Nacked(Exception):
    """The handler wants the timer back; nothing that it wrote in the worker's transaction stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerSeams:
    """What an application wires into a timer's handler."""

    open_worker: Callable[[], WorkerConnection]
    insert_sends: Callable[[WorkerConnection, Any], None]
    """Inserts what handlers sent through their session, in the worker's transaction."""
    limited: Callable[[Caller, Callable[[], object]], Caller] = field(
        default=lambda call, _on_overdue: call
    )
    """Puts a handler's time limit around what calls it; the second is called when it is over."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each call."""


class Calls(Protocol):
    """Calls one handler, for one timer at a time."""

    def run(self, message: TimerMessage, due_score: float, conclude: Conclude[T]) -> T:
        """Call the handler. Raises what it raises, Nacked, ClaimRefused or ServerUnavailable."""

    def interrupt(self) -> None:
        """Cut the transaction under the handler, from another thread."""

    def close(self) -> None:
        """Give up connections; must not raise."""


@dataclass(frozen=True, slots=True)
class TimerHandling:
    """The timer in a handler's hands, for what is sent meanwhile."""

    message: TimerMessage

    def inherited_metadata(self) -> dict[str, Any]:
        """What an event sent by this handler carries on."""
        message = self.message
        return {"correlation_id": message.correlation_id, "causation_id": message.timer_id}


class PlainCalls:
    """At least once: the handler keeps its own books."""

    def __init__(self, plan: TimerPlan, seams: TimerSeams) -> None:
        self._plan = plan
        self._seams = seams
        self._loop = enter_loop() if plan.is_async else None
        self._call = seams.limited(self._awaited if plan.is_async else _called, _nothing)

    def run(self, message: TimerMessage, due_score: float, conclude: Conclude[T]) -> T:  # noqa: ARG002
        """Call the handler. Raises what it raises, or Nacked."""
        require_open(self._plan.resources)
        arguments = self._plan.arguments(message, {})
        with self._seams.around(), _handling(message):
            value = self._call(self._plan.function, arguments)
            require_done(value)
        if isinstance(message.decision, Nack):
            raise Nacked
        return conclude(value)

    def interrupt(self) -> None:
        """There is nothing to cut."""

    def close(self) -> None:
        """Leave the loop."""
        if self._loop is not None:
            leave_loop()

    def _awaited(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        assert self._loop is not None
        awaited = _awaited(function, arguments)
        return asyncio.run_coroutine_threadsafe(awaited, self._loop).result()


class ExactlyOnceCalls:
    """The handler's writes and the inbox row of its timer commit together."""

    def __init__(self, consumer: str, plan: TimerPlan, seams: TimerSeams, schema: str) -> None:
        self._consumer = consumer
        self._plan = plan
        self._seams = seams
        self._inbox = TimerInbox(schema)
        self._worker: WorkerConnection | None = None

    def run(self, message: TimerMessage, due_score: float, conclude: Conclude[T]) -> T:
        """Call the handler and commit. Raises as `Calls.run` says."""
        require_open(self._plan.resources)
        worker = self._opened()
        try:
            with self._seams.around():
                return worker.run(partial(self._run, worker, message, due_score, conclude))
        except HandlerTimeout:
            # Whatever ended the query may still be under way.
            self.close()
            raise

    def _run(
        self,
        worker: WorkerConnection,
        message: TimerMessage,
        due_score: float,
        conclude: Conclude[T],
    ) -> T:
        with self._undone_on_error(worker):
            event_id = inbox_id(message.timer_id, message.correlation_id, due_score)
            seal_id = self._inbox.claim(worker, Claim(self._consumer, event_id))
            session = worker.session() if Part.SESSION in self._plan.parameters else None
            call = self._seams.limited(worker.call, worker.cancel)
            with worker.guard.lent(), _handling(message):
                arguments = self._plan.arguments(message, self._lent(worker, session))
                value = call(self._plan.function, arguments)
                if session is not None:
                    call(session.flush, [])
            worker.guard.require_kept()
            if isinstance(message.decision, Nack):
                raise Nacked
            concluded = conclude(value)
            if session is not None:
                self._seams.insert_sends(worker, session)
            self._inbox.commit(worker, seal_id)
            return concluded

    @contextmanager
    def _undone_on_error(self, worker: WorkerConnection) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            cause = worker.guard.violation or error
            if worker.is_lost:
                # Whether a COMMIT happened is read from the inbox at the next attempt, not guessed.
                raise BrokenOff(
                    f"The connection of {self._consumer} broke while a timer was handled "
                    f"({type(cause).__name__}). It happened as a whole or not at all; the inbox "
                    "tells."
                ) from cause
            if not isinstance(cause, HandlerTimeout):
                worker.rollback()
                raise_if_read_only(worker, cause)
            if cause is not error:
                raise cause from error
            raise

    def _lent(self, worker: WorkerConnection, session: Any) -> dict[Part, Any]:
        parts = self._plan.parameters
        return {
            Part.SESSION: session,
            Part.CONNECTION: worker.connection() if Part.CONNECTION in parts else None,
            Part.CURSOR: worker.cursor() if Part.CURSOR in parts else None,
        }

    def _opened(self) -> WorkerConnection:
        if self._worker is None or self._worker.is_lost or self._worker.is_spoiled:
            self.close()
            self._worker = self._seams.open_worker()
        return self._worker

    def interrupt(self) -> None:
        """Cut the connection: the server rolls back, whatever the handler does."""
        if (worker := self._worker) is not None:
            worker.interrupt()

    def close(self) -> None:
        """Give up the connection."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def _called(function: Callable[..., Any], arguments: list[Any]) -> Any:
    return function(*arguments)


def _nothing() -> None:
    pass


@contextmanager
def _handling(message: TimerMessage) -> Iterator[None]:
    token = current_handling.set(TimerHandling(message))
    try:
        yield
    except Exception:
        raise
    except BaseException as raised:
        raise _quit(raised) from raised
    finally:
        current_handling.reset(token)


async def _awaited(function: Callable[..., Any], arguments: list[Any]) -> Any:
    """Await a handler; what would end the event loop ends here."""
    try:
        return await function(*arguments)
    except Exception:
        raise
    except BaseException as raised:
        raise _quit(raised) from raised


def _quit(raised: BaseException) -> HandlerQuit:
    # No worker ends for one timer, nor is anybody's task cancelled by its own handler.
    return HandlerQuit(f"The handler raised {describe(raised)}, which ends nobody here.")
