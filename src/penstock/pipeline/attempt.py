"""One attempt at a batch: claim, handle, seal, commit; or nothing of it."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import psycopg
from pydantic import ValidationError

from penstock.core.failures import as_contract_error, describe
from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry
from penstock.errors import ContractError, HandlerTimeout, LeaseLost, ServerUnavailable
from penstock.pipeline.context import Context
from penstock.pipeline.handling import Handling, current_handling
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan, View
from penstock.stores.inbox import Claim, Inbox
from penstock.stores.suspects import Suspects
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted


class HandlerFailed(Exception):
    """An attempt failed and was rolled back; `culprit` is the position, where it is known."""

    def __init__(self, error: Exception, culprit: int | None) -> None:
        super().__init__(str(type(error).__name__))
        self.error = error
        self.culprit = culprit


@dataclass(frozen=True, slots=True)
class Settled:
    """How far an attempt came, and how many events its handler saw."""

    last: int
    handled: int


class Attempt:
    """Runs a consumer's handler over batches, each in one transaction of the worker's."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        *,
        inbox: Inbox,
        suspects: Suspects,
        worker: WorkerConnection,
        seams: ConsumerSeams,
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._plan = plan
        self._inbox = inbox
        self._suspects = suspects
        self._worker = worker
        self._seams = seams
        self._call = seams.caller(worker)
        # Under a time limit every statement is awaited, so that its time is the handler's.
        self._may_pipeline = plan.can_pipeline and options.timeout_seconds is None
        self._claim: Claim | None = None

    def run(self, batch: Batch, lease: Lease, attempt_number: int) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""
        if not self._may_claim_ahead(batch, lease, attempt_number):
            return self._run(batch, lease, attempt_number, ahead=False)
        try:
            return self._run(batch, lease, attempt_number, ahead=True)
        except HandlerFailed:
            if self._claim is None or not self._inbox.fell_short(self._worker, self._claim):
                raise
        # Some of it was settled before. That is nobody's failure, and nothing of it was kept.
        return self._run(batch, lease, attempt_number, ahead=False)

    def _may_claim_ahead(self, batch: Batch, lease: Lease, attempt_number: int) -> bool:
        """Whether to call the handler while the server still writes the deduplication rows.

        Where only this lane has ever been, nothing beyond its checkpoint is settled. A handler
        that awaits, or whose time is limited, gains nothing or would be charged for the claim.
        One that wants its events singly has effects outside of the database, as a rule, and is
        never called for a settled one.
        """
        is_first_try = attempt_number == 1 and not (batch.is_careful or batch.is_suspect)
        is_plain = not self._plan.is_async and self._options.timeout_seconds is None
        is_in_batches = self._options.batch_size > 1
        return is_first_try and is_plain and is_in_batches and batch.first > lease.settled_to

    def _run(self, batch: Batch, lease: Lease, attempt_number: int, *, ahead: bool) -> Settled:
        self._claim = None
        try:
            with self._seams.around(), self._pipelined(batch):
                return self._transact(batch, lease, attempt_number, ahead=ahead)
        except LeaseLost as error:
            self._rollback_after(error)
            raise
        except HandlerFailed as failure:
            self._rollback_after(failure.error)
            raise
        except Exception as error:
            self._rollback_after(error)
            raise HandlerFailed(error, None) from error

    def bury(self, batch: Batch, lease: Lease, starts: list[dict[str, Any]]) -> Settled:
        """Settle an event that ends its process as a dead letter, without calling the handler."""
        entry = batch.entries[0]
        try:
            claim = self._inbox.claim(self._worker, self._consumer, lease, batch, ["dead"])
            if claim.fresh:
                handler = self._plan.function
                name = f"{handler.__module__}.{handler.__qualname__}"
                self._suspects.bury(self._worker, self._consumer, entry, name, starts)
            self._suspects.finish_within(self._worker, self._consumer, entry.position)
            self._inbox.commit(self._worker, claim, lease, batch.last)
        except Exception as error:
            self._rollback_after(error)
            raise
        return Settled(batch.last, 0)

    def _rollback_after(self, error: Exception) -> None:
        if self._worker.is_lost:
            # Not an attempt: whether a COMMIT happened is read from the database, not guessed.
            raise ServerUnavailable(
                f"The connection of {self._consumer} broke in mid-batch: {describe(error)}. "
                "The batch happened as a whole or not at all; the checkpoint tells."
            ) from error
        if isinstance(error, psycopg.NotSupportedError):
            # COPY and server-side cursors do not work in a pipeline: remember, go without.
            self._may_pipeline = False
        if not isinstance(error, HandlerTimeout):
            self._worker.rollback()

    def _pipelined(self, batch: Batch) -> AbstractContextManager[Any]:
        if self._may_pipeline and not batch.is_careful:
            return self._worker.pipelined()
        return nullcontext()

    def _transact(self, batch: Batch, lease: Lease, attempt_number: int, *, ahead: bool) -> Settled:
        outcomes = ["handled" if self._is_mine(entry) else "skipped" for entry in batch.entries]
        claim = self._inbox.claim(self._worker, self._consumer, lease, batch, outcomes, ahead=ahead)
        self._claim = claim
        emit(signals.BatchClaimed(self._consumer, len(batch.entries), len(claim.fresh)))
        todo = self._todo(batch, claim)
        session = self._worker.session() if View.SESSION in self._plan.parameters else None
        with self._worker.guard.lent():
            handled = self._handle(todo, session, attempt_number)
            if session is not None:
                self._call(session.flush, [])
        last = batch.last if handled == len(todo) else todo[handled].position - 1
        if session is not None:
            self._seams.insert_sends(self._worker, session)
        if last < batch.last:
            rest = [entry for entry in batch.entries if entry.position > last]
            self._inbox.unclaim(
                self._worker, self._consumer, [e for e in rest if e.position in claim.fresh]
            )
        if batch.is_suspect:
            self._suspects.finish_within(self._worker, self._consumer, batch.first)
        emit(signals.BatchSealed(self._consumer, last))
        self._inbox.commit(self._worker, claim, lease, last)
        return Settled(last, handled)

    def _is_mine(self, entry: Entry) -> bool:
        return self._plan.names(entry) or self._options.on_unknown == "block"

    def _todo(self, batch: Batch, claim: Claim) -> list[Entry]:
        """The entries that the handler has to see: new, and of a type that it names."""
        fresh = [entry for entry in batch.entries if entry.position in claim.fresh]
        todo = [entry for entry in fresh if self._is_mine(entry)]
        if len(todo) < len(fresh) and is_wanted(signals.EventSkipped):
            for entry in fresh:
                if not self._is_mine(entry):
                    emit(signals.EventSkipped(self._consumer, entry.position, entry.event_type))
        return todo

    def _handle(self, todo: list[Entry], session: Any, attempt_number: int) -> int:
        """Call the handler; returns how many entries it has done."""
        lent = self._lent(session)
        if self._plan.is_batch:
            if todo:
                self._handle_list(todo, lent, attempt_number)
            return len(todo)
        deadline = time.monotonic() + self._options.batch_seconds
        token = current_handling.set(None)
        try:
            for index, entry in enumerate(todo):
                if index and (time.monotonic() > deadline or self._seams.stop_requested()):
                    return index
                self._handle_one(entry, lent, attempt_number)
        except Exception as raised:
            error = self._worker.guard.violation or raised
            pipelined = self._may_pipeline and isinstance(error, psycopg.Error)
            raise HandlerFailed(error, None if pipelined else entry.position) from raised
        finally:
            current_handling.reset(token)
        return len(todo)

    def _handle_list(self, todo: list[Entry], lent: list[Any], attempt_number: int) -> None:
        """A list has one context, that of its first event."""
        arguments = self._arguments(lent, [self._decode(e) for e in todo], todo[0], attempt_number)
        self._call(self._plan.function, arguments)
        self._raise_violation()

    def _handle_one(self, entry: Entry, lent: list[Any], attempt_number: int) -> None:
        arguments = self._arguments(lent, self._decode(entry), entry, attempt_number)
        current_handling.set(Handling(entry))
        self._call(self._plan.function, arguments)
        self._raise_violation()
        if is_wanted(signals.EventHandled):
            emit(signals.EventHandled(self._consumer, entry.position, entry.event_uuid))

    def _raise_violation(self) -> None:
        """A refused commit or rollback fails the event even where the handler swallowed it."""
        if (violation := self._worker.guard.violation) is not None:
            raise violation

    def _lent(self, session: Any) -> list[Any]:
        """What every call of a batch has in common, in the handler's order."""
        views = self._plan.parameters
        lent: dict[View | None, Any] = {
            View.SESSION: session,
            View.CONNECTION: self._worker.connection() if View.CONNECTION in views else None,
            View.CURSOR: self._worker.cursor() if View.CURSOR in views else None,
        }
        return [lent.get(view) for view in views]

    def _arguments(
        self, lent: list[Any], event: Any, entry: Entry, attempt_number: int
    ) -> list[Any]:
        arguments = lent.copy()
        for index, view in enumerate(self._plan.parameters):
            if view is None:
                arguments[index] = event
            elif view is View.CONTEXT:
                arguments[index] = Context(self._consumer, entry, attempt_number)
        return arguments

    def _decode(self, entry: Entry) -> Any:
        if not self._plan.names(entry):
            raise ContractError(
                f"{entry.event_type} at {entry.stream_name}/{entry.position} is not known to "
                f"{self._consumer}, which must understand everything. It waits here and loses "
                "nothing; deploy a handler for it."
            )
        try:
            return self._plan.decode(entry)
        except ValidationError as error:
            raise as_contract_error(error, f"{entry.stream_name}/{entry.position}") from None
