"""Redis timers together with the real package faststream-redis-timers, on the same keys."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import pytest
from faststream import Context
from faststream_redis_timers import TimersBroker
from redis import asyncio as redis_asyncio

from penstock import Pipeline, TimerMessage, TimerQueue
from penstock.core.timer_messages import read_message
from penstock.stores.timer_queue import ClaimedTimer, Outcome, RedisTimers
from tests.timers_at_work import working
from tests.waiting import wait_until

TOPIC = "mail"
LATER = timedelta(hours=1)
LEASE = 30.0


@pytest.fixture
def queue(redis_url: str) -> Iterator[TimerQueue]:
    with TimerQueue(redis_url) as opened:
        yield opened


@pytest.fixture
def timers(queue: TimerQueue) -> RedisTimers:
    return queue.store


@dataclass
class Other:
    """An application of the other library."""

    broker: TimersBroker
    handled: list[tuple[str, Any, dict[str, Any], str]] = field(default_factory=list)
    """Ids, bodies, headers and correlation ids, as its handler got them."""
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Handlers wait for it."""

    async def until_handled(self, count: int) -> None:
        await until(lambda: len(self.handled) >= count)


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, what="the other side has done its part")


@asynccontextmanager
async def the_other(redis_url: str, *, is_handling: bool = True) -> AsyncIterator[Other]:
    """The other library at work in this event loop, with a handler or without."""
    async with redis_asyncio.Redis.from_url(redis_url) as client:
        broker = TimersBroker(client, logger=None)
        other = Other(broker)
        other.gate.set()
        if is_handling:

            @broker.subscriber(TOPIC, polling_interval=0.01, max_polling_interval=0.02)
            async def handle(body: Any, message: Annotated[Any, Context()]) -> None:
                await other.gate.wait()
                seen = (message.message_id, body, message.headers, message.correlation_id)
                other.handled.append(seen)

        async with broker:
            yield other


def with_the_other(
    redis_url: str, scenario: Callable[[Other], Awaitable[None]], *, is_handling: bool = True
) -> None:
    async def play() -> None:
        async with the_other(redis_url, is_handling=is_handling) as other:
            await scenario(other)

    asyncio.run(play())


def take(timers: RedisTimers) -> ClaimedTimer:
    (timer,) = timers.claim(TOPIC, count=10, lease_seconds=LEASE).timers
    return timer


def read(timer: ClaimedTimer) -> TimerMessage:
    return read_message(
        timer.payload,
        topic=timer.topic,
        timer_id=timer.timer_id,
        due_at=timer.due_at,
        attempt=timer.attempt,
    )


def test_published_there_handled_here(redis_url: str, database_url: str) -> None:
    got: list[TimerMessage] = []
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)

    @pipeline.timer(TOPIC)
    def handle(body: Any, message: TimerMessage) -> None:
        assert body == message.body
        got.append(message)

    async def publish(other: Other) -> None:
        publish = other.broker.publish
        await publish({"n": 1}, TOPIC, timer_id="a", headers={"tenant": "eu"}, correlation_id="c")
        await publish("text", TOPIC, timer_id="b")
        await publish(b"\x00\xff", TOPIC, timer_id="c", activate_in=timedelta(milliseconds=100))
        await publish([1], TOPIC, timer_id="d", headers={"straße": "weiß", "after": "it"})

    with working(pipeline, TOPIC):
        with_the_other(redis_url, publish, is_handling=False)
        wait_until(lambda: len(got) == 4, what="all four are handled here")
    found = {message.timer_id: message for message in got}
    assert found["a"].body == {"n": 1}
    assert (found["a"].headers["tenant"], found["a"].correlation_id) == ("eu", "c")
    assert found["b"].body == "text"
    assert (found["c"].body, found["c"].correlation_id) == (b"\x00\xff", "c")
    # These it could not read itself.
    assert (found["d"].headers["straße"], found["d"].headers["after"]) == ("weiß", "it")
    with TimerQueue(redis_url) as queue:
        assert queue.get_pending_timers(TOPIC) == []


def test_published_here_handled_there(redis_url: str, queue: TimerQueue) -> None:
    async def scenario(other: Other) -> None:
        headers = {"straße": "weiß"}
        queue.publish({"n": 1}, TOPIC, timer_id="a", headers=headers, correlation_id="c")
        queue.publish("text", TOPIC, timer_id="b")
        queue.publish(b"\x00\xff", TOPIC, timer_id="c", activate_in=timedelta(milliseconds=100))
        moment = datetime.now(UTC) + timedelta(milliseconds=100)
        await queue.publish_async([1], TOPIC, timer_id="d", activate_at=moment)
        await other.until_handled(4)
        await queue.close_async()
        found = {timer_id: rest for timer_id, *rest in other.handled}
        body, seen, correlation_id = found["a"]
        assert (body, seen["straße"], correlation_id) == ({"n": 1}, "weiß", "c")
        assert found["b"][0] == "text"
        assert found["c"][0] == b"\x00\xff"
        assert found["d"][0] == [1]
        await until(lambda: queue.get_pending_timers(TOPIC) == [])

    with_the_other(redis_url, scenario)


