"""Timers in Redis, for callers without a session: what workers and operators do with a topic's.

Every change is one script that goes by the server's clock. A lease is the score that a claim gave
a timer: whoever finds another score there has lost it, or somebody has armed the timer anew.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from penstock.core.require import require
from penstock.core.timer_keys import KeyNames
from penstock.errors import UsageError
from penstock.stores.redis_link import Word
from penstock.stores.timer_bell import TimerBell
from penstock.stores.timer_calls import (
    Call,
    PendingPages,
    TimerCalls,
    dead_timer,
    number,
    queued_timer,
    text,
)
from penstock.stores.timer_link import AsyncTimerLink, TimerLink, TimerServer
from penstock.stores.timer_values import (
    ClaimedTimer,
    Claims,
    DeadTimer,
    Outcome,
    QueuedTimer,
    Redriven,
)

__all__ = [
    "AsyncRedisTimers",
    "ClaimedTimer",
    "Claims",
    "DeadTimer",
    "KeyNames",
    "Outcome",
    "QueuedTimer",
    "RedisTimers",
    "Redriven",
]

CLAIM_COUNT_MAX = 1000
"""How many timers one claim may take."""
CLAIM_BYTES_MAX = 8 * 1024 * 1024
"""A claim that has taken payloads of this size takes no more."""
LEASE_SECONDS_MAX = 86_400.0
LIST_LIMIT_MAX = 10_000
ERROR_LENGTH_MAX = 2000
START_SECONDS = 3.0


class RedisTimers:
    """The timers of all topics on one server or cluster, for threads.

    Raises ServerUnavailable where waiting helps, ServerUnsuitable where it does not. Nothing is
    repeated by itself: a claim whose reply is lost leaves its timers to the lease. The first call
    waits `start_seconds` for the server.
    """

    def __init__(
        self,
        server: TimerServer,
        names: KeyNames | None = None,
        *,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.names = names or KeyNames()
        self._calls = TimerCalls(self.names)
        self._link = TimerLink(server, hash_tags=self.names.hash_tags, start_seconds=start_seconds)

    # ── for workers ───────────────────────────────────────────────────────────────────────────

    def claim(self, topic: str, *, count: int, lease_seconds: float) -> Claims:
        """Take up to `count` due timers, the longest due first; say when the next one is due."""
        require(
            0 <= count <= CLAIM_COUNT_MAX,
            f"A claim takes 0 to {CLAIM_COUNT_MAX} timers, not {count}.",
            UsageError,
        )
        _require_lease(lease_seconds)
        call = self._calls.claim(topic, count, lease_seconds, CLAIM_BYTES_MAX)
        now, lease, wait, orphans, taken = self._run(call)
        timers, unreadable = [], []
        for timer_id, payload, due, attempt in taken:
            try:
                name = timer_id.decode()
            except UnicodeDecodeError:
                unreadable.append(self._bury_unreadable(topic, timer_id, lease, payload))
                continue
            timers.append(
                ClaimedTimer(topic, name, payload, float(due), float(lease), int(attempt))
            )
        return Claims(
            timers=tuple(timers),
            wait_seconds=float(wait) if wait else None,
            orphans=tuple(map(text, orphans)),
            now_score=float(now),
            unreadable=tuple(unreadable),
        )

    def renew(self, timer: ClaimedTimer, *, lease_seconds: float) -> tuple[Outcome, ClaimedTimer]:
        """Lengthen a lease to `lease_seconds` from now; the timer returned is the one to settle.

        With any other outcome than DONE, it is the one given.
        """
        _require_lease(lease_seconds)
        outcome, *lease = self._settle(timer, "renew", number(lease_seconds))
        if outcome != Outcome.DONE:
            return outcome, timer
        return outcome, replace(timer, lease_score=float(lease[0]))

    def commit(self, timer: ClaimedTimer) -> Outcome:
        """Remove a handled timer."""
        return Outcome(self._settle(timer, "commit")[0])

    def retry(
        self, timer: ClaimedTimer, *, delay_seconds: float, is_counted: bool = True
    ) -> Outcome:
        """Let the lease go: the timer is due again after a while, with the same `due_score`.

        Not counted, the next attempt has the same number: for a timer given back untouched.
        """
        channel = self.names.of(timer.topic).channel
        taken_off = 0 if is_counted else 1
        return Outcome(self._settle(timer, "retry", number(delay_seconds), taken_off, channel)[0])

    def bury(self, timer: ClaimedTimer, *, error_type: str, error_message: str) -> Outcome:
        """Move a timer to the topic's dead letters; one of the same id there is replaced."""
        happened = _happened(error_type, error_message)
        return Outcome(self._settle(timer, "bury", happened, timer.timer_id)[0])

    def bell(self, topic: str) -> TimerBell:
        """What rings when an earlier timer is armed: claim, then bell.wait(claims.wait_seconds)."""
        return TimerBell(self._link.subscriber, self.names.of(topic).channel)

    # ── for everybody ─────────────────────────────────────────────────────────────────────────

    def publish(
        self,
        topic: str,
        timer_id: str,
        payload: bytes,
        *,
        delay_seconds: float | None = None,
        at_score: float | None = None,
    ) -> float:
        """Arm a timer, in place of one of the same id. Returns its score: when it is due.

        `delay_seconds` is added to the server's time; `at_score` is a time of its own.
        """
        call = self._calls.publish(topic, timer_id, payload, delay_seconds, at_score)
        return float(self._run(call))

    def cancel(self, topic: str, timer_id: str) -> bool:
        """Remove a timer, also one under lease. False: there is none."""
        return bool(self._run(self._calls.cancel(topic, timer_id)))

    def cancel_all(self, topic: str) -> int:
        """Remove all timers of a topic, dead ones excepted. Returns how many there were."""
        return int(self._run(self._calls.cancel(topic)))

    def has_pending(self, topic: str, timer_id: str) -> bool:
        """Whether there is such a timer, under lease or not."""
        return self._link.call("ZSCORE", self.names.of(topic).timeline, timer_id) is not None

    def pending_ids(self, topic: str, *, before_score: float | None = None) -> list[str]:
        """The ids of all timers, in the order of their scores, up to a score."""
        pages = PendingPages(self._calls, topic, before_score)
        while pages.take(self._run(pages.next_page())):
            pass
        return pages.ids

    # ── for operators ─────────────────────────────────────────────────────────────────────────

    def list_timers(
        self, topic: str, *, before_score: float | None = None, limit: int = 1000
    ) -> list[QueuedTimer]:
        """The timers with the lowest scores."""
        high = "+inf" if before_score is None else number(before_score)
        reply = self._run(self._calls.first(topic, high, _limited(limit)))
        rows = zip(reply[0::3], reply[1::3], reply[2::3], strict=True)
        return [queued_timer(topic, *row) for row in rows]

    def find(self, topic: str, timer_id: str) -> tuple[QueuedTimer, bytes] | None:
        """A timer with its payload; None where there is none."""
        reply = self._run(self._calls.find(topic, timer_id))
        if not reply:
            return None
        score, state, payload = reply
        return queued_timer(topic, timer_id.encode(), score, state), payload

    def list_dead(self, topic: str, *, limit: int = 1000) -> list[DeadTimer]:
        """Dead timers of a topic, the latest first; beyond the limit, any of them."""
        reply = self._run(self._calls.dead(topic, _limited(limit)))
        rows = zip(reply[0::2], reply[1::2], strict=True)
        found = [dead_timer(topic, text(timer_id), heading) for timer_id, heading in rows]
        dead = [timer for timer in found if timer is not None]
        return sorted(dead, key=lambda timer: timer.buried_score, reverse=True)

    def find_dead(self, topic: str, timer_id: str) -> tuple[DeadTimer, bytes] | None:
        """A dead timer with its payload; None where there is none."""
        value = self._link.call("HGET", self.names.of(topic).dead, timer_id)
        if value is None:
            return None
        *lines, payload = value.split(b"\n", 4)
        timer = dead_timer(topic, timer_id, b"\n".join(lines))
        return None if timer is None else (timer, payload)

    def redrive(self, topic: str, timer_id: str) -> Redriven:
        """Arm a dead timer again, due at once, with its attempts counted anew."""
        return Redriven(self._run(self._calls.redrive(topic, timer_id)).decode())

    def discard(self, topic: str, timer_id: str) -> bool:
        """Give up a dead timer for good. False: there is none."""
        return bool(self._link.call("HDEL", self.names.of(topic).dead, timer_id))

    def counts(self, topic: str) -> tuple[int, int]:
        """How many timers a topic has, and how many dead ones."""
        keys = self.names.of(topic)
        return int(self._link.call("ZCARD", keys.timeline)), int(self._link.call("HLEN", keys.dead))

    def close(self) -> None:
        """Give connections back; the next call opens new ones."""
        self._link.close()

    def _run(self, call: Call) -> Any:
        return self._link.run(call.script, call.keys, *call.arguments)

    def _settle(self, timer: ClaimedTimer, what: str, *arguments: Word) -> tuple[Outcome, Any]:
        proof = (number(timer.lease_score), _digest(timer.payload))
        call = self._calls.settle(timer.topic, timer.timer_id, *proof, what, *arguments)
        outcome, *rest = self._run(call)
        return Outcome(outcome.decode()), *rest

    def _bury_unreadable(self, topic: str, timer_id: bytes, lease: bytes, payload: bytes) -> str:
        name = text(timer_id)
        happened = _happened("UnicodeDecodeError", "The timer's id is not UTF-8.")
        call = self._calls.settle(topic, timer_id, lease, _digest(payload), "bury", happened, name)
        self._run(call)
        return name


