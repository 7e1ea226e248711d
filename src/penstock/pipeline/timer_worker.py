"""The stage that handles a topic of Redis timers: claims what is due, lets hands handle it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.core.progress import IDLE, Progress
from penstock.core.timer_options import TimerOptions, timer_role
from penstock.errors import ServerUnavailable, ServerUnsuitable
from penstock.pipeline.timer_attempt import tell_loss
from penstock.pipeline.timer_hands import Hand, Hands, Held, SharedOutage
from penstock.stores.outage import Outage
from penstock.stores.timer_queue import Claims, Outcome, RedisTimers
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted

LINGER_SECONDS = 0.006
"""So long after a claim the next one waits, unless all hands are free: a busy topic is claimed in
handfuls instead of one by one."""
SLICE_SECONDS = 0.2
"""How soon a worker at rest notices that it is to stop."""
GIVE_BACK_PART = 0.2
GIVE_BACK_SECONDS_MAX = 2.0
"""Of the time that a process has to end in: kept for giving back what is not done by then."""


class TimerWorker:
    """Handles due timers of one topic, several at a time; any number of processes may."""

    def __init__(
        self,
        consumer: str,
        options: TimerOptions,
        store: RedisTimers,
        *,
        open_hand: Callable[[Outage], Hand],
        seconds_to_end: Callable[[], float],
    ) -> None:
        self._consumer = consumer
        self._options = options
        self._store = store
        self._seconds_to_end = seconds_to_end
        self._bell = store.bell(options.topic)
        role = timer_role(options.topic)
        self._redis = Outage(role, "Redis")
        self._postgres = SharedOutage(role, "PostgreSQL")
        self._hands = Hands(
            role, options.max_concurrent, lambda: open_hand(self._postgres), self._on_free
        )
        self._was_answered = False
        self._wants_hand = False
        self._has_backlog = False
        self._claimed_at = 0.0
        self._look_at = 0.0
        self._poll_seconds = options.polling_interval

    # ── working ───────────────────────────────────────────────────────────────────────────────

    def step(self) -> Progress:
        """Renew what is in hand, and claim what is due for the hands that are free."""
        if self._hands.failure is not None:
            raise self._hands.failure
        self._renew()
        free = self._hands.free
        if free == 0 or time.monotonic() < self._look_at:
            return IDLE
        if self._postgres.is_going_on:
            if not self._postgres.is_worth_trying:
                return Progress(0, pause_seconds=self._postgres.pause_seconds)
            free = 1
        asked_at = time.monotonic()
        try:
            claims = self._store.claim(
                self._options.topic, count=free, lease_seconds=self._options.lease_ttl
            )
        except (ServerUnavailable, ServerUnsuitable) as error:
            # At the start somebody looks whether it works; rights that were taken come back.
            if isinstance(error, ServerUnsuitable) and not self._was_answered:
                raise
            self._redis.begin(error)
            return Progress(0, pause_seconds=self._redis.pause_seconds)
        self._was_answered = True
        self._redis.end()
        self._note(claims, asked_at)
        for timer in claims.timers:
            self._hands.take(Held(timer, asked_at, self._options.lease_ttl))
        return Progress(len(claims.timers))

    def wait(self, stop: threading.Event) -> None:
        """Wait until a timer is due or armed, a hand is free for one, or a lease wants renewal."""
        self._wants_hand = self._hands.free == 0
        # Asked again after the wish is known: a hand that became free in between rings no bell.
        while not stop.is_set() and (seconds := self._rest_seconds()) > 0:
            if self._bell.wait(min(seconds, SLICE_SECONDS)) and self._hands.free > 0:
                self._look_at = min(self._look_at, self._claimed_at + LINGER_SECONDS)
        self._wants_hand = False

    def _note(self, claims: Claims, asked_at: float) -> None:
        """Say what was found, and decide when to look again."""
        for timer_id in claims.orphans:
            emit(signals.TimerOrphaned(self._consumer, timer_id))
        for timer_id in claims.unreadable:
            emit(signals.TimerBuried(self._consumer, timer_id, 1, "contract"))
        options = self._options
        if claims.timers and is_wanted(signals.TimersClaimed):
            due_first = min(timer.due_score for timer in claims.timers)
            late_ms = round((claims.now_score - due_first) * 1000, 3)
            emit(signals.TimersClaimed(self._consumer, len(claims.timers), late_ms))
        if claims.timers or not self._bell.is_listening:
            self._poll_seconds = options.polling_interval
        else:
            self._poll_seconds = min(self._poll_seconds * 2, options.max_polling_interval)
        wait_seconds = claims.wait_seconds
        pause = (
            self._poll_seconds if wait_seconds is None else min(wait_seconds, self._poll_seconds)
        )
        # Counted from when it was asked: the answer may have taken its time.
        self._claimed_at = asked_at
        self._look_at = asked_at + max(pause, LINGER_SECONDS)
        self._has_backlog = pause == 0

    def _rest_seconds(self) -> float:
        """How long there is nothing to do, unless somebody rings."""
        if self._hands.failure is not None:
            return 0.0
        now, held = time.monotonic(), self._hands.held()
        if not held and self._has_backlog:
            self._look_at = 0.0
        moments = [each.renew_at for each in held if each.outcome is None]
        if self._hands.free > 0 or self._look_at > now:
            moments.append(self._look_at)
        return min(moments, default=now + SLICE_SECONDS) - now

    def _on_free(self) -> None:
        """A hand is free: worth a ring if one was wanted, or if nothing is in hand any more."""
        is_wanted = self._wants_hand and time.monotonic() >= self._look_at
        if is_wanted or (self._has_backlog and not self._hands.held()):
            self._bell.ring()

    def _renew(self) -> None:
        for held in self._hands.held():
            now = time.monotonic()
            if held.outcome is not None or now < held.renew_at:
                continue
            # Whoever settles it just now needs no renewal.
            if held.lock.acquire(blocking=False):
                try:
                    self._renew_one(held, now)
                except (ServerUnavailable, ServerUnsuitable) as error:
                    held.renew_at = now + min(self._options.lease_ttl / 10, SLICE_SECONDS)
                    self._redis.begin(error)
                    return
                finally:
                    held.lock.release()

    def _renew_one(self, held: Held, asked_at: float) -> None:
        if held.outcome is not None:
            return
        outcome, timer = self._store.renew(held.timer, lease_seconds=self._options.lease_ttl)
        if outcome is Outcome.DONE:
            held.extend(timer, asked_at)
        else:
            # Its handler goes on to its end; there is nothing left to settle then.
            held.outcome = outcome
            tell_loss(self._consumer, held.timer, outcome)

    # ── ending ────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Let running handlers end while there is time, and give back what they have not done."""
        seconds = self._seconds_to_end()
        reserve = min(GIVE_BACK_SECONDS_MAX, seconds * GIVE_BACK_PART)
        deadline = time.monotonic() + seconds - reserve
        self._wants_hand, self._look_at = True, 0.0
        while self._hands.held() and time.monotonic() < deadline:
            self._bell.wait(min(SLICE_SECONDS, max(0.0, deadline - time.monotonic())))
            self._renew()
        self._give_back()
        self._hands.close()
        self._bell.close()
        self._store.close()

    def _give_back(self) -> None:
        count = 0
        for held in self._hands.held():
            # First the transaction: whoever takes the timer next must not find it locked.
            self._hands.interrupt(held)
            with held.lock:
                if held.outcome is None:
                    try:
                        held.outcome = self._store.retry(
                            held.timer, delay_seconds=0.0, is_counted=False
                        )
                    except (ServerUnavailable, ServerUnsuitable):
                        # The lease runs out by itself.
                        return
                    count += held.outcome is Outcome.DONE
        if count:
            emit(signals.TimersGivenBack(self._consumer, count))
