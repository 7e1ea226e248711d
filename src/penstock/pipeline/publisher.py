"""The publisher: gives committed events their positions and moves them to the hot log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psycopg

from penstock.core.leases import PUBLISHER, Lease
from penstock.core.progress import IDLE, Progress
from penstock.core.settings import Settings
from penstock.errors import (
    LeaseLost,
    ServerUnavailable,
    ServerUnsuitable,
    StreamForeign,
    TimelineChanged,
)
from penstock.pipeline.backlog import BacklogAlarm
from penstock.pipeline.leasing import Leases, let_go_of_lost
from penstock.pipeline.log_writer import LogWriter, Publication, Rows
from penstock.stores.direct import Direct
from penstock.stores.hot_log import HotLog, HotLogUnusable
from penstock.stores.leases import LeaseTable
from penstock.stores.migrations import require_current
from penstock.stores.outage import Outage
from penstock.stores.outbox import Outbox
from penstock.stores.postgres import connect_stage
from penstock.stores.streams import Streams
from penstock.stores.wakeup import Wakeup
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

# New streams, free leases, rows below the floor and a hot log that lost its tail while nobody
# sent anything are all found within this time.
SWEEP_SECONDS = 1.0
REFUSED_RETRY_SECONDS = 1.0
# How often to look for work where notifications are not used, or not heard.
POLL_MODE_SECONDS = 0.05
# How long to leave an undecided sender alone before trying again to fall asleep.
UNDECIDED_FIRST_SECONDS = 0.001
UNDECIDED_LONGEST_SECONDS = 0.05
# A line that moves one event at a time is quiet: the locks are kept, and confirming can wait until
# the consumers have had the processor. A busier one lets go, so that senders need not notify.
QUIET_EVENTS_MAX = 1
CONFIRM_AFTER_SECONDS = 0.02
# Between batches that are neither single nor full: a few larger ones cost senders and consumers
# less of the processor than many small ones.
LINGER_SECONDS = 0.004
# With so few streams a notified publisher numbers at once instead of asking first which has work.
NUMBER_UNASKED_MAX = 4
# Statements are prepared when they are used for the sixth time.
PREPARE_AFTER = 5
# A hot log that loses entries as fast as they are filled in must not become a busy loop.
FOLLOW_UP_SECONDS = 0.01


class Publisher:
    """Moves committed events from the outbox to their streams, each position once.

    One publisher serves every stream that it can lease. It owns the hot log that it is given.
    """

    def __init__(
        self,
        settings: Settings,
        leases: Leases,
        hot_log: HotLog,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._hot_log = hot_log
        self._stop_requested = stop_requested
        self._outbox = Outbox(settings.schema)
        self._streams = Streams(settings.schema)
        self._lease_table = LeaseTable(settings.schema)
        self._redis = Outage("publisher", "Redis")
        self._backlog = BacklogAlarm(settings.outbox_backlog_max)
        self._publications: dict[str, Publication] = {}
        self._registered: set[str] = set()
        self._next_sweep_at = 0.0
        self._undecided_seconds = UNDECIDED_FIRST_SECONDS
        self._wakeup: Wakeup | None = None
        self._is_holding = False
        self._was_notified = False
        self._is_silent = settings.wakeup == "poll"
        self._connection = connect_stage(settings.database_url, "penstock publisher")
        try:
            require_current(self._connection, settings.schema)
        except BaseException:
            self._connection.close()
            hot_log.close()
            raise
        # Poolers in transaction mode lose prepared statements.
        self._connection.prepare_threshold = None
        self._direct = Direct(self._connection)
        self._writer = LogWriter(settings, self._connection, hot_log, self._outbox, self._streams)

    def step(self) -> Progress:
        """Publish at most one batch of every leased stream."""
        if self._is_holding and not self._is_worth_a_look():
            return IDLE
        moved = self._step()
        if moved > QUIET_EVENTS_MAX or any(p.has_more or p.is_behind for p in self._active()):
            self._let_go()
        is_lingering = moved > QUIET_EVENTS_MAX and not any(p.has_more for p in self._active())
        return Progress(moved, pause_seconds=LINGER_SECONDS if is_lingering else 0.0)

    def _is_worth_a_look(self) -> bool:
        """While the locks are held every commit notifies; without a notification there is none."""
        was_notified = self._was_notified or self._wakeup is None or self._wakeup.was_notified()
        self._was_notified = False
        return was_notified or time.monotonic() >= self._next_sweep_at

    def _step(self) -> int:
        if time.monotonic() >= self._next_sweep_at:
            self._sweep()
            self._next_sweep_at = time.monotonic() + SWEEP_SECONDS
        active = self._active()
        quiet = [p.stream_name for p in active if not (p.has_more or p.needs_sweep)]
        busy = self._outbox.has_unnumbered(self._connection, quiet)
        moved = 0
        for publication in active:
            if self._stop_requested():
                break
            is_busy = publication.stream_name in busy or publication.stream_name not in quiet
            moved += self._publish(publication, is_busy=is_busy)
        if moved:
            self._undecided_seconds = UNDECIDED_FIRST_SECONDS
        return moved

    def wait(self, stop: threading.Event) -> None:
        """Sleep until a sender notifies, until the next duty, or until `stop`."""
        seconds = self._seconds_until_next_duty()
        wakeup = self._wakeup_that_hears(stop)
        if wakeup is None:
            self._confirm_all()
            stop.wait(min(seconds, POLL_MODE_SECONDS))
            return
        if not self._is_holding and not self._hold(wakeup, stop, seconds):
            return
        if any(p.is_unconfirmed for p in self._publications.values()):
            # What was appended a moment ago is being handled: leave it the processor.
            if self._sleep(wakeup, min(seconds, CONFIRM_AFTER_SECONDS), stop):
                return
            self._confirm_all()
        emit(signals.PublisherSlept(len(self._publications)))
        if not self._sleep(wakeup, seconds, stop):
            self._let_go()

    def _hold(self, wakeup: Wakeup, stop: threading.Event, seconds: float) -> bool:
        """Take the locks that make every sender notify, and look once more for what came before."""
        names = [p.stream_name for p in self._publications.values() if p.refusal is None]
        if not wakeup.try_hold(names):
            self._confirm_all()
            stop.wait(min(seconds, self._undecided_seconds))
            self._undecided_seconds = min(self._undecided_seconds * 2, UNDECIDED_LONGEST_SECONDS)
            return False
        self._undecided_seconds = UNDECIDED_FIRST_SECONDS
        self._is_holding = True
        if self._outbox.has_unnumbered(self._connection, names):
            self._let_go()
            return False
        return True

    def _sleep(self, wakeup: Wakeup, seconds: float, stop: threading.Event) -> bool:
        """Sleep until a sender notifies; with few streams each is then numbered unasked."""
        self._was_notified = wakeup.sleep(seconds, stop)
        if self._was_notified and len(self._publications) <= NUMBER_UNASKED_MAX:
            for publication in self._publications.values():
                publication.has_more = True
        return self._was_notified

    def _let_go(self) -> None:
        """Senders need not notify any more."""
        if self._is_holding and self._wakeup is not None:
            self._wakeup.let_go()
        self._is_holding = self._was_notified = False

    def _confirm_all(self) -> None:
        for publication in self._publications.values():
            self._writer.confirm(publication)

    def close(self) -> None:
        """Give back leases and connections. What cannot be given back runs out by itself."""
        if self._connection.closed and self._publications:
            with suppress(ServerUnavailable):
                self._connection = connect_stage(self._settings.database_url, "penstock publisher")
        for publication in self._publications.values():
            try:
                self._leases.release(self._connection, publication.lease)
            except psycopg.Error as error:
                self._leases.abandon(publication.lease, str(error).strip())
        self._publications.clear()
        if self._wakeup is not None:
            self._wakeup.close()
        self._connection.close()
        self._hot_log.close()

    def _active(self) -> list[Publication]:
        now = time.monotonic()
        return [p for p in self._publications.values() if p.refusal is None or now >= p.retry_at]

    def _sweep(self) -> None:
        """Look at everything that no notification tells. New streams need new locks."""
        self._let_go()
        if self._hot_log.keeps_entries:
            self._writer.renew_keys()
        waiting = set(self._outbox.unnumbered_streams(self._connection))
        for stream_name in waiting - self._registered:
            self._streams.register(self._connection, stream_name)
            self._registered.add(stream_name)
        for stream_name in self._streams.unleased(self._connection, self._leases.worker_id):
            if stream_name in self._publications:
                continue
            self._lease_table.ensure(self._connection, stream_name, PUBLISHER)
            lease = self._leases.acquire(self._connection, stream_name, PUBLISHER)
            if lease is None:
                continue
            try:
                self._adopt(lease)
            except BaseException as error:
                # Nobody will know of this lease: it must not be renewed for ever.
                self._leases.abandon(lease, str(error).strip())
                raise
        for publication in self._publications.values():
            publication.is_unchecked = True
            publication.needs_sweep = publication.stream_name in waiting
            for outage in (self._redis, publication.obstacle):
                if outage.is_going_on:
                    self._backlog.look(publication, outage.reason)

    def _adopt(self, lease: Lease) -> None:
        state = self._streams.read(self._connection, lease.stream_name)
        self._registered.add(lease.stream_name)
        self._publications[lease.stream_name] = Publication(
            lease, state.origin, state.head, state.published
        )

    def _publish(self, publication: Publication, *, is_busy: bool) -> int:
        """One batch: number, append, confirm. Trouble with one stream leaves the others alone."""
        if not self._leases.is_held(publication.lease):
            self._leases.forget(publication.lease, "it ended before it was renewed")
            del self._publications[publication.stream_name]
            return 0
        try:
            # The log is opened before a position is given out: a log that is ahead of us, or
            # another database's, is a reason to give out none.
            moved = self._follow(publication, ()) if publication.is_behind else 0
            if publication.refusal is not None and publication.last is None:
                return moved
            publication.refusal = None
            rows = self._number(publication) if is_busy else ()
            moved += len(rows) + self._follow(publication, rows)
        except LeaseLost as error:
            self._lose(publication, error)
            return 0
        except StreamForeign as error:
            self._refuse(publication, str(error))
            return 0
        if moved != QUIET_EVENTS_MAX:
            self._writer.confirm(publication)
        return moved

    def _number(self, publication: Publication) -> Rows:
        try:
            rows = self._outbox.number(
                self._connection,
                publication.lease,
                self._settings.publish_batch_size,
                sweep=publication.needs_sweep,
                direct=self._direct,
                meanwhile=partial(self._writer.sign, publication.stream_name),
            )
        except TimelineChanged as error:
            # A standby took over, perhaps without the last positions. What the hot log has beyond
            # them was looked at when it was opened, or will be.
            self._writer.step_over(publication, publication.last or 0, str(error))
            return ()
        publication.needs_sweep = False
        publication.has_more = len(rows) == self._settings.publish_batch_size
        if rows:
            publication.head = rows[-1][0]
            emit(signals.BatchNumbered(publication.stream_name, rows[0][0], rows[-1][0]))
        return rows

    def _follow(self, publication: Publication, rows: Rows) -> int:
        """Let the hot log follow, if it is there. Returns how many older events it got."""
        if not self._hot_log.keeps_entries:
            self._writer.announce(publication, rows)
            return 0
        is_due = rows or publication.is_behind or publication.is_unchecked
        if not (is_due and self._redis.is_worth_trying and publication.obstacle.is_worth_trying):
            return 0
        try:
            refilled = self._writer.follow(publication, rows)
        except StreamForeign:
            raise
        except (ServerUnavailable, ServerUnsuitable) as error:
            # Positions are the truth and go on; the log is filled when the server is back.
            is_alone = isinstance(error, HotLogUnusable)
            (publication.obstacle if is_alone else self._redis).begin(error)
            return 0
        self._redis.end()
        publication.obstacle.end()
        return refilled

    def _lose(self, publication: Publication, error: LeaseLost) -> None:
        del self._publications[publication.stream_name]
        self._registered.discard(publication.stream_name)
        let_go_of_lost(self._leases, self._connection, publication.lease, error)

    def _refuse(self, publication: Publication, reason: str) -> None:
        if publication.refusal is None:
            emit(signals.StreamRefused(publication.stream_name, reason))
        publication.refusal = reason
        publication.retry_at = time.monotonic() + REFUSED_RETRY_SECONDS

    def _seconds_until_next_duty(self) -> float:
        seconds = min(self._settings.poll_seconds, self._next_sweep_at - time.monotonic())
        for behind in (p for p in self._publications.values() if p.is_behind and not p.refusal):
            pause = max(self._redis.pause_seconds, behind.obstacle.pause_seconds)
            seconds = min(seconds, max(pause, FOLLOW_UP_SECONDS))
        return max(seconds, 0.0)

    def _wakeup_that_hears(self, stop: threading.Event) -> Wakeup | None:
        """The wake-up, tested when it is opened; None where the publisher has to poll."""
        if self._wakeup is None and not self._is_silent:
            # Ours before it is tested: `close` ends it if a connection breaks meanwhile.
            self._wakeup = Wakeup(self._settings.database_url, self._settings.schema)
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
