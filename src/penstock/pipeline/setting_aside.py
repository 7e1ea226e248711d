"""Carries out what was decided on a failed event, each in one transaction with the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.trouble import Trouble
from penstock.core.wire import Entry
from penstock.pipeline.attempt import undone_on_error
from penstock.pipeline.ledger import Ledger
from penstock.pipeline.seams import ConsumerSeams
from penstock.stores.inbox import Claim
from penstock.stores.parked import Letter, Setback
from penstock.stores.worker_connection import WorkerConnection


class SettingAside:
    """Parks, holds or buries one event at a time, live or parked already."""

    def __init__(
        self, consumer: str, *, ledger: Ledger, worker: WorkerConnection, seams: ConsumerSeams
    ) -> None:
        self._consumer = consumer
        self._ledger = ledger
        self._worker = worker
        self._seams = seams

    def park(self, batch: Batch, lease: Lease, setback: Setback) -> None:
        """Try it again later; its key waits behind it."""
        self._settle(batch, lease, "parked", lambda: self._set_aside(batch, setback))

    def hold(self, batch: Batch, lease: Lease, setback: Setback, letter: Letter) -> None:
        """Keep it and its key until somebody says what becomes of it."""

        def write() -> None:
            self._bury(batch.entries[0], letter, "held")
            self._set_aside(batch, setback)

        self._settle(batch, lease, "parked", write)

    def bury(self, batch: Batch, lease: Lease, letter: Letter) -> None:
        """Make it a dead letter; its key goes on."""

        def write() -> None:
            self._bury(batch.entries[0], letter, "buried")
            if batch.is_parked:
                self._ledger.parked.remove(self._worker, self._consumer, batch.first)

        self._settle(batch, lease, "dead", write)

    def bury_settled(self, entry: Entry, letter: Letter) -> bool:
        """The same for an event whose checkpoint was passed before its attempt.

        Whoever holds the lease by now: the event is settled, and nobody else knows that it failed.
        Returns whether it is a dead letter; not where the consumer was moved back or forgotten.
        """
        with undone_on_error(self._worker, self._consumer):
            outcome = self._ledger.parked.begin_letter(self._worker, self._consumer, entry)
            if outcome == "handled":
                self._bury(entry, letter, "buried")
                self._ledger.parked.declare_dead(self._worker, self._consumer, entry)
            else:
                self._worker.rollback()
        # If it is dead already, the answer to an earlier COMMIT was lost.
        return outcome in ("handled", "dead")

    def _settle(self, batch: Batch, lease: Lease, outcome: str, write: Callable[[], None]) -> None:
        with undone_on_error(self._worker, self._consumer):
            claim = self._open(batch, lease, outcome)
            if claim.fresh or claim.waiting:
                write()
            self._ledger.commit(batch, lease, claim, batch.last, handled=0)

    def _open(self, batch: Batch, lease: Lease, outcome: str) -> Claim:
        if batch.is_parked:
            # It has had its attempt, so nothing is overtaken any more.
            return self._ledger.parked.claim(
                self._worker, self._consumer, lease, batch, in_order=False
            )
        return self._ledger.inbox.claim(self._worker, self._consumer, lease, batch, [outcome])

    def _set_aside(self, batch: Batch, setback: Setback) -> None:
        if batch.is_parked:
            self._ledger.parked.postpone(self._worker, self._consumer, batch.first, setback)
        else:
            self._ledger.parked.park(self._worker, self._consumer, batch.entries, setback)

    def _bury(self, entry: Entry, letter: Letter, kind: Literal["buried", "held"]) -> None:
        self._ledger.parked.bury(self._worker, self._consumer, entry, letter)
        self._seams.tell(
            self._worker,
            Trouble(
                kind=kind,
                consumer=self._consumer,
                stream_name=entry.stream_name,
                position=entry.position,
                event_uuid=entry.event_uuid,
                event_type=entry.event_type,
                reason=letter.reason,
                error=letter.error,
            ),
        )
