"""Handles events, each exactly once: effects, deduplication and checkpoint commit together."""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

import psycopg

from penstock.core.failures import asked_delay_seconds, describe, is_nobodys_fault
from penstock.core.isolation import Batch, isolate
from penstock.core.leases import Lease, consumer_role
from penstock.core.options import ConsumerOptions
from penstock.core.progress import AGAIN, IDLE, Progress
from penstock.core.settings import Settings
from penstock.errors import LeaseLost, PositionMissing
from penstock.pipeline.attempt import Attempt, HandlerFailed
from penstock.pipeline.leasing import Leases
from penstock.pipeline.reader import TierReader
from penstock.pipeline.seams import ConsumerSeams
from penstock.pipeline.signature import HandlerPlan
from penstock.stores.hot_log import HotLog
from penstock.stores.inbox import Inbox
from penstock.stores.leases import LeaseTable
from penstock.stores.migrations import require_current
from penstock.stores.outbox import Outbox
from penstock.stores.postgres import connect
from penstock.stores.streams import Streams
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

WAIT_SECONDS = 0.5
BROWNOUT_POLL_SECONDS = 0.1
BLOCKED_PAUSE_SECONDS = 5.0
NOBODYS_FAULT_MAX = 20
NOBODYS_FAULT_PAUSE_SECONDS = 0.02


class Consumer:
    """One consumer's stage: reads after its checkpoint, handles a batch in one transaction."""

    def __init__(
        self,
        name: str,
        options: ConsumerOptions,
        plan: HandlerPlan,
        settings: Settings,
        *,
        leases: Leases,
        hot_log: HotLog,
        seams: ConsumerSeams,
    ) -> None:
        self._name = name
        self._options = options
        self._settings = settings
        self._leases = leases
        self._lease: Lease | None = None
        self._ahead: list[Any] = []
        self._queue: deque[Batch] = deque()
        self._attempts: dict[int, int] = {}
        self._faults_in_a_row = 0
        self._blocked_at: int | None = None
        self._hot_log = hot_log
        inbox = Inbox(settings.schema)
        streams = Streams(settings.schema)
        self._reader = TierReader(
            name, options.stream_name, hot_log, Outbox(settings.schema), streams
        )
        self._connection = connect(settings.database_url, f"penstock {name}")
        try:
            require_current(self._connection, settings.schema)
            self._role = self._register(inbox, streams)
            self._worker = seams.open_worker()
        except BaseException:
            hot_log.close()
            self._connection.close()
            raise
        self._attempt = Attempt(name, options, plan, inbox=inbox, worker=self._worker, seams=seams)

    def _register(self, inbox: Inbox, streams: Streams) -> str:
        stream_name = self._options.stream_name
        streams.register(self._connection, stream_name)
        known = inbox.register(self._connection, self._name, self._options)
        role = consumer_role(self._name, known.epoch, 0, known.lanes)
        LeaseTable(self._settings.schema).ensure(
            self._connection, stream_name, role, checkpoint=known.start_position - 1
        )
        emit(signals.ConsumerRegistered(self._name, stream_name, known.start_position))
        return role

    def step(self) -> Progress:
        """Settle one batch. Nothing is settled without the lease."""
        if self._lease is None:
            self._lease = self._leases.acquire(
                self._connection, self._options.stream_name, self._role
            )
            if self._lease is None:
                return Progress(0, pause_seconds=min(0.5, self._settings.lease_seconds / 10))
        if not self._leases.is_held(self._lease):
            raise self._lost("it could not be renewed in time")
        try:
            batch = self._next_batch(self._lease)
        except PositionMissing as missing:
            return self._blocked(self._lease.checkpoint + 1, str(missing))
        return IDLE if batch is None else self._settle(batch, self._lease)

    def wait(self, stop: threading.Event) -> None:
        """Wait for the next entries; what arrives is kept for the next step."""
        if self._lease is None or self._ahead:
            return
        try:
            self._ahead = self._read(self._lease, wait_seconds=WAIT_SECONDS)
        except PositionMissing:
            return
        if not self._ahead and self._reader.is_polling:
            stop.wait(BROWNOUT_POLL_SECONDS)

    def close(self) -> None:
        """Give back the lease and the connections."""
        try:
            self._worker.close()
            if self._lease is not None:
                self._leases.release(self._connection, self._lease)
        except psycopg.Error as error:
            if self._lease is not None:
                self._leases.abandon(self._lease, describe(error))
        finally:
            self._lease = None
            self._hot_log.close()
            self._connection.close()

    def _next_batch(self, lease: Lease) -> Batch | None:
        if self._queue:
            return self._queue.popleft()
        entries = self._ahead or self._read(lease, wait_seconds=0.0)
        self._ahead = []
        if not entries:
            return None
        emit(signals.BatchRead(self._name, entries[0].position, entries[-1].position))
        return Batch(tuple(entries))

    def _read(self, lease: Lease, wait_seconds: float) -> list[Any]:
        return self._reader.read(
            self._connection,
            after=lease.checkpoint,
            count=self._options.batch_size,
            wait_seconds=wait_seconds,
        )

    def _settle(self, batch: Batch, lease: Lease) -> Progress:
        attempt_number = self._attempts.get(batch.first, 0) + 1
        try:
            settled = self._worker.run(lambda: self._attempt.run(batch, lease, attempt_number))
        except LeaseLost as error:
            raise self._lost(str(error)) from error
        except HandlerFailed as failure:
            emit(
                signals.BatchRolledBack(
                    self._name, batch.first, batch.last, describe(failure.error)
                )
            )
            return self._after_failure(batch, failure)
        self._lease = lease.at(settled.last)
        self._attempts.clear()
        self._faults_in_a_row = 0
        self._blocked_at = None
        rest = tuple(entry for entry in batch.entries if entry.position > settled.last)
        if rest:
            self._queue.appendleft(Batch(rest, batch.is_careful))
        emit(signals.BatchCommitted(self._name, batch.first, settled.last, settled.handled))
        return Progress(settled.last - batch.first + 1)

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
        self._ahead = []
        self._leases.forget(lease, reason)
        return LeaseLost(f"{lease.role} on {lease.stream_name}: {reason}")
