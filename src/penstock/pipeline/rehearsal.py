"""A handler tried on one event, with everything rolled back and nothing called outside."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import Literal

from penstock.core.discretion import describe_about
from penstock.core.failures import describe
from penstock.core.isolation import Batch
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry
from penstock.pipeline.calling import Calls
from penstock.pipeline.effects import EffectReached
from penstock.pipeline.ledger import unnamed
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan, View
from penstock.pipeline.unsealing import Unsealing
from penstock.stores.inbox import Inbox
from penstock.stores.worker_connection import WorkerConnection


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What handling an event would come to."""

    outcome: Literal["would succeed", "would fail", "would call", "would wait"]
    detail: str = ""


class RehearsalRoom:
    """One exactly-once consumer, to be tried on events without any consequence."""

    def __init__(
        self,
        consumer: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        *,
        schema: str,
        seams: ConsumerSeams,
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._plan = plan
        self._inbox = Inbox(schema)
        self._seams = seams

    def rehearse(self, entry: Entry) -> Rehearsal:
        """Call the handler in a transaction that cannot commit, and say how it went."""
        unsealing = Unsealing(self._consumer, self._seams.keys)
        with unsealing.openable(Batch((entry,), entry.position)) as openable:
            if openable.batch is None:
                return Rehearsal("would wait", openable.reason)
            if unsealing.is_shredded(entry):
                return Rehearsal("would succeed", "its data key was shredded: it is skipped")
            if not self._plan.names(entry) and self._options.on_unknown == "skip":
                return Rehearsal("would fail", describe(unnamed(self._consumer, entry)))
            return self._rehearse(entry, unsealing)

    def _rehearse(self, entry: Entry, unsealing: Unsealing) -> Rehearsal:
        with closing(self._seams.open_worker()) as worker:
            try:
                worker.run(lambda: self._play(worker, entry, unsealing))
            except EffectReached as reached:
                return Rehearsal("would call", f"up to the call of {reached.effect!r} it succeeds")
            except Exception as error:  # noqa: BLE001 - whatever it raises is the answer
                return Rehearsal("would fail", describe_about(error, [entry]))
        return Rehearsal("would succeed")

    def _play(self, worker: WorkerConnection, entry: Entry, unsealing: Unsealing) -> None:
        calls = Calls(
            self._consumer,
            self._options,
            self._plan,
            worker=worker,
            seams=self._seams,
            unsealing=unsealing,
        )
        context_of = calls.context_for(Batch((entry,), entry.position), is_dry_run=True)
        try:
            with self._seams.around():
                self._inbox.rehearse(worker)
                session = worker.session() if View.SESSION in self._plan.parameters else None
                with worker.guard.lent():
                    calls.one(entry, session, context_of)
                    if session is not None:
                        calls.within_limits(session.flush, [])
        finally:
            if not worker.is_lost:
                worker.rollback()
