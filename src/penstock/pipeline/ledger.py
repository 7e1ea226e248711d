"""The books of a batch: opened with a claim, closed with fence and COMMIT, whatever comes between.

The guarantees differ in when the handler is called: in between, before, or after.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from penstock.core.contracts import known_types
from penstock.core.isolation import Batch
from penstock.core.lanes import key_hash
from penstock.core.leases import Lease
from penstock.core.options import ConsumerOptions
from penstock.core.trouble import Trouble
from penstock.core.wire import Entry, decode_body
from penstock.errors import ContractError
from penstock.pipeline.calling import HandlerFailed
from penstock.pipeline.parking import Parking
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan
from penstock.pipeline.unsealing import Unsealing
from penstock.stores.inbox import Claim, Inbox
from penstock.stores.parked import Parked, Queue
from penstock.stores.suspects import Suspects
from penstock.stores.worker_connection import WorkerConnection
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted


class NotFollowing(Exception):
    """There is no early event, or none that is certain to be handled next."""


class Ledger:
    """Writes down what becomes of a lane's events, in transactions of the worker's."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        *,
        schema: str,
        parked_per_key_max: int,
        parking: Parking,
        worker: WorkerConnection,
        seams: ConsumerSeams,
        unsealing: Unsealing,
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._plan = plan
        self._parked_per_key_max = parked_per_key_max
        self._parking = parking
        self._worker = worker
        self._seams = seams
        self._unsealing = unsealing
        self._keeps_order = options.order != "none"
        self.inbox = Inbox(schema)
        self.parked = Parked(schema)
        self.suspects = Suspects(schema)

    def open(
        self,
        batch: Batch,
        lease: Lease,
        *,
        ahead: bool = False,
        called: frozenset[int] | None = None,
    ) -> Claim:
        """Begin the transaction: which events are new, and which wait behind a parked one.

        `ahead`: without waiting for the answer, all of them are taken for new. `called`: those
        that the handler has seen by now; whatever it has not, waits, or is settled already.
        Raises HandlerFailed for a parked event that must not pass by.
        """
        if batch.is_parked:
            self._require_named(batch)
            claim = self.parked.claim(
                self._worker, self._consumer, lease, batch, in_order=self._keeps_order
            )
        else:
            waiting = self._waiting(batch) if called is None else _others(batch, called)
            outcomes = [self._outcome(entry, waiting or ()) for entry in batch.entries]
            claim = self.inbox.claim(
                self._worker,
                self._consumer,
                lease,
                batch,
                outcomes,
                ahead=ahead,
                key_hashes=_key_hashes(batch.entries) if waiting is None else None,
            )
        emit(signals.BatchClaimed(self._consumer, len(batch.entries), len(claim.fresh)))
        return claim

    def open_early(self, batch: Batch, lease: Lease) -> Claim:
        """Begin the transaction with the event that is there; it has to be numbered by its end."""
        return self.inbox.claim_early(self._worker, self._consumer, lease, batch.through - 1)

    def find_early(self, batch: Batch, lease: Lease) -> Batch:
        """The batch with the event that was there. Raises NotFollowing."""
        row = self._worker.first_row()
        if row is None or row[0] is None:
            raise NotFollowing
        entry = decode_body(lease.stream_name, batch.through, row[0].encode())
        found = replace(batch, entries=(entry,))
        if not (self.is_mine(entry) and self.is_all_new(found, lease)):
            raise NotFollowing
        emit(signals.EarlyEventRead(self._consumer, entry.position))
        emit(signals.BatchClaimed(self._consumer, 1, 1))
        return found

    def _outcome(self, entry: Entry, waiting: Collection[int]) -> str:
        if not self.is_mine(entry):
            return "skipped"
        return "parked" if entry.position in waiting else "handled"

    def _waiting(self, batch: Batch) -> frozenset[int] | None:
        return self._parking.waiting(batch.entries)

    def is_all_new(self, batch: Batch, lease: Lease) -> bool:
        """Whether it is certain, without a question, that nothing is settled or has to wait.

        Where only this lane has ever been, nothing beyond its checkpoint is settled.
        """
        return batch.first > lease.settled_to and self._waiting(batch) == frozenset()

    def todo(self, batch: Batch, fresh: frozenset[int]) -> list[Entry]:
        """The entries that the handler has to see: new, and of a type that it names."""
        new = [entry for entry in batch.entries if entry.position in fresh]
        todo = [entry for entry in new if self.is_mine(entry)]
        if len(todo) < len(new):
            self._tell_skipped(new)
        return todo

    def mine(self, batch: Batch, claim: Claim) -> list[Entry]:
        """The new events that the handler is called for."""
        return [e for e in batch.entries if e.position in claim.fresh and self.is_mine(e)]

    def _tell_skipped(self, new: Sequence[Entry]) -> None:
        if is_wanted(signals.EventsUnknown):
            known = known_types()
            unknown = [entry.event_type for entry in new if entry.event_type not in known]
            if unknown:
                emit(signals.EventsUnknown(self._consumer, len(unknown), unknown[0]))
        for entry in new:
            if self._unsealing.is_shredded(entry):
                event = (self._consumer, entry.position, entry.event_uuid)
                emit(signals.EventShredded(*event, entry.key_id))
            elif is_wanted(signals.EventSkipped) and not self.is_mine(entry):
                emit(signals.EventSkipped(self._consumer, entry.position, entry.event_type))

    def close(self, batch: Batch, lease: Lease, claim: Claim, last: int, *, handled: int) -> None:
        """Settle the batch up to `last`, give back the rest, and commit."""
        backlogs: list[Queue] = []
        waiting = [e for e in batch.entries if e.position in claim.waiting and e.position <= last]
        if batch.is_parked:
            self._unpark([e for e in batch.entries if e.position in claim.fresh], last)
        elif last < batch.last:
            claimed = claim.fresh | claim.waiting
            rest = [e for e in batch.entries if e.position > last and e.position in claimed]
            self.inbox.unclaim(self._worker, self._consumer, rest)
        if waiting:
            backlogs = self._queue_up(waiting)
        fresh = len(claim.fresh)
        if last < batch.last:
            fresh = sum(position <= last for position in claim.fresh)
        self.commit(batch, lease, claim, last, handled=handled, skipped=fresh - handled)
        if waiting:
            emit(signals.SuccessorsParked(self._consumer, len(waiting)))
        for queue in backlogs:
            emit(signals.KeyBacklogged(self._consumer, queue.behind, queue.length))

    def commit(
        self,
        batch: Batch,
        lease: Lease,
        claim: Claim,
        last: int,
        *,
        handled: int,
        skipped: int = 0,
    ) -> None:
        """Seal, fence and COMMIT; the checkpoint moves to `last`, unless it is past the batch.

        An early event has to be at its place by then.
        """
        if batch.is_suspect:
            self.suspects.finish_within(self._worker, self._consumer, batch.first)
        emit(signals.BatchSealed(self._consumer, last))
        checkpoint = lease.checkpoint if batch.is_parked else last
        early = batch.entries[0] if batch.is_early else None
        self.inbox.commit(self._worker, claim, lease, checkpoint, early)
        if not batch.is_parked:
            emit(signals.BatchCommitted(self._consumer, batch.first, last, handled, skipped))
        elif handled:
            emit(signals.ParkedHandled(self._consumer, batch.first, last, handled))

    def survey(self, batch: Batch, lease: Lease) -> frozenset[int]:
        """Which positions are new, for a handler that is called before its events are claimed."""
        control = self._parking.control
        if batch.is_parked:
            self._require_named(batch)
            return self.parked.still_there(
                control(), self._consumer, batch, in_order=self._keeps_order
            )
        waiting = self._waiting(batch)
        if waiting is not None and batch.first > lease.settled_to:
            return frozenset(entry.position for entry in batch.entries) - waiting
        in_order = self._options.order == "key" and self._parking.has_any
        hashes = _key_hashes(batch.entries) if in_order else None
        return self.inbox.survey(control(), self._consumer, batch, hashes)

    def is_mine(self, entry: Entry) -> bool:
        """Whether the handler is called for this event; never where nobody can read it."""
        if self._unsealing.is_shredded(entry):
            return False
        return self._plan.names(entry) or self._options.on_unknown == "block"

    def _require_named(self, batch: Batch) -> None:
        """Before any call: to pass by is for what comes out of the stream, not for what failed."""
        for entry in batch.entries if batch.is_owed else ():
            if not (self.is_mine(entry) or self._unsealing.is_shredded(entry)):
                raise HandlerFailed(unnamed(self._consumer, entry), entry.position)

    def _unpark(self, entries: Sequence[Entry], last: int) -> None:
        done = [entry for entry in entries if entry.position <= last]
        for outcome, is_mine in (("handled", True), ("skipped", False)):
            settled = [entry for entry in done if self.is_mine(entry) is is_mine]
            self.parked.settle(self._worker, self._consumer, settled, outcome)

    def _queue_up(self, waiting: list[Entry]) -> list[Queue]:
        """Park them behind those that failed; returns the queues that are too long.

        That is said at the limit, and whenever a queue has doubled since.
        """
        backlogs: list[Queue] = []
        for queue in self.parked.park(self._worker, self._consumer, waiting):
            limit = self._parked_per_key_max
            while limit <= queue.waiting:
                limit *= 2
            if queue.length >= limit:
                backlogs.append(queue)
                trouble = Trouble(
                    kind="backlogged",
                    consumer=self._consumer,
                    stream_name=waiting[0].stream_name,
                    position=queue.behind,
                    waiting=queue.length,
                )
                self._seams.tell(self._worker, trouble)
        return backlogs


def unnamed(consumer: str, entry: Entry) -> ContractError:
    """Why an event that failed before cannot be tried again, and is not passed by either."""
    return ContractError(
        f"{entry.event_type} at {entry.stream_name}/{entry.position} failed before, and the "
        f"handler of {consumer} does not name it any more. It was not called, and the event is "
        "kept: deploy a handler that names it and redrive it, or discard its dead letter."
    )


def _key_hashes(entries: Sequence[Entry]) -> list[int]:
    return [key_hash(entry.key, entry.event_uuid) for entry in entries]


def _others(batch: Batch, called: frozenset[int]) -> frozenset[int]:
    return frozenset(entry.position for entry in batch.entries) - called
