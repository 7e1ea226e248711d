"""The timekeeper: makes events of timers when they are due, and sleeps until the next one is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import assert_never

import psycopg

from penstock.core.failures import is_nobodys_fault
from penstock.core.progress import IDLE, Progress
from penstock.core.settings import Settings
from penstock.pipeline.timer_keys import TimerKeys
from penstock.pipeline.timer_preparing import KeyMissing, Preparing, Unfit
from penstock.pipeline.timer_refusals import is_unfit, reason_of
from penstock.stores.migrations import require_current
from penstock.stores.postgres import connect_stage, is_outage
from penstock.stores.timekeeping import DueTimer, Exceptions, Firing, PreparedTimer, Timekeeping
from penstock.stores.timer_wakeup import Hold, TimerWakeup
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

BATCH_SIZE = 500
# What has to be prepared passes through this process, so there is less of it at once.
PREPARED_SIZE = 100
PREPARED_BYTES_MAX = 16 * 1024 * 1024
# Nobody who schedules notifies for a timer that is far away: it is found by then.
LOOK_SECONDS = 1.0
# How long after the first the others wake, in case that it does not.
STANDBY_SECONDS = 0.02
POLL_MODE_SECONDS = 0.05
# How long to leave an undecided transaction alone before trying again to fall asleep.
UNDECIDED_FIRST_SECONDS = 0.001
UNDECIDED_LONGEST_SECONDS = 0.05
# Between batches that are not full: a busy minute is not one statement for every timer.
LINGER_SECONDS = 0.004
# A line that fires one timer at a time is quiet: the lock is kept, and whoever schedules notifies.
QUIET_TIMERS_MAX = 1
# What is due and cannot be had, because a transaction holds its key or itself, is tried again.
LEFT_FIRST_SECONDS = 0.005
LEFT_LONGEST_SECONDS = 0.25
KEY_ASKED_SECONDS = 0.05
KEY_MISSING_SECONDS = 2.0
FAILED_SECONDS = 1.0
LATE_SECONDS = 60.0
PREPARE_AFTER = 5
# Rows that were fired a moment ago lie at the front of the index until they are vacuumed: ten
# thousands of them cost more than the firing. So a busy timekeeper begins a little before now,
# and looks from the beginning a few times a second for what came late.
FLOOR_SECONDS = 5.0
SWEEP_SECONDS = 0.25
_NOT_SEALED = "PS020"


class Timekeeper:
    """Fires timers in the order in which they are due, each once, however many timekeepers run.

    There is no lease: a firing is one statement, and in it one timekeeper works at a time.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._timekeeping = Timekeeping(settings.schema)
        self._keys = TimerKeys()
        self._busy: set[int] = set()
        self._passed_by: set[str] = set()
        self._without: dict[str, float] = {}
        self._blocked: set[str] = set()
        self._floor: datetime | None = None
        self._sweep_at = 0.0
        self._next_due_at = 0.0
        self._retry_at: float | None = None
        self._left_seconds = LEFT_FIRST_SECONDS
        self._undecided_seconds = UNDECIDED_FIRST_SECONDS
        self._late_told_until = 0.0
        self._failure: str | None = None
        self._wakeup: TimerWakeup | None = None
        self._is_first = False
        self._is_holding = False
        self._was_notified = False
        self._is_silent = settings.wakeup == "poll"
        self._connection = connect_stage(settings.database_url, "penstock timers")
        try:
            require_current(self._connection, settings.schema)
        except BaseException:
            self._connection.close()
            raise
        # Poolers in transaction mode lose prepared statements.
        self._connection.prepare_threshold = None

    def step(self) -> Progress:
        """Fire at most one batch of what is due."""
        was_notified, self._was_notified = self._was_notified, False
        if self._is_holding and self._wakeup is not None:
            self._wakeup.drop_heard()
        try:
            progress = self._fire()
        except psycopg.Error as error:
            if is_outage(error) or is_nobodys_fault(error):
                raise
            return self._fail(error)
        self._failure = None
        if progress.moved > QUIET_TIMERS_MAX:
            self._let_go()
        if progress.is_idle and was_notified:
            # Whoever schedules much at once would wake it for each.
            return Progress(0, pause_seconds=LINGER_SECONDS)
        return progress

    def wait(self, stop: threading.Event) -> None:
        """Sleep until the next timer is due, until one is scheduled, or until `stop`."""
        seconds = self._seconds_until_next_look()
        was_deaf = self._wakeup is None
        wakeup = self._wakeup_that_hears(stop)
        if wakeup is None:
            stop.wait(min(seconds, POLL_MODE_SECONDS))
        if wakeup is None or was_deaf:
            # The next step looks for what came before it listened, and while it tested that.
            return
        self._is_first = self._is_first or wakeup.try_be_first()
        if not self._is_holding:
            hold = wakeup.try_hold()
            if hold is Hold.UNDECIDED:
                stop.wait(min(seconds, self._undecided_seconds))
                longer = self._undecided_seconds * 2
                self._undecided_seconds = min(longer, UNDECIDED_LONGEST_SECONDS)
                return
            self._undecided_seconds = UNDECIDED_FIRST_SECONDS
            self._is_holding = hold is Hold.HELD
            if self._is_holding:
                # The next step looks once more for what came without a notification.
                return
        emit(signals.TimekeeperSlept(round(seconds, 3)))
        self._was_notified = wakeup.sleep(seconds, stop)
        if self._was_notified and not self._is_first:
            stop.wait(STANDBY_SECONDS)

    def close(self) -> None:
        """End the connections. Nothing is left behind that anybody would have to wait for."""
        self._keys.close()
        if self._wakeup is not None:
            self._wakeup.close()
        self._connection.close()

    # ── a pass over what is due ────────────────────────────────────────────────────────────────

    def _fire(self) -> Progress:
        try:
            since = self._floor if time.monotonic() < self._sweep_at else None
            firing = self._timekeeping.fire(
                self._connection, BATCH_SIZE, self._exceptions(), since=since
            )
        except psycopg.Error as error:
            if not is_unfit(error):
                raise
            # Some timer of the batch cannot be fired, and PostgreSQL does not say which.
            if self._fire_prepared(one_by_one=True):
                return Progress(0, has_more=True)
            self._begin_pass()
            return Progress(0, pause_seconds=LEFT_LONGEST_SECONDS)
        now = time.monotonic()
        if firing is None:
            self._next_due_at = now + STANDBY_SECONDS
            return Progress(0, pause_seconds=LINGER_SECONDS) if self._is_first else IDLE
        wait_seconds = LOOK_SECONDS if firing.wait_seconds is None else firing.wait_seconds
        self._next_due_at = now + wait_seconds
        if since is None:
            self._sweep_at = now + SWEEP_SECONDS
        if firing.fired <= QUIET_TIMERS_MAX:
            self._floor = None
        elif not firing.left_due:
            self._floor = firing.moment - timedelta(seconds=FLOOR_SECONDS)
        self._tell(firing.fired, firing.late_seconds)
        has_news = not firing.busy_slots <= self._busy
        self._busy |= firing.busy_slots
        if firing.met_special and self._fire_prepared():
            has_news = True
        if has_news or firing.fired >= BATCH_SIZE:
            return Progress(firing.fired, has_more=True)
        self._end_pass(firing)
        return Progress(firing.fired, self._linger_seconds) if firing.fired else IDLE

    def _exceptions(self) -> Exceptions:
        now = time.monotonic()
        self._without = {name: until for name, until in self._without.items() if until > now}
        return Exceptions(self._busy, self._without, self._passed_by)

    @property
    def _linger_seconds(self) -> float:
        """Who only stands in leaves the next ones to the first again."""
        is_standing_in = self._wakeup is not None and not self._is_first
        return STANDBY_SECONDS if is_standing_in else LINGER_SECONDS

    def _begin_pass(self) -> None:
        self._busy.clear()
        self._passed_by.clear()

    def _end_pass(self, firing: Firing) -> None:
        self._begin_pass()
        self._retry_at = None
        if firing.left_due:
            self._retry_at = time.monotonic() + self._left_seconds
            self._left_seconds = min(self._left_seconds * 2, LEFT_LONGEST_SECONDS)
        else:
            self._left_seconds = LEFT_FIRST_SECONDS

    # ── what has to be prepared ────────────────────────────────────────────────────────────────

    def _fire_prepared(self, *, one_by_one: bool = False) -> bool:
        """Fire the next ones, whatever they are; returns whether it is worth going on."""
        due = self._timekeeping.read_due(self._connection, PREPARED_SIZE, self._exceptions())
        bytes_max = 0 if one_by_one else PREPARED_BYTES_MAX
        for chunk in self._prepared(due, bytes_max):
            if not self._fire_chunk(chunk):
                return False
        # What was read is fired, held, without a key, or passed by: the next read has others.
        return bool(due)

    def _prepared(
        self, due: Sequence[DueTimer], bytes_max: int
    ) -> Iterator[Sequence[PreparedTimer]]:
        """The timers with their events, as many at a time as fit into the limit."""
        preparing = Preparing(self._settings.schema, self._connection, self._keys)
        chunk: list[PreparedTimer] = []
        size_bytes = 0
        for timer in due:
            if timer.event.stream_name in self._without:
                continue
            match preparing.prepare(timer):
                case PreparedTimer() as prepared:
                    chunk.append(prepared)
                    size_bytes += prepared.size_bytes
                case Unfit(_, reason):
                    self._hold(timer, reason)
                case KeyMissing(stream_name, reason):
                    self._block(stream_name, reason)
                case unreachable:
                    assert_never(unreachable)
            if chunk and size_bytes >= bytes_max:
                yield chunk
                chunk, size_bytes = [], 0
        if chunk:
            yield chunk

    def _fire_chunk(self, chunk: Sequence[PreparedTimer]) -> bool:
        """Fire what can be; False: another timekeeper is at it."""
        try:
            firing = self._timekeeping.fire_prepared(self._connection, chunk)
        except psycopg.Error as error:
            if not is_unfit(error):
                raise
            if len(chunk) > 1:
                return all(self._fire_chunk([prepared]) for prepared in chunk)
            self._hold(chunk[0].timer, reason_of(error))
            return True
        if firing is None:
            return False
        self._busy |= firing.busy_slots
        self._passed_by |= {each.timer.timer_id for each in chunk} - firing.fired
        self._tell_prepared([each for each in chunk if each.timer.timer_id in firing.fired])
        return True

    def _tell_prepared(self, done: Sequence[PreparedTimer]) -> None:
        for each in done:
            if each.shredded_key_id is not None:
                stream_name = each.timer.event.stream_name
                shredded = (each.timer.timer_id, stream_name, each.shredded_key_id)
                emit(signals.TimerShredded(*shredded))
            self._unblock(each.timer.event.stream_name)
        late = [each.timer.moment - each.timer.due_at for each in done if not each.timer.schedule]
        self._tell(len(done), max(late).total_seconds() if late else 0.0)

    def _hold(self, timer: DueTimer, reason: str) -> None:
        if self._timekeeping.hold(self._connection, timer, reason):
            emit(signals.TimerHeld(timer.timer_id, timer.event.stream_name, reason))
        else:
            self._passed_by.add(timer.timer_id)

    def _block(self, stream_name: str, reason: str | None) -> None:
        """Leave a stream alone for a while: its timers keep their order, and others go on."""
        seconds = KEY_ASKED_SECONDS if reason is None else KEY_MISSING_SECONDS
        self._without[stream_name] = time.monotonic() + seconds
        if reason is not None and stream_name not in self._blocked:
            self._blocked.add(stream_name)
            emit(signals.TimersBlocked(stream_name, reason))

    def _unblock(self, stream_name: str) -> None:
        if stream_name in self._blocked:
            self._blocked.remove(stream_name)
            emit(signals.TimersUnblocked(stream_name))

    # ── what is told ───────────────────────────────────────────────────────────────────────────

    def _tell(self, fired: int, late_seconds: float) -> None:
        if not fired:
            return
        emit(signals.TimersFired(fired, max(0, round(late_seconds * 1000))))
        now = time.monotonic()
        if late_seconds > LATE_SECONDS and now >= self._late_told_until:
            self._late_told_until = now + LATE_SECONDS
            emit(signals.TimersLate(round(late_seconds)))

    def _fail(self, error: psycopg.Error) -> Progress:
        """Nothing here may end the process, which has other work; it is said, and tried again."""
        self._begin_pass()
        if error.sqlstate == _NOT_SEALED and self._failure is None:
            # A stream has become confidential, or its key was replaced, a moment ago.
            self._failure = ""
            return Progress(0, pause_seconds=LEFT_FIRST_SECONDS)
        reason = reason_of(error)
        if reason != self._failure:
            emit(signals.FiringFailed(reason))
        self._failure = reason
        return Progress(0, pause_seconds=FAILED_SECONDS)

    # ── sleep ──────────────────────────────────────────────────────────────────────────────────

    def _seconds_until_next_look(self) -> float:
        now = time.monotonic()
        due_in = self._next_due_at - now
        if self._wakeup is not None and not self._is_first:
            due_in = max(due_in, 0.0) + STANDBY_SECONDS
        moments = [*self._without.values()]
        if self._retry_at is not None:
            moments.append(self._retry_at)
        return max(0.0, min(LOOK_SECONDS, due_in, *(moment - now for moment in moments)))

    def _let_go(self) -> None:
        if self._is_holding and self._wakeup is not None:
            self._wakeup.let_go()
        self._is_holding = False

    def _wakeup_that_hears(self, stop: threading.Event) -> TimerWakeup | None:
        """The wake-up, tested when it is opened; None where the timekeeper has to poll."""
        if self._wakeup is None and not self._is_silent:
            # Ours before it is tested: `close` ends it if a connection breaks meanwhile.
            self._wakeup = TimerWakeup(self._settings.database_url, self._settings.schema)
            if self._wakeup.hears(self._connection, stop):
                # Who is heard is not behind such a pooler.
                self._connection.prepare_threshold = PREPARE_AFTER
            else:
                self._wakeup.close()
                self._wakeup = None
                self._is_silent = not stop.is_set()
                if self._is_silent:
                    emit(signals.WakeupSilent(POLL_MODE_SECONDS))
        return self._wakeup
