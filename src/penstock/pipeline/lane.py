"""Handles a lane's events, live and parked ones in turn, each settled with the checkpoint."""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from typing import Any

import psycopg

from penstock.core.discretion import describe_about
from penstock.core.failures import describe, is_nobodys_fault
from penstock.core.isolation import Batch, isolate
from penstock.core.leases import Lease, former_groups
from penstock.core.options import Guarantee
from penstock.core.progress import AGAIN, IDLE, Progress
from penstock.errors import LeaseLost, PositionMissing, ServerUnavailable
from penstock.pipeline.attempt import Settled
from penstock.pipeline.calling import HandlerFailed
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.intake import Intake
from penstock.pipeline.judgement import Blocked
from penstock.pipeline.losses import failure_of
from penstock.pipeline.parking import Parking
from penstock.pipeline.suspicion import Suspicion
from penstock.pipeline.unsealing import Unsealing
from penstock.pipeline.window import StreamWindow
from penstock.pipeline.workplace import Workplace
from penstock.stores.eager_ear import EagerEar
from penstock.stores.inbox import Registration
from penstock.stores.lanes import Lanes
from penstock.stores.parked import Parked
from penstock.stores.streams import Streams
from penstock.stores.suspects import Suspects
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

WAIT_SECONDS = 0.5
BROWNOUT_POLL_SECONDS = 0.1
BLOCKED_PAUSE_SECONDS = 5.0
BLOCKED_PAUSE_SECONDS_MIN = 0.05
# How often a lane that meets only events of other lanes writes down how far it is.
ADVANCE_SECONDS = 1.0
NOBODYS_FAULT_MAX = 20
NOBODYS_FAULT_PAUSE_SECONDS = 0.02