class AsyncRedisTimers:
    """What asyncio applications do with timers; workers and operators use RedisTimers."""

    def __init__(
        self,
        server: TimerServer,
        names: KeyNames | None = None,
        *,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self.names = names or KeyNames()
        self._calls = TimerCalls(self.names)
        self._link = AsyncTimerLink(
            server, hash_tags=self.names.hash_tags, start_seconds=start_seconds
        )

    async def publish(
        self,
        topic: str,
        timer_id: str,
        payload: bytes,
        *,
        delay_seconds: float | None = None,
        at_score: float | None = None,
    ) -> float:
        """Arm a timer; see RedisTimers.publish."""
        call = self._calls.publish(topic, timer_id, payload, delay_seconds, at_score)
        return float(await self._run(call))

    async def cancel(self, topic: str, timer_id: str) -> bool:
        """Remove a timer. False: there is none."""
        return bool(await self._run(self._calls.cancel(topic, timer_id)))

    async def cancel_all(self, topic: str) -> int:
        """Remove all timers of a topic. Returns how many there were."""
        return int(await self._run(self._calls.cancel(topic)))

    async def has_pending(self, topic: str, timer_id: str) -> bool:
        """Whether there is such a timer, under lease or not."""
        return await self._link.call("ZSCORE", self.names.of(topic).timeline, timer_id) is not None

    async def pending_ids(self, topic: str, *, before_score: float | None = None) -> list[str]:
        """The ids of all timers, in the order of their scores, up to a score."""
        pages = PendingPages(self._calls, topic, before_score)
        while pages.take(await self._run(pages.next_page())):
            pass
        return pages.ids

    async def close(self) -> None:
        """Give the connections of the running event loop back."""
        await self._link.close()

    async def _run(self, call: Call) -> Any:
        return await self._link.run(call.script, call.keys, *call.arguments)


def _require_lease(lease_seconds: float) -> None:
    require(
        0 < lease_seconds <= LEASE_SECONDS_MAX,
        f"A lease lasts up to {LEASE_SECONDS_MAX:.0f} seconds, not {lease_seconds}.",
        UsageError,
    )


def _limited(limit: int) -> int:
    return max(0, min(limit, LIST_LIMIT_MAX))


def _digest(payload: bytes) -> str:
    """What Redis itself can compute of a payload, instead of sending all of it back."""
    return hashlib.sha1(payload, usedforsecurity=False).hexdigest()


def _happened(error_type: str, error_message: str) -> str:
    """What is kept of a failure, in one line."""
    told = {"type": error_type[:ERROR_LENGTH_MAX], "message": error_message[:ERROR_LENGTH_MAX]}
    return json.dumps(told)