def test_cancelled_and_looked_for_across(redis_url: str, queue: TimerQueue) -> None:
    async def scenario(other: Other) -> None:
        queue.publish("x", TOPIC, timer_id="ours", activate_in=LATER)
        await other.broker.publish("x", TOPIC, timer_id="theirs", activate_in=LATER)
        assert queue.get_pending_timers(TOPIC) == ["ours", "theirs"]
        assert await other.broker.get_pending_timers(TOPIC) == ["ours", "theirs"]
        assert await other.broker.has_pending(TOPIC, "ours")
        await other.broker.cancel_timer(TOPIC, "ours")
        assert not queue.has_pending(TOPIC, "ours")
        assert queue.cancel_timer(TOPIC, "theirs")
        assert not await other.broker.has_pending(TOPIC, "theirs")
        queue.publish("x", TOPIC, activate_in=LATER)
        assert await other.broker.cancel_all(TOPIC) == 1
        await other.broker.publish("x", TOPIC, activate_in=LATER)
        assert queue.cancel_all(TOPIC) == 1

    with_the_other(redis_url, scenario, is_handling=False)


def test_rescheduled_across(redis_url: str, queue: TimerQueue, timers: RedisTimers) -> None:
    async def scenario(other: Other) -> None:
        # Ours, made due there, handled there; then theirs, made due here, handled there.
        queue.publish("old", TOPIC, timer_id="a", activate_in=LATER)
        await other.broker.publish("new", TOPIC, timer_id="a")
        await other.until_handled(1)
        await until(lambda: queue.get_pending_timers(TOPIC) == [])
        await other.broker.publish("old", TOPIC, timer_id="b", activate_in=LATER)
        queue.publish("new", TOPIC, timer_id="b")
        await other.until_handled(2)
        assert [(timer_id, body) for timer_id, body, *_ in other.handled] == [
            ("a", "new"),
            ("b", "new"),
        ]
        await until(lambda: queue.get_pending_timers(TOPIC) == [])

    with_the_other(redis_url, scenario)

    async def put_off(other: Other) -> None:
        queue.publish("old", TOPIC, timer_id="c")
        await other.broker.publish("new", TOPIC, timer_id="c", activate_in=LATER)
        assert timers.claim(TOPIC, count=10, lease_seconds=LEASE).timers == ()

    with_the_other(redis_url, put_off, is_handling=False)


def test_rescheduled_there_while_handled_here_it_survives_the_commit(
    redis_url: str, timers: RedisTimers
) -> None:
    async def scenario(other: Other) -> None:
        for again in ("other body", "body"):
            await other.broker.publish("body", TOPIC, timer_id="a")
            taken = take(timers)
            await other.broker.publish(again, TOPIC, timer_id="a")
            assert timers.commit(taken) == Outcome.REARMED
            anew = take(timers)
            assert (read(anew).body, anew.attempt) == (again, 1)
            assert timers.commit(anew) == Outcome.DONE

    with_the_other(redis_url, scenario, is_handling=False)


def test_a_lease_of_either_side_is_kept_by_the_other(
    redis_url: str, queue: TimerQueue, timers: RedisTimers
) -> None:
    async def scenario(other: Other) -> None:
        # Theirs: nothing is due here while its handler runs.
        other.gate.clear()
        queue.publish("x", TOPIC, timer_id="a")
        score = timers.list_timers(TOPIC)[0].score
        await until(lambda: timers.list_timers(TOPIC)[0].score > score)
        claims = timers.claim(TOPIC, count=10, lease_seconds=LEASE)
        assert claims.timers == ()
        assert claims.wait_seconds == pytest.approx(30, abs=5)
        other.gate.set()
        await other.until_handled(1)
        await until(lambda: queue.get_pending_timers(TOPIC) == [])

    with_the_other(redis_url, scenario)
    queue.publish("x", TOPIC, timer_id="b")
    taken = take(timers)

    async def take_over(other: Other) -> None:
        # Ours: it is due there as soon as the lease is over, and our commit comes too late.
        marker = queue.publish("y", TOPIC)
        await other.until_handled(1)
        assert other.handled[0][0] == marker
        outcome, late = timers.renew(taken, lease_seconds=0.001)
        assert outcome == Outcome.DONE
        other.gate.clear()
        await until(lambda: timers.list_timers(TOPIC)[0].score > late.lease_score)
        assert timers.commit(late) == Outcome.REARMED
        other.gate.set()
        await other.until_handled(2)
        assert other.handled[1][0] == "b"
        await until(lambda: queue.get_pending_timers(TOPIC) == [])
        assert timers.commit(late) == Outcome.GONE

    with_the_other(redis_url, take_over)


def test_both_sides_share_the_work_on_a_topic(
    redis_url: str, database_url: str, queue: TimerQueue
) -> None:
    here: list[str] = []
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)

    @pipeline.timer(TOPIC, max_concurrent=1)
    def handle(message: TimerMessage) -> None:
        # Slow enough to leave something to the other side, which looks now and then.
        threading.Event().wait(0.005)
        here.append(message.timer_id)

    async def scenario(other: Other) -> None:
        expected = []
        for number in range(100):
            soon = timedelta(milliseconds=3 * number)
            expected.append(await queue.publish_async("x", TOPIC, activate_in=soon))
            expected.append(await other.broker.publish("x", TOPIC, activate_in=soon))
        await until(lambda: len(here) + len(other.handled) >= len(expected))
        await queue.close_async()
        there = [timer_id for timer_id, *_ in other.handled]
        assert sorted(here + there) == sorted(expected)
        assert here
        assert there
        await until(lambda: queue.get_pending_timers(TOPIC) == [])

    with working(pipeline, TOPIC):
        with_the_other(redis_url, scenario)