class Lane:
    """One lane's stage: reads after its checkpoint, handles a batch, settles it."""

    def __init__(
        self,
        consuming: Consuming,
        known: Registration,
        lane: int,
        window: StreamWindow,
        ear: EagerEar | None = None,
        *,
        stop: threading.Event,
        in_handler: AbstractContextManager[Any],
    ) -> None:
        self._intake = Intake(window, lane, consuming.options.batch_size, ear)
        meanwhile = self._intake.look_ahead
        seams = replace(consuming.seams, stop_requested=stop.is_set, meanwhile=meanwhile)
        self._consuming = replace(consuming, seams=seams)
        self._in_handler = in_handler
        self._name = consuming.name
        self._options = consuming.options
        self._leases = consuming.leases
        self._control = consuming.control
        self._losses = consuming.losses
        self._known = known
        self._lane = lane
        self._lease: Lease | None = None
        self._live: deque[Batch] = deque()
        self._parked: deque[Batch] = deque()
        self._is_parked_turn = True
        self._faults_in_a_row = 0
        self._blocked_at: int | None = None
        self._advance_at = 0.0
        schema = consuming.settings.schema
        self._lanes = Lanes(schema)
        suspects, worker_id = Suspects(schema), consuming.leases.worker_id
        self._suspicion = Suspicion(self._name, suspects, consuming.control, worker_id)
        self._unsealing = Unsealing(self._name, consuming.seams.keys)
        self._streams = Streams(schema)
        self._parking = Parking(
            self._name,
            self._options,
            lane,
            known.lanes,
            parked=Parked(schema),
            control=consuming.control,
        )
        self._workplace = Workplace(self._consuming, self._parking, self._unsealing)

    def step(self) -> Progress:
        """Settle one batch. Nothing is settled without the lease."""
        if self._losses.letters:
            return self._write_letters()
        if self._lease is None:
            self._lease = self._take_lease()
            if self._lease is None:
                lease_seconds = self._consuming.settings.lease_seconds
                return Progress(0, pause_seconds=min(0.5, lease_seconds / 10))
        if not self._leases.is_held(self._lease):
            raise self._lost("it could not be renewed in time")
        if self._intake.has_word:
            return self._begin_early(self._lease)
        try:
            batch = self._next_batch()
        except PositionMissing as missing:
            return self._blocked(self._intake.cursor + 1, str(missing))
        return self._idle(self._lease) if batch is None else self._settle(batch, self._lease)

    def wait(self, stop: threading.Event) -> None:
        """Wait for the next entries, unless some are at hand; these are kept for the next step."""
        is_blocked = self._parking.blocks_stream
        if not is_blocked and (self._lease is None or self._live or self._intake.has_more):
            return
        # Nobody wakes a lane that polls; its step has just read, and the next one reads again.
        is_polling = self._intake.is_polling
        seconds = BROWNOUT_POLL_SECONDS if is_polling else WAIT_SECONDS
        seconds = min(seconds, self._parking.due_seconds)
        if is_polling or is_blocked:
            stop.wait(seconds)
            return
        self._intake.wait(seconds)

    def close(self) -> None:
        """Give back the lease and the connection."""
        lease, self._lease = self._lease, None
        try:
            with closing(self._workplace):
                if self._losses.letters:
                    self._write_letters()
            if lease is not None:
                if self._intake.cursor > lease.checkpoint:
                    self._lanes.advance(self._control(), lease, self._intake.cursor)
                self._leases.release(self._control(), lease)
        except (psycopg.Error, ServerUnavailable) as error:
            if lease is not None:
                self._leases.abandon(lease, describe(error))

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def _take_lease(self) -> Lease | None:
        known = self._known
        # Before the lease: whatever fails once it is ours must find it in our hands.
        head = None
        if self._consuming.source is None:
            head = self._streams.read(self._control(), known.stream_name).head
        self._suspicion.look(head)
        lease = self._leases.acquire(
            self._control(),
            known.stream_name,
            known.role(self._lane),
            former_groups(self._name, known.epoch),
        )
        if lease is None:
            return None
        # From another thread: whatever is being handled must end now, by whatever worker it is.
        self._leases.guard(lease, lambda: self._workplace.worker.interrupt())  # noqa: PLW0108 - of then
        self._intake.cursor = lease.checkpoint
        # Whoever held it before died or hung, perhaps because of what it had in hand: no more
        # than a batch, and nothing that has come since.
        suspects = 0 if lease.was_clean else self._options.batch_size
        self._suspicion.begin(suspects)
        self._parking.begin(suspects=suspects)
        return replace(lease, epoch=known.epoch, settled_to=known.settled_to)

    def _next_batch(self) -> Batch | None:
        """In turn, so that neither a flood of retries nor one of live events starves the other."""
        is_parked_turn = self._is_parked_turn
        self._is_parked_turn = not is_parked_turn
        if is_parked_turn:
            return self._next_parked() or self._next_live()
        return self._next_live() or self._next_parked()

    def _next_parked(self) -> Batch | None:
        if not self._parked:
            self._parked += [p for b in self._parking.due() for p in self._losses.parts(b)]
        return self._parked.popleft() if self._parked else None

    def _next_live(self) -> Batch | None:
        if self._parking.blocks_stream:
            return None
        if self._live:
            return self._live.popleft()
        scan = self._intake.take()
        if not scan.entries:
            return None
        emit(signals.BatchRead(self._name, scan.entries[0].position, scan.entries[-1].position))
        batch = Batch(
            tuple(scan.entries),
            scan.through,
            # Elsewhere nothing is sent ahead of its result.
            is_careful=self._options.guarantee is not Guarantee.EXACTLY_ONCE,
        )
        self._live.extend(self._suspicion.parts(batch) or self._losses.parts(batch))
        return self._live.popleft()

    def _idle(self, lease: Lease) -> Progress:
        """Nothing to settle here; how far the lane has looked is written down now and then."""
        now = time.monotonic()
        cursor = self._intake.cursor
        if cursor > lease.checkpoint and now >= self._advance_at and not self._live:
            self._advance_at = now + ADVANCE_SECONDS
            if not self._lanes.advance(self._control(), lease, cursor):
                raise self._lost("another worker holds it")
            self._advanced(lease.at(cursor))
        return AGAIN if self._intake.has_passed() else IDLE

    def _advanced(self, lease: Lease) -> Lease:
        self._lease = lease
        self._leases.note(lease)
        return lease

    def _begin_early(self, lease: Lease) -> Progress:
        """Begin with what a sender has told of; where that fails, it comes again when published."""
        self._intake.has_word = False
        try:
            with self._consuming.gate.together(self._in_handler), self._in_handler:
                settled = self._workplace.begin_early(self._intake.cursor + 1, lease)
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        self._intake.may_begin_early = settled is not None
        if settled is None or not settled.handled:
            return AGAIN
        self._advanced(lease.at(settled.last))
        self._intake.cursor = settled.last
        return Progress(1)

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    def _settle(self, batch: Batch, lease: Lease) -> Progress:
        with self._unsealing.openable(batch) as openable:
            if openable.batch is None and batch.is_parked:
                self._parking.put_off(batch, openable.reason, BLOCKED_PAUSE_SECONDS)
                return AGAIN
            if openable.batch is None:
                self._live.appendleft(batch)
                return self._blocked(batch.first, openable.reason)
            if (rest := openable.rest) is not None:
                self._queue_of(batch).appendleft(rest)
            return self._settle_openable(openable.batch, lease)

    def _settle_openable(self, batch: Batch, lease: Lease) -> Progress:
        if not batch.is_suspect:
            with self._consuming.gate.together(self._in_handler):
                return self._try(batch, lease)
        with self._consuming.gate.alone(self._in_handler):
            starts, are_too_many = self._suspicion.start(batch.entries[0])
            return self._judge(batch, lease, starts) if are_too_many else self._try(batch, lease)

    def _try(self, batch: Batch, lease: Lease) -> Progress:
        # Before anything counts: a server that accepts no connection is no event's doing.
        self._workplace.renew()
        try:
            with self._in_handler:
                settled = self._workplace.run(batch, lease)
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        except HandlerFailed as failure:
            return self._after_failure(batch, lease, failure)
        except ServerUnavailable as error:
            if not (self._leases.is_held(lease) and self._losses.note(batch, error)):
                raise
            return self._after_failure(batch, lease, failure_of(batch, error))
        self._losses.forget(batch)
        return self._committed(batch, lease, settled)

    def _committed(self, batch: Batch, lease: Lease, settled: Settled) -> Progress:
        if not batch.is_parked:
            lease = self._advanced(lease.at(settled.last))
            self._intake.pass_by(settled.last)
            self._blocked_at = None
        self._faults_in_a_row = 0
        rest = batch.after(settled.last)
        if rest is not None and settled.failure is not None:
            return self._after_failure(rest, lease, settled.failure)
        if rest is not None:
            self._queue_of(batch).appendleft(rest)
        return Progress(len(batch.entries) - (len(rest.entries) if rest else 0))

    def _after_failure(self, batch: Batch, lease: Lease, failure: HandlerFailed) -> Progress:
        reason = describe_about(failure.error, batch.entries)
        emit(signals.BatchRolledBack(self._name, batch.first, batch.last, reason))
        if batch.is_suspect:
            self._suspicion.finish(batch.first)
        self._workplace.renew(is_doubtful=failure.was_interrupted)
        queue = self._queue_of(batch)
        if is_nobodys_fault(failure.error) and self._faults_in_a_row < NOBODYS_FAULT_MAX:
            self._faults_in_a_row += 1
            queue.appendleft(batch)
            return Progress(0, pause_seconds=NOBODYS_FAULT_PAUSE_SECONDS)
        parts = isolate(batch, failure.culprit)
        queue.extendleft(reversed(parts))
        is_known = failure.is_alone or failure.culprit is not None or batch.is_careful
        if len(parts[0].entries) > 1 or not is_known or (len(parts) > 1 and not failure.is_alone):
            return AGAIN
        return self._judge(queue.popleft(), lease, failure.error)

    def _judge(self, batch: Batch, lease: Lease, failed: Exception | list[Any]) -> Progress:
        """Decide on one event that failed, or that has ended its processes."""
        try:
            self._workplace.judge(batch, lease, failed)
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        except Blocked as blocked:
            self._queue_of(batch).appendleft(batch)
            return self._blocked(batch.first, str(blocked))
        if batch.is_parked:
            # What was read with it may wait behind it now.
            self._parked.clear()
            return Progress(1)
        return self._committed(batch, lease, Settled(batch.last, 0))

    def _write_letters(self) -> Progress:
        """Of what has failed. Before anything else is called, and whoever holds the lease."""
        try:
            self._workplace.write_letters()
        except Blocked as blocked:
            return self._blocked(blocked.position, str(blocked))
        return AGAIN

    def _queue_of(self, batch: Batch) -> deque[Batch]:
        return self._parked if batch.is_parked else self._live

    def _blocked(self, position: int, reason: str) -> Progress:
        if self._blocked_at != position:
            self._blocked_at = position
            emit(signals.ConsumerBlocked(self._name, position, reason))
        # What is parked is tried meanwhile.
        pause_seconds = max(BLOCKED_PAUSE_SECONDS_MIN, self._parking.due_seconds)
        return Progress(0, pause_seconds=min(BLOCKED_PAUSE_SECONDS, pause_seconds))

    def _lost(self, reason: str) -> LeaseLost:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._live.clear()
        self._parked.clear()
        self._intake.forget()
        self._leases.forget(lease, reason)
        return LeaseLost(f"{lease.role} on {lease.stream_name}: {reason}")
