"""The two looser guarantees: the same steps as exactly once, with the handler before or after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.core.discretion import describe_about
from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.wire import Entry
from penstock.errors import AlreadyHandled, LeaseLost, ServerUnavailable, UsageError
from penstock.pipeline.attempt import Settled, undone_on_error
from penstock.pipeline.calling import Calls, HandlerFailed, MakeContext
from penstock.pipeline.context import Context
from penstock.pipeline.ledger import Ledger
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.traced import traced
from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.inbox import Claim
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

NEVER_LEFT = (
    "context.complete() was entered and not left: nothing of it was written. Use it with `with`, "
    "or `async with`."
)


class AtLeastOnce:
    """Handle, then advance: after a crash the events of a batch are handled again."""

    def __init__(
        self,
        consumer: str,
        *,
        calls: Calls,
        ledger: Ledger,
        worker: WorkerConnection,
        seams: ConsumerSeams,
    ) -> None:
        self._consumer = consumer
        self._calls = calls
        self._ledger = ledger
        self._worker = worker
        self._seams = seams

    @traced
    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""
        if batch.called is not None:
            self._completion(batch, lease, batch.called).settle(batch.last)
            return Settled(batch.last, 0)
        fresh = self._ledger.survey(batch, lease)
        if batch.is_parked:
            # Whatever somebody has taken away is not called, and not settled either.
            left = tuple(entry for entry in batch.entries if entry.position in fresh)
            if not left:
                return Settled(batch.last, 0)
            batch = replace(batch, entries=left)
        todo = self._ledger.todo(batch, fresh)
        progress = self._completion(batch, lease, fresh)
        failure: HandlerFailed | None = None
        with self._seams.around():
            try:
                context_of = self._calls.context_for(batch, completion=progress)
                handled = self._calls.each(todo, None, progress.left_before(context_of))
            except HandlerFailed as failed:
                failure = failed
        progress.raise_loss()
        failure = progress.unfinished(failure)
        if failure is not None:
            handled = next((n for n, e in enumerate(todo) if e.position == failure.culprit), 0)
            if progress.is_over(todo[handled]):
                self._tell_late(progress, todo[handled], failure)
                handled, failure = handled + 1, None
        last = batch.last if handled == len(todo) else todo[handled].position - 1
        # What came before a failing event is done, and is not done again; where this connection
        # is of no more use, it is written down on another one.
        if failure is not None:
            failure.is_alone = failure.culprit is not None
        called = None
        if failure is not None and self._worker.is_spoiled:
            called = progress.unsettled(last)
        else:
            progress.settle(last)
        if progress.settled_to == 0 and failure is not None and called is None:
            raise failure
        return Settled(progress.settled_to, handled, failure, called)

    def _completion(self, batch: Batch, lease: Lease, fresh: frozenset[int]) -> Completion:
        return Completion(
            self._consumer,
            batch,
            lease,
            fresh,
            ledger=self._ledger,
            worker=self._worker,
            seams=self._seams,
        )

    def _tell_late(self, progress: Completion, entry: Entry, failure: HandlerFailed) -> None:
        if progress.has_completed(entry):
            error = describe_about(failure.error, [entry])
            event = (self._consumer, entry.position, entry.event_uuid)
            emit(signals.CompletedThenFailed(*event, error))


class Completion:
    """How far a batch is settled while its handlers run; `context.complete()` settles more."""

    def __init__(
        self,
        consumer: str,
        batch: Batch,
        lease: Lease,
        fresh: frozenset[int],
        *,
        ledger: Ledger,
        worker: WorkerConnection,
        seams: ConsumerSeams,
    ) -> None:
        self._consumer = consumer
        self._batch = batch
        self._lease = lease
        self._fresh = fresh
        self._ledger = ledger
        self._worker = worker
        self._seams = seams
        self._open_for: Entry | None = None
        self._loss: Exception | None = None
        self._taken_away: set[int] = set()
        self.settled_to = 0
        """How far the books are; 0: as they were."""

    def has_completed(self, entry: Entry) -> bool:
        """Whether a handler has completed this event."""
        return entry.position <= self.settled_to

    def is_over(self, entry: Entry) -> bool:
        """Whether no failure of its handler counts: it is completed, or somebody took it away."""
        return self.has_completed(entry) or entry.position in self._taken_away

    def settle(self, last: int) -> None:
        """Settle everything up to `last` that is not settled yet."""
        part = self._part(last)
        if part is not None:
            with undone_on_error(self._worker, self._consumer):
                self._close(part, self._ledger.open(part, self._lease, called=self._fresh))

    def unsettled(self, last: int) -> Batch | None:
        """What `settle` would settle, for another connection to do it."""
        part = self._part(last)
        return part and replace(part, called=self._fresh)

    def raise_loss(self) -> None:
        """A lost lease or connection counts even where a handler has swallowed it."""
        if self._loss is not None:
            raise self._loss

    def unfinished(self, failure: HandlerFailed | None) -> HandlerFailed | None:
        """The failure of an event whose block was entered and never left, if it is the first."""
        block_of = self._open_for and self._open_for.position
        if block_of is None or (failure is not None and failure.culprit in (None, block_of)):
            return failure
        return HandlerFailed(UsageError(NEVER_LEFT), block_of)

    def left_before(self, context_of: MakeContext) -> MakeContext:
        """No context for another event in a block that an earlier one has entered and not left."""

        def make(entry: Entry) -> Context:
            if self._open_for is not None:
                raise UsageError(NEVER_LEFT)
            return context_of(entry)

        return make

    def begin(self, entry: Entry) -> Any:
        """What `context.complete()` gives a handler: `with`, or `async with`, a session."""
        is_async = isinstance(self._worker, AsyncWorkerConnection)
        return self._complete_async(entry) if is_async else self._complete(entry)

    @contextmanager
    def _complete(self, entry: Entry) -> Iterator[Any]:
        """The session's commit settles the event, and what came before it in the batch."""
        self._require_ready(entry)
        with self._told(entry), undone_on_error(self._worker, self._consumer):
            part, claim = self._open(entry)
            session = self._worker.session()
            with self._worker.guard.lent():
                yield session
                session.flush()
            self._finish(part, claim, session)

    @asynccontextmanager
    async def _complete_async(self, entry: Entry) -> AsyncIterator[Any]:
        """The same for `async def` handlers."""
        self._require_ready(entry)
        worker = self._worker
        assert isinstance(worker, AsyncWorkerConnection)
        with self._told(entry):
            try:
                part, claim = await worker.run_within(lambda: self._open(entry))
                session = await worker.run_within(worker.session)
                with worker.guard.lent():
                    yield session
                    await session.flush()
                await worker.run_within(lambda: self._finish(part, claim, session))
            except BaseException as error:
                await worker.run_within(partial(self._undo, error))
                raise

    def _require_ready(self, entry: Entry) -> None:
        self._worker.guard.require_kept()
        if self._open_for is not None or self.has_completed(entry):
            raise UsageError(
                "context.complete() is for once: this event is being completed, or is already. "
                "Nothing was written; put everything into one block."
            )

    @contextmanager
    def _told(self, entry: Entry) -> Iterator[None]:
        """The handler gets its own errors back; a lost lease or connection is remembered."""
        self._open_for = entry
        try:
            yield
        except (LeaseLost, ServerUnavailable) as lost:
            self._loss = lost
            raise
        except HandlerFailed as failed:
            raise self._worker.guard.violation or failed.error from None
        finally:
            self._open_for = None
            self._worker.guard.violation = None

    def _undo(self, error: BaseException) -> None:
        with undone_on_error(self._worker, self._consumer):
            raise error

    def _open(self, entry: Entry) -> tuple[Batch, Claim]:
        is_last = entry.position == self._batch.entries[-1].position
        part = self._part(self._batch.last if is_last else entry.position)
        assert part is not None
        claim = self._ledger.open(part, self._lease, called=self._fresh)
        if entry.position not in claim.fresh:
            # Without its row it may be given up, or a dead letter again that others redrive.
            self._taken_away.add(entry.position)
            raise AlreadyHandled(
                f"An operator took {entry.stream_name}/{entry.position} away while its handler "
                "ran, or an earlier event of its key. Nothing was written: it is discarded, a "
                "dead letter as before, or waits behind one."
            )
        return part, claim

    def _finish(self, part: Batch, claim: Claim, session: Any) -> None:
        self._worker.guard.require_kept()
        self._seams.insert_sends(self._worker, session)
        self._close(part, claim)

    def _close(self, part: Batch, claim: Claim) -> None:
        handled = len(self._ledger.mine(part, claim))
        self._ledger.close(part, self._lease, claim, part.last, handled=handled)
        self.settled_to = part.last
        if not part.is_parked:
            self._lease = self._lease.at(part.last)

    def _part(self, last: int) -> Batch | None:
        rest = self._batch.after(self.settled_to)
        return rest and (rest if last >= rest.last else rest.until(last))


