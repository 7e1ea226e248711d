"""One attempt at a batch, exactly once: claim, handle, seal, commit; or nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import psycopg

from penstock.core.failures import attribute_of, describe, is_raised_by
from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.options import ConsumerOptions, Guarantee
from penstock.errors import HandlerTimeout, LeaseLost, ServerUnavailable
from penstock.pipeline.calling import Calls, HandlerFailed
from penstock.pipeline.ledger import Ledger
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan, View
from penstock.pipeline.traced import traced
from penstock.stores.inbox import Claim
from penstock.stores.worker_connection import WorkerConnection, raise_if_read_only

DRIVER = ("psycopg", "psycopg_c", "psycopg_binary", "penstock")
"""Whose words about a lost connection quote no event: the driver's, and ours around it."""


@dataclass(frozen=True, slots=True)
class Settled:
    """How far an attempt came, and how many events its handler saw."""

    last: int
    handled: int
    failure: HandlerFailed | None = None
    """Why it ends there: the next event failed, and needs no second call to be sure of it."""
    called: Batch | None = None
    """What was handled besides, and is to be settled on another connection than this one."""


class Attempt(Protocol):
    """Handles a batch and settles it, in an order that gives one of the guarantees."""

    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""


def may_run_ahead(options: ConsumerOptions, plan: HandlerPlan) -> bool:
    """Whether to call a handler before it is certain that it has to be called.

    One that awaits, or whose time is limited, would be charged for what it waits for. One that
    wants its events singly has effects outside of the database, as a rule, and is never called
    for nothing.
    """
    is_plain = not plan.is_async and options.timeout_seconds is None
    is_in_batches = options.batch_size > 1
    return is_plain and is_in_batches and options.guarantee is Guarantee.EXACTLY_ONCE


class ExactlyOnce:
    """The handler's writes, the deduplication rows and the checkpoint commit together."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        *,
        calls: Calls,
        ledger: Ledger,
        worker: WorkerConnection,
        seams: ConsumerSeams,
    ) -> None:
        self._consumer = consumer
        self._plan = plan
        self._ledger = ledger
        self._worker = worker
        self._seams = seams
        self._calls = calls
        # Under a time limit every statement is awaited, so that its time is the handler's.
        self._may_run_ahead = may_run_ahead(options, plan)
        self._may_pipeline = plan.can_pipeline and options.timeout_seconds is None
        self._claim: Claim | None = None

    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""
        if batch.is_early or not self._may_claim_ahead(batch, lease):
            return self._run(batch, lease, ahead=False)
        try:
            return self._run(batch, lease, ahead=True)
        except HandlerFailed:
            if self._claim is None or not self._ledger.inbox.fell_short(self._worker, self._claim):
                raise
        # Some of it was settled before. That is nobody's failure, and nothing of it was kept.
        return self._run(batch, lease, ahead=False)

    def _may_claim_ahead(self, batch: Batch, lease: Lease) -> bool:
        """Whether to call the handler while the server still writes the deduplication rows.

        Not where something may be settled, or has to wait behind a parked event.
        """
        is_first_try = not (batch.is_careful or batch.is_suspect or batch.is_parked)
        return is_first_try and self._may_run_ahead and self._ledger.is_all_new(batch, lease)

    @traced
    def _run(self, batch: Batch, lease: Lease, *, ahead: bool) -> Settled:
        self._claim = None
        try:
            with (
                undone_on_error(self._worker, self._consumer),
                self._seams.around(),
                self._pipelined(batch),
            ):
                return self._transact(batch, lease, ahead=ahead)
        except HandlerFailed as failed:
            if isinstance(failed.error, psycopg.NotSupportedError):
                # COPY and server-side cursors do not work in a pipeline: remember, go without.
                self._may_pipeline = False
            raise

    def _pipelined(self, batch: Batch) -> AbstractContextManager[Any]:
        if self._may_pipeline and not batch.is_careful:
            return self._worker.pipelined()
        return nullcontext()

    def _transact(self, batch: Batch, lease: Lease, *, ahead: bool) -> Settled:
        if batch.is_early:
            claim = self._ledger.open_early(batch, lease)
            session = self._session()
            return self._handle_early(self._ledger.find_early(batch, lease), lease, claim, session)
        claim = self._claim = self._ledger.open(batch, lease, ahead=ahead)
        return self._handle(batch, lease, claim, self._session())

    def _session(self) -> Any:
        return self._worker.session() if View.SESSION in self._plan.parameters else None

    def _handle(self, batch: Batch, lease: Lease, claim: Claim, session: Any) -> Settled:
        todo = self._ledger.todo(batch, claim.fresh)
        with self._worker.guard.lent():
            handled = self._calls.each(
                todo,
                session,
                self._calls.context_for(batch),
                is_pipelined=self._may_pipeline,
            )
            if session is not None:
                self._calls.within_limits(session.flush, [])
        last = batch.last if handled == len(todo) else todo[handled].position - 1
        if session is not None:
            self._seams.insert_sends(self._worker, session)
        self._ledger.close(batch, lease, claim, last, handled=handled)
        return Settled(last, handled)

    _handle_early = traced(_handle)


@contextmanager
def undone_on_error(worker: WorkerConnection, consumer: str) -> Iterator[None]:
    """Whatever fails in here is rolled back, and comes out as what a lane can judge."""
    try:
        yield
    except Exception as error:
        cause = error.error if isinstance(error, HandlerFailed) else error
        if worker.is_lost:
            # Not an attempt: whether a COMMIT happened is read from the database, not guessed.
            raise ServerUnavailable(
                f"The connection of {consumer} broke in mid-batch: {_without_values(cause)}. "
                "The batch happened as a whole or not at all; the checkpoint tells."
            ) from cause
        if not isinstance(cause, HandlerTimeout):
            worker.rollback()
            raise_if_read_only(worker, cause)
        if isinstance(error, HandlerFailed | LeaseLost):
            raise
        raise HandlerFailed(error, None) from error
    except BaseException:
        # Whatever ended it may have struck in the middle of a statement. Then this fails too, and
        # the transaction that is left open says so.
        with suppress(psycopg.Error):
            worker.rollback()
        raise


def _without_values(cause: Exception) -> str:
    """What a driver says of a lost connection; of anything else its kind only.

    Whatever a handler raises may quote its event, and so does SQLAlchemy.
    """
    told = attribute_of(cause, "orig") or cause
    severity = attribute_of(attribute_of(told, "diag"), "severity_nonlocalized")
    is_of_a_loss = isinstance(told, psycopg.OperationalError | psycopg.InterfaceError)
    is_drivers = (is_of_a_loss or severity == "FATAL") and is_raised_by(told, *DRIVER)
    return describe(told) if is_drivers else type(cause).__name__
