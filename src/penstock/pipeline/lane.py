"""Handles a lane's events, each exactly once: effects, deduplication and checkpoint together."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import psycopg

from penstock.core.failures import asked_delay_seconds, describe, is_nobodys_fault
from penstock.core.isolation import Batch, isolate, split
from penstock.core.leases import Lease, former_groups
from penstock.core.progress import AGAIN, IDLE, Progress
from penstock.errors import HandlerTimeout, LeaseLost, PositionMissing, ServerUnavailable
from penstock.pipeline.attempt import Attempt, HandlerFailed, Settled
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.window import Scan, StreamWindow
from penstock.stores.inbox import Inbox, Registration
from penstock.stores.lanes import Lanes
from penstock.stores.streams import Streams
from penstock.stores.suspects import Suspects
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

WAIT_SECONDS = 0.5
BROWNOUT_POLL_SECONDS = 0.1
BLOCKED_PAUSE_SECONDS = 5.0
# How often a lane that meets only events of other lanes writes down how far it is.
ADVANCE_SECONDS = 1.0
NOBODYS_FAULT_MAX = 20
NOBODYS_FAULT_PAUSE_SECONDS = 0.02
STRIKES_MAX = 3


class Lane:
    """One lane's stage: reads after its checkpoint, handles a batch in one transaction."""

    def __init__(
        self,
        consuming: Consuming,
        known: Registration,
        lane: int,
        window: StreamWindow,
        *,
        stop: threading.Event,
        in_handler: AbstractContextManager[Any],
    ) -> None:
        self._consuming = consuming
        self._in_handler = in_handler
        self._name = consuming.name
        self._options = consuming.options
        self._leases = consuming.leases
        self._control = consuming.control
        self._known = known
        self._lane = lane
        self._window = window
        self._lease: Lease | None = None
        self._cursor = 0
        self._ahead: Scan | None = None
        self._queue: deque[Batch] = deque()
        self._attempts: dict[int, int] = {}
        self._is_passing = False
        self._suspects_left = 0
        self._suspects_last = 0
        self._faults_in_a_row = 0
        self._blocked_at: int | None = None
        self._advance_at = 0.0
        self._lanes = Lanes(consuming.settings.schema)
        self._suspects = Suspects(consuming.settings.schema)
        self._streams = Streams(consuming.settings.schema)
        self._seams = replace(consuming.seams, stop_requested=stop.is_set)
        self._open_worker()

    def _open_worker(self) -> None:
        self._worker = self._seams.open_worker()
        self._attempt = Attempt(
            self._name,
            self._options,
            self._consuming.plan,
            inbox=Inbox(self._consuming.settings.schema),
            suspects=self._suspects,
            worker=self._worker,
            seams=self._seams,
        )

    def step(self) -> Progress:
        """Settle one batch. Nothing is settled without the lease."""
        if self._lease is None:
            self._lease = self._take_lease()
            if self._lease is None:
                lease_seconds = self._consuming.settings.lease_seconds
                return Progress(0, pause_seconds=min(0.5, lease_seconds / 10))
        if not self._leases.is_held(self._lease):
            raise self._lost("it could not be renewed in time")
        try:
            batch = self._next_batch()
        except PositionMissing as missing:
            return self._blocked(self._cursor + 1, str(missing))
        return self._idle(self._lease) if batch is None else self._settle(batch, self._lease)

    def wait(self, stop: threading.Event) -> None:
        """Wait for the next entries; what arrives is kept for the next step."""
        if self._lease is None or self._ahead is not None:
            return
        try:
            scan = self._read(wait_seconds=WAIT_SECONDS)
        except PositionMissing:
            return
        if scan.through > self._cursor:
            self._ahead = scan
        elif self._window.is_polling:
            stop.wait(BROWNOUT_POLL_SECONDS)

    def close(self) -> None:
        """Give back the lease and the connection."""
        lease, self._lease = self._lease, None
        try:
            self._worker.close()
            if lease is not None:
                if self._cursor > lease.checkpoint:
                    self._lanes.advance(self._control(), lease, self._cursor)
                self._leases.release(self._control(), lease)
        except (psycopg.Error, ServerUnavailable) as error:
            if lease is not None:
                self._leases.abandon(lease, describe(error))

    # ── reading ───────────────────────────────────────────────────────────────────────────────

    def _take_lease(self) -> Lease | None:
        known = self._known
        # Before the lease: whatever fails once it is ours must find it in our hands.
        head = self._streams.read(self._control(), known.stream_name).head
        lease = self._leases.acquire(
            self._control(),
            known.stream_name,
            known.role(self._lane),
            former_groups(self._name, known.epoch),
        )
        if lease is None:
            return None
        self._leases.guard(lease, self._interrupt)
        self._cursor = lease.checkpoint
        if not lease.was_clean:
            # Whoever held it before died or hung, perhaps because of what it had in hand: no more
            # than a batch, and nothing that has come since.
            self._suspects_left = self._options.batch_size
            self._suspects_last = head
        return replace(lease, epoch=known.epoch, settled_to=known.settled_to)

    def _interrupt(self) -> None:
        """From another thread: whatever is being handled must end now."""
        self._worker.interrupt()

    def _next_batch(self) -> Batch | None:
        if self._queue:
            return self._queue.popleft()
        scan = self._ahead or self._read(wait_seconds=0.0)
        self._ahead = None
        if not scan.entries:
            self._is_passing = scan.through > self._cursor
            self._cursor = scan.through
            return None
        emit(signals.BatchRead(self._name, scan.entries[0].position, scan.entries[-1].position))
        if self._suspects_left and scan.entries[0].position <= self._suspects_last:
            self._suspects_left = max(0, self._suspects_left - len(scan.entries))
            self._queue.extend(split(scan.entries, scan.through, is_suspect=True))
            return self._queue.popleft()
        return Batch(tuple(scan.entries), scan.through)

    def _read(self, wait_seconds: float) -> Scan:
        return self._window.read(
            self._lane,
            after=self._cursor,
            count=self._options.batch_size,
            wait_seconds=wait_seconds,
        )

    def _idle(self, lease: Lease) -> Progress:
        """Nothing to settle; how far the lane has looked is written down now and then."""
        if self._is_passing:
            return AGAIN
        now = time.monotonic()
        if self._cursor > lease.checkpoint and now >= self._advance_at:
            self._advance_at = now + ADVANCE_SECONDS
            if not self._lanes.advance(self._control(), lease, self._cursor):
                raise self._lost("another worker holds it")
            self._lease = lease.at(self._cursor)
        return IDLE

    # ── settling ──────────────────────────────────────────────────────────────────────────────

    def _settle(self, batch: Batch, lease: Lease) -> Progress:
        if not batch.is_suspect:
            with self._consuming.gate.together():
                return self._try(batch, lease)
        entry = batch.entries[0]
        with self._consuming.gate.alone():
            # Committed before the attempt: if it ends this process, that is known.
            starts = self._suspects.start(
                self._control(), self._name, entry, self._leases.worker_id
            )
            others = {start["worker_id"] for start in starts} - {self._leases.worker_id}
            if len(others) >= STRIKES_MAX:
                return self._bury(batch, lease, starts)
            return self._try(batch, lease)

    def _try(self, batch: Batch, lease: Lease) -> Progress:
        attempt_number = self._attempts.get(batch.first, 0) + 1
        try:
            with self._in_handler:
                settled = self._worker.run(lambda: self._attempt.run(batch, lease, attempt_number))
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        except HandlerFailed as failure:
            emit(
                signals.BatchRolledBack(
                    self._name, batch.first, batch.last, describe(failure.error)
                )
            )
            if batch.is_suspect:
                self._suspects.finish(self._control(), self._name, batch.first)
            if isinstance(failure.error, HandlerTimeout):
                # Its handler was interrupted wherever it was, perhaps inside the driver.
                self._worker.close()
                self._open_worker()
            return self._after_failure(batch, failure)
        return self._committed(batch, lease, settled)

    def _committed(self, batch: Batch, lease: Lease, settled: Settled) -> Progress:
        self._lease = lease.at(settled.last)
        self._cursor = max(self._cursor, settled.last)
        self._attempts.clear()
        self._faults_in_a_row = 0
        self._blocked_at = None
        rest = batch.after(settled.last)
        if rest is not None:
            self._queue.appendleft(rest)
        emit(signals.BatchCommitted(self._name, batch.first, settled.last, settled.handled))
        return Progress(len(batch.entries) - (len(rest.entries) if rest else 0))

    def _bury(self, batch: Batch, lease: Lease, starts: list[dict[str, Any]]) -> Progress:
        entry = batch.entries[0]
        try:
            settled = self._worker.run(lambda: self._attempt.bury(batch, lease, starts))
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        emit(
            signals.EventBuried(
                self._name,
                entry.position,
                entry.event_uuid,
                f"{len(starts)} attempts ended their worker process",
            )
        )
        return self._committed(batch, lease, settled)

    def _after_failure(self, batch: Batch, failure: HandlerFailed) -> Progress:
        if is_nobodys_fault(failure.error) and self._faults_in_a_row < NOBODYS_FAULT_MAX:
            self._faults_in_a_row += 1
            self._queue.appendleft(batch)
            return Progress(0, pause_seconds=NOBODYS_FAULT_PAUSE_SECONDS)
        self._queue.extendleft(reversed(isolate(batch, failure.culprit)))
        if len(batch.entries) > 1:
            return AGAIN
        return self._retry_later(batch, failure.error)

    def _retry_later(self, batch: Batch, error: Exception) -> Progress:
        """The event is tried again in place; its successors wait, so order holds."""
        entry = batch.entries[0]
        attempt = self._attempts[entry.position] = self._attempts.get(entry.position, 0) + 1
        retry = self._options.retry
        # Jitter only spreads load; nothing secret hangs on it.
        delay = asked_delay_seconds(error)
        if delay is None:
            delay = retry.delay_seconds(attempt, random.random())  # noqa: S311
        emit(
            signals.EventFailed(
                self._name, entry.position, entry.event_uuid, attempt, delay, describe(error)
            )
        )
        if attempt == retry.attempts_max:
            emit(signals.ConsumerBlocked(self._name, entry.position, describe(error)))
        return Progress(0, pause_seconds=max(delay, 0.001))

    def _blocked(self, position: int, reason: str) -> Progress:
        if self._blocked_at != position:
            self._blocked_at = position
            emit(signals.ConsumerBlocked(self._name, position, reason))
        return Progress(0, pause_seconds=BLOCKED_PAUSE_SECONDS)

    def _lost(self, reason: str) -> LeaseLost:
        lease, self._lease = self._lease, None
        assert lease is not None
        self._queue.clear()
        self._ahead = None
        self._leases.forget(lease, reason)
        return LeaseLost(f"{lease.role} on {lease.stream_name}: {reason}")