class AtMostOnce:
    """Advance, then handle: whatever a crash interrupts is not handled again."""

    def __init__(
        self,
        consumer: str,
        *,
        calls: Calls,
        ledger: Ledger,
        worker: WorkerConnection,
        seams: ConsumerSeams,
        on_failure: Callable[[Entry, Exception], None],
    ) -> None:
        self._consumer = consumer
        self._calls = calls
        self._ledger = ledger
        self._worker = worker
        self._seams = seams
        self._on_failure = on_failure

    @traced
    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch, then handle it to its end.

        Raises HandlerFailed only where nothing was called: an event waits for its contract.
        """
        with undone_on_error(self._worker, self._consumer):
            claim = self._ledger.open(batch, lease)
            mine = self._ledger.mine(batch, claim)
            # Now, because nobody comes back to what is settled, whatever is deployed later.
            self._calls.require_contracts(mine)
            self._ledger.close(batch, lease, claim, batch.last, handled=len(mine))
        todo = self._ledger.todo(batch, claim.fresh)
        context_of = self._calls.context_for(batch)
        with self._seams.around():
            while todo:
                try:
                    # To its end, also when the worker is asked to stop: nobody else will.
                    self._calls.each(todo, None, context_of, may_stop=False)
                    break
                except HandlerFailed as failed:
                    # A list has no culprit: all of it has failed.
                    hit = [e for e in todo if failed.culprit in (None, e.position)]
                    for entry in hit:
                        self._on_failure(entry, failed.error)
                    todo = [e for e in todo if e.position > hit[-1].position]
        return Settled(batch.last, len(claim.fresh))
