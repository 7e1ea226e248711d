"""Timers for callers without a session: published to Redis, handled by `@pipeline.timer`.

They speak the wire format of faststream-redis-timers, so that either side serves the other's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Self
from uuid import uuid4

from penstock.core.require import require
from penstock.core.settings import MEBIBYTE, Settings
from penstock.core.timer_envelope import (
    CONTENT_TYPE,
    CORRELATION_ID,
    REPLY_TO,
    encode_message,
    pack,
)
from penstock.core.timer_keys import PAYLOADS_KEY, TIMELINE_KEY, KeyNames, require_timer_id
from penstock.core.trace_context import TRACEPARENT
from penstock.errors import InvalidTimer, SettingsError
from penstock.stores.timer_link import TimerServer
from penstock.stores.timer_queue import START_SECONDS, AsyncRedisTimers, RedisTimers
from penstock.telemetry.tracing import carried_metadata

NOW = timedelta(0)


class TimerQueue:
    """Publishes and cancels timers in Redis, from threads and, as …_async, from asyncio.

    `server` is a URL or a client of redis-py, which stays the caller's to close. The first use
    waits `start_timeout` seconds for the server. Durability is that server's: a timer that has to
    come about with a transaction belongs into PostgreSQL (`pipeline.schedule`).
    """

    def __init__(
        self,
        server: TimerServer,
        *,
        timeline_key: str = TIMELINE_KEY,
        payloads_key: str = PAYLOADS_KEY,
        prefix: str = "",
        start_timeout: float = START_SECONDS,
        hash_tags: bool = False,
        payload_bytes_max: int = MEBIBYTE,
    ) -> None:
        require(start_timeout >= 0, "start_timeout must not be negative")
        require(payload_bytes_max > 0, "payload_bytes_max must be positive")
        self._server = server
        self._names = KeyNames(
            timeline_key=timeline_key,
            payloads_key=payloads_key,
            prefix=prefix,
            hash_tags=hash_tags,
        )
        self._start_seconds = start_timeout
        self._payload_bytes_max = payload_bytes_max

    @cached_property
    def store(self) -> RedisTimers:
        """The same timers for workers and operators."""
        return RedisTimers(self._server, self._names, start_seconds=self._start_seconds)

    @cached_property
    def _async_store(self) -> AsyncRedisTimers:
        return AsyncRedisTimers(self._server, self._names, start_seconds=self._start_seconds)

    def publish(
        self,
        message: Any,
        topic: str,
        *,
        timer_id: str = "",
        activate_in: timedelta = NOW,
        activate_at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> str:
        """Arm a timer, in place of one of the same id. Returns its id, made up if not given.

        It is due at once, `activate_in` from now by the server's clock, or at a time. A time in
        the past is at once. Whoever publishes it again while its handler runs arms it anew: the
        handler is called again then. Raises InvalidTimer, and ServerUnavailable, after which it may
        be there or not: published again under the same timer_id it is there once, and with the same
        correlation_id a handler with a Session handles it once, even if it was due in between.
        """
        timer = self._armed(
            message,
            timer_id=timer_id,
            activate_in=activate_in,
            activate_at=activate_at,
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        self.store.publish(
            topic,
            timer.timer_id,
            timer.payload,
            delay_seconds=timer.delay_seconds,
            at_score=timer.at_score,
        )
        return timer.timer_id

    async def publish_async(
        self,
        message: Any,
        topic: str,
        *,
        timer_id: str = "",
        activate_in: timedelta = NOW,
        activate_at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
    ) -> str:
        """The same for asyncio."""
        timer = self._armed(
            message,
            timer_id=timer_id,
            activate_in=activate_in,
            activate_at=activate_at,
            headers=headers,
            correlation_id=correlation_id,
            reply_to=reply_to,
        )
        await self._async_store.publish(
            topic,
            timer.timer_id,
            timer.payload,
            delay_seconds=timer.delay_seconds,
            at_score=timer.at_score,
        )
        return timer.timer_id

    def cancel_timer(self, topic: str, timer_id: str) -> bool:
        """Remove a timer. False: there is none. A handler that runs already is not stopped."""
        require_timer_id(timer_id)
        return self.store.cancel(topic, timer_id)

    async def cancel_timer_async(self, topic: str, timer_id: str) -> bool:
        """The same for asyncio."""
        require_timer_id(timer_id)
        return await self._async_store.cancel(topic, timer_id)

    def cancel_all(self, topic: str) -> int:
        """Remove all timers of a topic. Returns how many there were; dead ones stay."""
        return self.store.cancel_all(topic)

    async def cancel_all_async(self, topic: str) -> int:
        """The same for asyncio."""
        return await self._async_store.cancel_all(topic)

    def has_pending(self, topic: str, timer_id: str) -> bool:
        """Whether there is such a timer; one whose handler runs is still there."""
        require_timer_id(timer_id)
        return self.store.has_pending(topic, timer_id)

    async def has_pending_async(self, topic: str, timer_id: str) -> bool:
        """The same for asyncio."""
        require_timer_id(timer_id)
        return await self._async_store.has_pending(topic, timer_id)

    def get_pending_timers(self, topic: str, before: datetime | None = None) -> list[str]:
        """The ids of a topic's timers in the order in which they are due, up to a time.

        One whose handler runs counts as due when its lease ends.
        """
        return self.store.pending_ids(topic, before_score=_score_of(before, "before"))

    async def get_pending_timers_async(
        self, topic: str, before: datetime | None = None
    ) -> list[str]:
        """The same for asyncio."""
        score = _score_of(before, "before")
        return await self._async_store.pending_ids(topic, before_score=score)

    def close(self) -> None:
        """Give the connections of threads back; the next use opens new ones."""
        self.store.close()

    async def close_async(self) -> None:
        """Give the connections of the running event loop back."""
        await self._async_store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close_async()

    def _armed(
        self,
        message: Any,
        *,
        timer_id: str,
        activate_in: timedelta,
        activate_at: datetime | None,
        headers: Mapping[str, str] | None,
        correlation_id: str | None,
        reply_to: str,
    ) -> _Armed:
        """A timer ready to be written, checked before anything is."""
        require(
            isinstance(activate_in, timedelta),
            f"activate_in takes a timedelta, not {type(activate_in).__name__}. Nothing was "
            "published.",
            InvalidTimer,
        )
        require(
            activate_at is None or activate_in == NOW,
            "activate_in and activate_at contradict each other. Nothing was published; give one.",
            InvalidTimer,
        )
        timer_id = timer_id or str(uuid4())
        require_timer_id(timer_id)
        body, content_type = encode_message(message)
        payload = pack(body, _headers(headers, content_type, correlation_id, reply_to))
        require(
            len(payload) <= self._payload_bytes_max,
            f"The timer has {len(payload)} bytes, the limit is {self._payload_bytes_max}. Nothing "
            "was published; publish a reference to the large part, or raise payload_bytes_max.",
            InvalidTimer,
        )
        at_score = _score_of(activate_at, "activate_at")
        delay_seconds = activate_in.total_seconds() if at_score is None else None
        return _Armed(timer_id, payload, delay_seconds, at_score)


@dataclass(frozen=True, slots=True)
class _Armed:
    timer_id: str
    payload: bytes
    delay_seconds: float | None
    at_score: float | None


def timer_queue(settings: Settings, *, start_timeout: float = START_SECONDS) -> TimerQueue:
    """The queue that the settings describe. Raises SettingsError where no Redis is named.

    Workers use its `store`, and outlive an absent server by themselves (start_timeout=0).
    """
    url = settings.timer_redis_url or settings.redis_url
    if url is None:
        raise SettingsError(
            "No setting says where timers are to lie in Redis. Set PENSTOCK_TIMER_REDIS_URL or "
            "PENSTOCK_REDIS_URL; without Redis, use pipeline.schedule, whose timers lie in "
            "PostgreSQL."
        )
    return TimerQueue(
        url,
        timeline_key=settings.timer_timeline_key,
        payloads_key=settings.timer_payloads_key,
        prefix=settings.timer_prefix or "",
        start_timeout=start_timeout,
        hash_tags=settings.timer_hash_tags,
        payload_bytes_max=settings.payload_bytes_max,
    )


def _headers(
    given: Mapping[str, str] | None,
    content_type: str | None,
    correlation_id: str | None,
    reply_to: str,
) -> dict[str, str]:
    """The headers of a timer, the library's own first, as the other library writes them."""
    for name in (CORRELATION_ID, REPLY_TO):
        require(
            not given or name not in given,
            f"The header {name} has an argument of its own. Nothing was published; pass {name}=…",
            InvalidTimer,
        )
    # Fresh for every arming, so that a timer published again under its id is known to be another.
    headers = {CORRELATION_ID: correlation_id or str(uuid4())}
    if content_type is not None:
        headers[CONTENT_TYPE] = content_type
    if reply_to:
        headers[REPLY_TO] = reply_to
    if given is None or TRACEPARENT not in given:
        headers |= carried_metadata()
    return {**headers, **(given or {})}


def _score_of(moment: Any, what: str) -> float | None:
    if moment is None:
        return None
    require(
        isinstance(moment, datetime) and moment.tzinfo is not None,
        f"{what} takes a datetime with a time zone, such as datetime.now(UTC). Nothing was done.",
        InvalidTimer,
    )
    return float(moment.timestamp())
