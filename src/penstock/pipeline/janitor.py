"""The janitor: prunes what nobody needs any more, one small batch at a time."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

import psycopg

from penstock.core.leases import JANITOR, Lease
from penstock.core.progress import IDLE, Progress
from penstock.core.settings import Settings
from penstock.errors import ServerUnavailable
from penstock.pipeline.key_rotation import rotate_due
from penstock.pipeline.leasing import Leases
from penstock.stores.archive import ArchiveTable
from penstock.stores.cleanup import AGED_TABLES, AgedTable, Cleanup
from penstock.stores.leases import LeaseTable
from penstock.stores.migrations import require_current
from penstock.stores.postgres import connect_stage, is_outage
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

ALL_STREAMS = "*"
# After a batch the janitor rests, for longer where a batch takes longer: at most a fifth of the
# time is work, however slow the server is just now.
REST_SECONDS_MIN = 0.05
REST_PER_WORK = 4.0
# Between rounds the loop still turns this often: to take a lease that became free, and so that
# whoever watches can tell a janitor that rests from one that hangs.
TURN_SECONDS = 5.0
# Who redrove or discarded what is asked for after an incident, and that may be weeks later.
OPERATION_RETENTIONS = 4
EFFECT_TABLE = "effect"


@dataclass(slots=True)
class _Settled:
    """All settled rows, oldest first; `since` is the age of the last one looked at."""

    since: datetime | None = None
    table: str = "processed_event"


@dataclass(slots=True)
class _Effects:
    """Records of context.once that no settled row took along; `since` as above."""

    since: datetime | None = None
    table: str = EFFECT_TABLE


@dataclass(slots=True)
class _Aged:
    """Rows that nothing but time makes needless, oldest first."""

    table: AgedTable


@dataclass(slots=True)
class _Operations:
    """What operators did long ago, with the events that they did it to."""

    table: str = "operation"


@dataclass(slots=True)
class _Outbox:
    """The published rows of one stream, from the front; `after` is the last one deleted."""

    stream_name: str
    after: int = 0
    table: str = "outbox_event"


@dataclass(slots=True)
class _Holds:
    """Last of all: who keeps old rows from being pruned."""

    table: str = "outbox_event"


_Task = _Settled | _Effects | _Aged | _Operations | _Outbox | _Holds


class Janitor:
    """Prunes old rows, none that a reader, an operator or a second try may need, in rounds.

    One janitor works at a time, over all hosts. Nothing depends on it: whatever goes wrong is
    said, left for the next round, and never stops the process that it shares with others.
    """

    def __init__(
        self,
        settings: Settings,
        leases: Leases,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._stop_requested = stop_requested
        self._cleanup = Cleanup(settings.schema)
        self._archive = ArchiveTable(settings.schema)
        self._lease: Lease | None = None
        self._tasks: deque[_Task] = deque()
        self._pruned: Counter[str] = Counter()
        self._next_round_at = 0.0
        self._connection = connect_stage(settings.database_url, "penstock janitor")
        try:
            require_current(self._connection, settings.schema)
            LeaseTable(settings.schema).ensure(self._connection, ALL_STREAMS, JANITOR)
        except BaseException:
            self._connection.close()
            raise
        # Poolers in transaction mode lose prepared statements.
        self._connection.prepare_threshold = None

    def step(self) -> Progress:
        """Prune at most one batch, then rest. Idle between rounds and without the lease."""
        if self._stop_requested() or not self._is_leased():
            return IDLE
        started_at = time.monotonic()
        if not self._tasks and started_at < self._next_round_at:
            return IDLE
        deleted = self._guarded(started_at)
        if not self._tasks:
            self._end_round()
        worked_seconds = time.monotonic() - started_at
        return Progress(deleted, max(REST_SECONDS_MIN, REST_PER_WORK * worked_seconds))

    def wait(self, stop: threading.Event) -> None:
        """Sleep until the next round, until the lease may be free, or until `stop`."""
        seconds = TURN_SECONDS
        if self._lease is not None:
            seconds = min(seconds, self._next_round_at - time.monotonic())
        stop.wait(max(seconds, 0.0))

    def close(self) -> None:
        """Give back the lease and the connection. What cannot be given back runs out by itself."""
        if self._connection.closed and self._lease is not None:
            with suppress(ServerUnavailable):
                self._connection = connect_stage(self._settings.database_url, "penstock janitor")
        try:
            if self._lease is not None:
                self._leases.release(self._connection, self._lease)
        except psycopg.Error as error:
            assert self._lease is not None
            self._leases.abandon(self._lease, str(error).strip())
        finally:
            self._lease = None
            self._connection.close()

    def _is_leased(self) -> bool:
        """Whether this janitor is the one that works; takes the lease if it is free."""
        if self._lease is not None and not self._leases.is_held(self._lease):
            self._leases.forget(self._lease, "it ended before it was renewed")
            self._lease = None
            self._tasks.clear()
        if self._lease is None:
            self._lease = self._leases.acquire(self._connection, ALL_STREAMS, JANITOR)
        return self._lease is not None

    def _guarded(self, started_at: float) -> int:
        """One batch. What is in trouble is left for the next round; the rest goes on."""
        try:
            return self._work(started_at)
        except psycopg.Error as error:
            if is_outage(error):
                raise
            table = self._tasks.popleft().table if self._tasks else "stream"
            emit(signals.PruningFailed(table, str(error).strip()))
            return 0

    def _work(self, started_at: float) -> int:
        if not self._tasks:
            self._begin_round(started_at)
        task = self._tasks[0]
        deleted, has_more = self._prune(task)
        if not has_more:
            self._tasks.popleft()
        if deleted:
            self._pruned[task.table] += deleted
        return deleted

    def _begin_round(self, started_at: float) -> None:
        self._next_round_at = started_at + self._settings.cleanup_every_seconds
        self._pruned.clear()
        if self._settings.archive_url is not None:
            # Streams that the archiver has not met yet: nothing is pruned ahead of it.
            self._archive.ensure_all(self._connection)
        rotate_due(self._connection, self._settings.schema)
        streams = self._cleanup.streams(self._connection)
        outbox = map(_Outbox, streams)
        aged = map(_Aged, AGED_TABLES)
        self._tasks += [_Settled(), *outbox, _Effects(), *aged, _Operations(), _Holds()]

    def _end_round(self) -> None:
        for table, count in self._pruned.items():
            emit(signals.RowsPruned(table, count))
        self._pruned.clear()

    def _prune(self, task: _Task) -> tuple[int, bool]:
        """One batch: how many rows went, and whether there may be more."""
        match task:
            case _Settled():
                return self._prune_settled(task)
            case _Effects():
                return self._prune_effects(task)
            case _Aged():
                return self._prune_aged(task)
            case _Operations():
                return self._prune_operations()
            case _Outbox():
                return self._prune_outbox(task)
            case _Holds():
                self._tell_holds()
                return 0, False
            case unreachable:
                assert_never(unreachable)

    def _prune_settled(self, task: _Settled) -> tuple[int, bool]:
        batch_size = self._settings.cleanup_batch_size
        pruned = self._cleanup.prune_settled(
            self._connection,
            since=task.since,
            retention_days=self._settings.settled_retention_days,
            batch_size=batch_size,
        )
        task.since = pruned.last
        if pruned.effects:
            self._pruned[EFFECT_TABLE] += pruned.effects
        # Rows that have to stay were looked at too: there may be others behind them.
        return pruned.deleted, pruned.looked_at == batch_size

    def _prune_effects(self, task: _Effects) -> tuple[int, bool]:
        batch_size = self._settings.cleanup_batch_size
        pruned = self._cleanup.prune_effects(
            self._connection,
            since=task.since,
            retention_days=self._settings.settled_retention_days,
            batch_size=batch_size,
        )
        task.since = pruned.last
        return pruned.deleted, pruned.looked_at == batch_size

    def _prune_aged(self, task: _Aged) -> tuple[int, bool]:
        batch_size = self._settings.cleanup_batch_size
        is_inbox = task.table == "inbox_event"
        deleted = self._cleanup.prune_aged(
            self._connection,
            task.table,
            retention_days=self._settings.inbox_retention_days
            if is_inbox
            else self._settings.settled_retention_days,
            batch_size=batch_size,
        )
        return deleted, deleted == batch_size

    def _prune_operations(self) -> tuple[int, bool]:
        batch_size = self._settings.cleanup_batch_size
        events, operations = self._cleanup.prune_operations(
            self._connection,
            retention_days=self._settings.settled_retention_days * OPERATION_RETENTIONS,
            batch_size=batch_size,
        )
        return events + operations, batch_size in (events, operations)

    def _prune_outbox(self, task: _Outbox) -> tuple[int, bool]:
        batch_size = self._settings.cleanup_batch_size
        pruned = self._cleanup.prune_outbox(
            self._connection,
            task.stream_name,
            after=task.after,
            retention_days=self._settings.outbox_retention_days,
            batch_size=batch_size,
        )
        task.after = pruned.last or task.after
        return pruned.deleted, pruned.deleted == batch_size

    def _tell_holds(self) -> None:
        retention_days = self._settings.outbox_retention_days
        for hold in self._cleanup.held(self._connection, retention_days=retention_days):
            emit(
                signals.PruningHeld(
                    hold.stream_name, hold.by, hold.position, round(hold.oldest_seconds)
                )
            )
