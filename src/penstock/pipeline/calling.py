"""Calls a consumer's handler: for each event or for a list, with what it asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psycopg
from pydantic import ValidationError

from penstock.core.failures import as_contract_error, describe
from penstock.core.isolation import Batch
from penstock.core.options import ConsumerOptions
from penstock.core.replays import Replay
from penstock.core.wire import Entry
from penstock.errors import ConnectionBroken, ContractMissing, HandlerQuit, HandlerTimeout
from penstock.pipeline.context import Context
from penstock.pipeline.handling import Handling, current_handling
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan, View
from penstock.pipeline.unsealing import Unsealing
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import signals, tracing
from penstock.telemetry.bus import emit, is_wanted

MakeContext = Callable[[Entry], Context]
Caller = Callable[[Callable[..., Any], list[Any]], Any]


class HandlerFailed(Exception):
    """An attempt failed and was rolled back; `culprit` is the position, where it is known."""

    def __init__(self, error: Exception, culprit: int | None, *, is_alone: bool = False) -> None:
        super().__init__(str(type(error).__name__))
        self.error = error
        self.culprit = culprit
        self.is_alone = is_alone
        """Whether the culprit needs no second call by itself to be sure of it."""

    @property
    def was_interrupted(self) -> bool:
        """Whether its handler was ended wherever it was, perhaps inside the driver, or with it."""
        return isinstance(self.error, HandlerTimeout | HandlerQuit | ConnectionBroken)


class Calls:
    """One consumer's handler on one worker."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        *,
        worker: WorkerConnection,
        seams: ConsumerSeams,
        unsealing: Unsealing,
        replay: Replay | None = None,
        timing: Callable[[Caller], Caller] | None = None,
    ) -> None:
        self._consumer = consumer
        self._unsealing = unsealing
        self._replay = replay
        self._options = options
        self._plan = plan
        self._worker = worker
        self._seams = seams
        self.within_limits = seams.caller(worker)
        # An upcaster or a validator may hang as a handler does. On an event loop neither can be
        # interrupted where it does not await, and none of these awaits.
        is_limited = options.timeout_seconds is not None and not plan.is_async
        self._read = self._decode_within_limits if is_limited else self._decode
        self._call_handler = self.within_limits
        if timing is not None:
            self._call_handler = timing(self.within_limits)

    def context_for(self, batch: Batch, **more: Any) -> MakeContext:
        """Makes the contexts of a batch's events."""
        # A list has one context, and an effect belongs to one event.
        effects = None if self._plan.is_batch else self._seams.effects
        attempt = batch.attempt
        replay = self._replay
        # What a handler calls outside was called in the original's name, and is not called again.
        name = self._consumer if replay is None else replay.original
        return lambda entry: Context(
            name,
            entry,
            attempt,
            is_replay=replay is not None,
            effects=effects,
            box=self._unsealing.box(entry),
            **more,
        )

    def _lent(self, session: Any) -> list[Any]:
        """What every call of a batch has in common, in the handler's order.

        Lending a connection or a cursor waits for what was sent ahead.
        """
        views = self._plan.parameters
        lent: dict[View | None, Any] = {
            View.SESSION: session,
            View.CONNECTION: self._worker.connection() if View.CONNECTION in views else None,
            View.CURSOR: self._worker.cursor() if View.CURSOR in views else None,
        }
        return [lent.get(view) for view in views]

    def each(
        self,
        todo: list[Entry],
        session: Any,
        context_of: MakeContext,
        *,
        is_pipelined: bool = False,
        may_stop: bool = True,
    ) -> int:
        """Call the handler; returns how many entries it has done. Raises HandlerFailed."""
        if self._plan.is_batch:
            if todo:
                self._list(todo, session, context_of)
            return len(todo)
        lent = self._lent(session)
        deadline = time.monotonic() + self._options.batch_seconds
        tracer = tracing.active()
        call = self._one if tracer is None else partial(self._traced, tracer)
        token = current_handling.set(None)
        try:
            for index, entry in enumerate(todo):
                if index and may_stop and self._is_over(deadline):
                    return index
                call(entry, lent, context_of)
        except BaseException as raised:
            error = self._error(raised)
            is_vague = is_pipelined and isinstance(error, psycopg.Error)
            raise HandlerFailed(error, None if is_vague else entry.position) from raised
        finally:
            current_handling.reset(token)
        return len(todo)

    def one(self, entry: Entry, session: Any, context_of: MakeContext) -> None:
        """Call the handler for one event; whatever it raises comes out."""
        token = current_handling.set(None)
        try:
            self._one(entry, self._lent(session), context_of)
        finally:
            current_handling.reset(token)

    def _one(self, entry: Entry, lent: list[Any], context_of: MakeContext) -> None:
        entry = self._unsealing.open(entry)
        argument = self._read(entry)
        current_handling.set(Handling(entry))
        if self._plan.is_batch:
            argument = [argument]
        self._call_handler(self._plan.function, self._arguments(lent, argument, entry, context_of))
        self._worker.guard.require_kept()
        if is_wanted(signals.EventHandled):
            emit(signals.EventHandled(self._consumer, entry.position, entry.event_uuid))

    def _traced(
        self, tracer: tracing.Tracer, entry: Entry, lent: list[Any], context_of: MakeContext
    ) -> None:
        """Call the handler below a span, which is a child of the one that sent the event."""
        opened = self._unsealing.open(entry)
        with tracer.handling(self._describe([opened], context_of)):
            self._one(entry, lent, context_of)

    def _describe(self, opened: Sequence[Entry], context_of: MakeContext) -> tracing.Call:
        context, is_list = context_of(opened[0]), self._plan.is_batch
        return tracing.Call(self._consumer, opened, context.attempt, context.is_replay, is_list)

    def _list(self, todo: list[Entry], session: Any, context_of: MakeContext) -> None:
        """A list has one context, that of its first event.

        It is decoded first: the server may still be at work on what was sent ahead.
        """
        tracer = tracing.active()
        try:
            opened = [self._unsealing.open(entry) for entry in todo]
            with (
                tracing.NOTHING
                if tracer is None
                else tracer.handling(self._describe(opened, context_of))
            ):
                events = [self._read(entry) for entry in opened]
                arguments = self._arguments(self._lent(session), events, opened[0], context_of)
                self._call_handler(self._plan.function, arguments)
                self._worker.guard.require_kept()
        except BaseException as raised:
            error = self._error(raised)
            raise HandlerFailed(error, todo[0].position if len(todo) == 1 else None) from raised

    def _is_over(self, deadline: float) -> bool:
        return time.monotonic() > deadline or self._seams.stop_requested()

    def _error(self, raised: BaseException) -> Exception:
        """What failed: the refusal that a handler ran into, or else what it raised."""
        if isinstance(raised, Exception):
            return self._worker.guard.violation or raised
        # No worker ends for one event, nor is anybody's task cancelled by its own handler.
        return HandlerQuit(f"The handler raised {describe(raised)}, which ends nobody here.")

    def _arguments(
        self, lent: list[Any], event: Any, entry: Entry, context_of: MakeContext
    ) -> list[Any]:
        arguments = lent.copy()
        for index, view in enumerate(self._plan.parameters):
            if view is None:
                arguments[index] = event
            elif view is View.CONTEXT:
                arguments[index] = context_of(entry)
        return arguments

    def require_contracts(self, todo: Sequence[Entry]) -> None:
        """Raise HandlerFailed for the first entry that waits for a contract, before any call."""
        for entry in todo:
            try:
                self._require_named(entry)
                self._plan.require_contract(entry)
            except ContractMissing as missing:
                raise HandlerFailed(missing, entry.position) from missing

    def _require_named(self, entry: Entry) -> None:
        if not self._plan.names(entry):
            raise ContractMissing(
                f"{entry.event_type} at {entry.stream_name}/{entry.position} is not known to "
                f"{self._consumer}, which must understand everything. It waits here and loses "
                "nothing; deploy a handler for it.",
                is_version=False,
            )

    def _decode_within_limits(self, entry: Entry) -> Any:
        return self.within_limits(self._decode, [entry])

    def _decode(self, entry: Entry) -> Any:
        self._require_named(entry)
        try:
            return self._plan.decode(entry)
        except ValidationError as error:
            raise as_contract_error(error, f"{entry.stream_name}/{entry.position}") from None
