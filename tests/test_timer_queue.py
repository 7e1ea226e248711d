"""Timers in Redis: due by the server's clock, leased by score, never lost to an old commit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
from redis import asyncio as redis_asyncio
from redis.crc import key_slot

from penstock import Pipeline, TimerQueue
from penstock.core.redis_acl import timer_line
from penstock.core.timer_envelope import unpack
from penstock.errors import (
    InvalidTimer,
    ServerUnavailable,
    ServerUnsuitable,
    SettingsError,
    UsageError,
)
from penstock.stores import timer_calls, timer_queue
from penstock.stores.servers import EmbeddedValkey
from penstock.stores.timer_queue import (
    ClaimedTimer,
    KeyNames,
    Outcome,
    RedisTimers,
    Redriven,
)
from tests.proxy import Proxy
from tests.waiting import wait_until

TOPIC = "mail"
LEASE = 30.0
TIMELINE = f"timers_timeline:{TOPIC}"
PAYLOADS = f"timers_payloads:{TOPIC}"
STATE = f"timers_state:{TOPIC}"
SOON = timedelta(milliseconds=30)
LATER = timedelta(hours=1)


@pytest.fixture
def timers(redis_url: str) -> Iterator[RedisTimers]:
    with closing(RedisTimers(redis_url)) as opened:
        yield opened


@pytest.fixture
def queue(redis_url: str) -> Iterator[TimerQueue]:
    with TimerQueue(redis_url) as opened:
        yield opened


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url)) as opened:
        yield opened


def arm(timers: RedisTimers, timer_id: str = "t1", payload: bytes = b"body") -> float:
    return timers.publish(TOPIC, timer_id, payload, delay_seconds=0)


def take(timers: RedisTimers, *, lease_seconds: float = LEASE) -> ClaimedTimer:
    """The one timer that is due."""
    (timer,) = timers.claim(TOPIC, count=10, lease_seconds=lease_seconds).timers
    return timer


def end_lease(client: Any, timers: RedisTimers, timer: ClaimedTimer) -> ClaimedTimer:
    """Let a lease be over now, as if its worker had been away for that long."""
    outcome, short = timers.renew(timer, lease_seconds=0.000_001)
    assert outcome == Outcome.DONE
    server_now = client.time()
    assert server_now[0] + server_now[1] / 1e6 > short.lease_score
    return short


def is_empty(client: Any) -> bool:
    """Whether nothing at all is left of any timer."""
    return not client.keys("*")


# ── claiming ──────────────────────────────────────────────────────────────────────────────────


def test_due_timers_are_taken_in_due_order_and_future_ones_left(timers: RedisTimers) -> None:
    for second in (3, 1, 2):
        timers.publish(TOPIC, f"past{second}", b"x", at_score=1000.0 + second)
    timers.publish(TOPIC, "future", b"x", delay_seconds=50)
    claims = timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert [timer.timer_id for timer in claims.timers] == ["past1", "past2", "past3"]
    assert claims.timers[0].due_score == 1001.0
    assert claims.timers[0].due_at == datetime.fromtimestamp(1001, UTC)
    assert claims.timers[0].attempt == 1
    assert claims.timers[0].lease_score == claims.now_score + LEASE
    # The next thing that happens is the end of the leases.
    assert claims.wait_seconds == pytest.approx(LEASE, abs=0.001)


def test_a_claim_says_when_the_next_timer_is_due(timers: RedisTimers) -> None:
    assert timers.claim(TOPIC, count=10, lease_seconds=LEASE).wait_seconds is None
    timers.publish(TOPIC, "future", b"x", delay_seconds=5)
    claims = timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert claims.timers == ()
    assert claims.wait_seconds == pytest.approx(5.0, abs=1.0)
    for number in range(3):
        arm(timers, f"t{number}")
    claims = timers.claim(TOPIC, count=2, lease_seconds=LEASE)
    assert len(claims.timers) == 2
    assert claims.wait_seconds == 0.0


def test_nothing_is_taken_twice_by_workers_that_claim_at_once(timers: RedisTimers) -> None:
    for number in range(200):
        arm(timers, f"t{number}")
    taken: list[str] = []

    def work() -> None:
        while claimed := timers.claim(TOPIC, count=7, lease_seconds=LEASE).timers:
            taken.extend(timer.timer_id for timer in claimed)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(taken) == sorted(f"t{number}" for number in range(200))


def test_a_claim_stops_at_a_size(timers: RedisTimers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_queue, "CLAIM_BYTES_MAX", 100)
    for number in range(3):
        arm(timers, f"t{number}", b"x" * 60)
    claims = timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert len(claims.timers) == 2
    assert claims.wait_seconds == 0.0


def test_a_timer_without_payload_is_removed_and_reported(timers: RedisTimers, client: Any) -> None:
    client.zadd(TIMELINE, {"orphan": 1})
    claims = timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert (claims.timers, claims.orphans) == ((), ("orphan",))
    assert is_empty(client)


def test_a_timer_whose_id_is_no_text_is_buried_under_one_that_is(
    timers: RedisTimers, client: Any
) -> None:
    client.zadd(TIMELINE, {b"\xff": 1})
    client.hset(PAYLOADS, b"\xff", b"body")
    assert timers.claim(TOPIC, count=10, lease_seconds=LEASE).unreadable == ("\\xff",)
    found = timers.find_dead(TOPIC, "\\xff")
    assert found is not None
    assert found[1] == b"body"
    assert timers.redrive(TOPIC, "\\xff") == Redriven.REDRIVEN
    assert take(timers).timer_id == "\\xff"


def test_an_arming_keeps_its_due_time_and_counts_its_attempts(
    timers: RedisTimers, client: Any
) -> None:
    due = arm(timers)
    first = take(timers)
    end_lease(client, timers, first)
    second = take(timers)
    assert (second.due_score, second.attempt) == (due, 2)
    assert timers.retry(second, delay_seconds=0) == Outcome.DONE
    third = take(timers)
    assert (third.due_score, third.attempt) == (due, 3)
    assert timers.retry(third, delay_seconds=-1, is_counted=False) == Outcome.DONE
    assert take(timers).attempt == 3


def test_a_timer_armed_anew_starts_from_one(timers: RedisTimers, client: Any) -> None:
    arm(timers)
    end_lease(client, timers, take(timers))
    due = arm(timers)
    assert (take(timers).due_score, take_state(client)) == (due, 1)
    # The other library arms without knowing of the state.
    client.zadd(TIMELINE, {"t1": 1234.5})
    again = take(timers)
    assert (again.due_score, again.attempt) == (1234.5, 1)


def take_state(client: Any) -> int:
    """The attempts that the state tells."""
    return int(client.hget(STATE, "t1").split()[2])


def test_state_that_the_other_library_leaves_behind_is_swept(
    timers: RedisTimers, client: Any
) -> None:
    for number in range(5):
        arm(timers, f"t{number}")
    timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    # Its commit.
    for number in range(4):
        client.zrem(TIMELINE, f"t{number}")
        client.hdel(PAYLOADS, f"t{number}")
    timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert client.hkeys(STATE) == [b"t4"]
    client.delete(TIMELINE, PAYLOADS)
    timers.claim(TOPIC, count=10, lease_seconds=LEASE)
    assert is_empty(client)


@pytest.mark.parametrize(("count", "lease_seconds"), [(-1, 30), (1001, 30), (1, 0), (1, 1e9)])
def test_a_claim_without_limits_is_refused(
    timers: RedisTimers, count: int, lease_seconds: float
) -> None:
    with pytest.raises(UsageError):
        timers.claim(TOPIC, count=count, lease_seconds=lease_seconds)


# ── settling ──────────────────────────────────────────────────────────────────────────────────


def test_a_handled_timer_leaves_nothing_behind(timers: RedisTimers, client: Any) -> None:
    arm(timers)
    assert timers.commit(take(timers)) == Outcome.DONE
    assert is_empty(client)


def test_a_timer_that_was_armed_anew_outlives_the_old_commit(
    timers: RedisTimers, client: Any
) -> None:
    arm(timers)
    old = take(timers)
    arm(timers, payload=b"new")
    assert timers.renew(old, lease_seconds=LEASE) == (Outcome.REARMED, old)
    assert timers.commit(old) == Outcome.REARMED
    assert timers.retry(old, delay_seconds=9) == Outcome.REARMED
    assert timers.bury(old, error_type="E", error_message="") == Outcome.REARMED
    new = take(timers)
    assert (new.payload, new.attempt) == (b"new", 1)
    # The same, as the other library arms: neither score nor payload need differ much.
    client.zadd(TIMELINE, {"t1": new.lease_score + 1})
    assert timers.commit(new) == Outcome.REARMED
    client.zadd(TIMELINE, {"t1": new.lease_score})
    client.hset(PAYLOADS, "t1", b"newer")
    assert timers.commit(new) == Outcome.REARMED
    assert client.hget(PAYLOADS, "t1") == b"newer"
    # Even the same message for the very time at which the lease ends is another arming.
    arm(timers, payload=b"newest")
    newest = take(timers)
    timers.publish(TOPIC, "t1", b"newest", at_score=newest.lease_score)
    assert timers.commit(newest) == Outcome.REARMED


def test_a_timer_that_another_worker_took_is_left_to_it(timers: RedisTimers, client: Any) -> None:
    arm(timers)
    slow = end_lease(client, timers, take(timers))
    quick = take(timers)
    assert timers.commit(slow) == Outcome.TAKEN
    assert timers.renew(slow, lease_seconds=LEASE)[0] == Outcome.TAKEN
    assert timers.commit(quick) == Outcome.DONE
    assert timers.commit(slow) == Outcome.GONE


def test_a_lease_that_ended_unnoticed_is_still_good(timers: RedisTimers, client: Any) -> None:
    arm(timers)
    late = end_lease(client, timers, take(timers))
    outcome, renewed = timers.renew(late, lease_seconds=LEASE)
    assert outcome == Outcome.DONE
    assert timers.commit(renewed) == Outcome.DONE


def test_a_cancelled_timer_is_gone_for_its_worker(timers: RedisTimers, client: Any) -> None:
    arm(timers)
    taken = take(timers)
    assert timers.cancel(TOPIC, "t1")
    assert timers.commit(taken) == Outcome.GONE
    assert timers.retry(taken, delay_seconds=0) == Outcome.GONE
    assert is_empty(client)


def test_a_buried_timer_can_be_looked_at_redriven_and_discarded(
    timers: RedisTimers, client: Any
) -> None:
    payload = b"line\nline\n\x00\xff"
    due = arm(timers, payload=payload)
    assert timers.bury(take(timers), error_type="ValueError", error_message="a\nb" * 2000) == "done"
    assert timers.counts(TOPIC) == (0, 1)
    (dead,) = timers.list_dead(TOPIC)
    assert (dead.timer_id, dead.error_type, dead.attempts) == ("t1", "ValueError", 1)
    assert dead.due_score == due < dead.buried_score
    assert len(dead.error_message) == timer_queue.ERROR_LENGTH_MAX
    assert timers.find_dead(TOPIC, "t1") == (dead, payload)
    assert timers.redrive(TOPIC, "t2") == Redriven.UNKNOWN
    arm(timers)
    assert timers.redrive(TOPIC, "t1") == Redriven.PENDING
    timers.cancel(TOPIC, "t1")
    assert timers.redrive(TOPIC, "t1") == Redriven.REDRIVEN
    again = take(timers)
    assert (again.payload, again.attempt) == (payload, 1)
    timers.bury(again, error_type="ValueError", error_message="again")
    assert timers.discard(TOPIC, "t1")
    assert not timers.discard(TOPIC, "t1")
    assert timers.find_dead(TOPIC, "t1") is None
    assert is_empty(client)


def test_a_listing_tells_pending_leased_and_retrying_apart(timers: RedisTimers) -> None:
    for timer_id in ("leased", "retrying", "given back"):
        arm(timers, timer_id)
    claimed = {
        timer.timer_id: timer for timer in timers.claim(TOPIC, count=9, lease_seconds=LEASE).timers
    }
    timers.retry(claimed["retrying"], delay_seconds=5)
    timers.retry(claimed["given back"], delay_seconds=1, is_counted=False)
    timers.publish(TOPIC, "pending", b"p", delay_seconds=99)
    listed = timers.list_timers(TOPIC)
    assert [(timer.timer_id, timer.state, timer.attempts) for timer in listed] == [
        ("given back", "pending", 0),
        ("retrying", "retrying", 1),
        ("leased", "leased", 1),
        ("pending", "pending", 0),
    ]
    assert listed[2].due_score == claimed["leased"].due_score
    assert timers.find(TOPIC, "pending") == (listed[3], b"p")
    assert timers.find(TOPIC, "nobody") is None
    assert len(timers.list_timers(TOPIC, limit=2)) == 2


def race(timers: RedisTimers, rounds: int) -> set[Outcome]:
    """Arm a timer anew at the very moment when its handler is done, many times."""
    outcomes = set()
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            arm(timers, payload=b"old %d" % number)
            old = take(timers)
            commit = pool.submit(timers.commit, old)
            anew = pool.submit(arm, timers, payload=b"new %d" % number)
            outcomes.add(commit.result())
            anew.result()
            new = take(timers)
            assert (new.payload, new.attempt) == (b"new %d" % number, 1)
            assert timers.commit(new) == Outcome.DONE
    return outcomes


def test_no_arming_is_lost_to_a_commit_at_the_same_moment(timers: RedisTimers, client: Any) -> None:
    race(timers, 100)
    assert is_empty(client)


@pytest.mark.long
def test_no_arming_is_lost_in_ten_thousand_races(timers: RedisTimers, client: Any) -> None:
    assert race(timers, 10_000) == {Outcome.DONE, Outcome.REARMED}
    assert is_empty(client)


# ── the queue ─────────────────────────────────────────────────────────────────────────────────


def test_a_published_timer_carries_message_and_headers(
    queue: TimerQueue, timers: RedisTimers
) -> None:
    made_up = queue.publish({"n": 1}, TOPIC, headers={"tenant": "eu"}, reply_to="answers")
    timer = take(timers)
    assert timer.timer_id == made_up
    envelope = unpack(timer.payload)
    assert envelope.value == {"n": 1}
    correlation_id = envelope.headers["correlation_id"]
    assert correlation_id not in ("", made_up)
    assert envelope.headers == {
        "correlation_id": correlation_id,
        "content-type": "application/json",
        "reply_to": "answers",
        "tenant": "eu",
    }


def test_a_delay_counts_from_the_servers_time(
    queue: TimerQueue, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A host whose clock is wrong does not matter, since it is never asked.
    monkeypatch.setattr("time.time", lambda: 0.0)
    queue.publish("x", TOPIC, timer_id="t1", activate_in=timedelta(seconds=90))
    seconds, microseconds = client.time()
    assert client.zscore(TIMELINE, "t1") - (seconds + microseconds / 1e6) == pytest.approx(
        90, abs=5
    )
    moment = datetime(2031, 5, 5, 12, tzinfo=UTC)
    queue.publish("x", TOPIC, timer_id="t1", activate_at=moment)
    assert client.zscore(TIMELINE, "t1") == moment.timestamp()


def test_timers_are_cancelled_found_and_listed(queue: TimerQueue, client: Any) -> None:
    for hours in (3, 1, 2):
        queue.publish("x", TOPIC, timer_id=f"t{hours}", activate_in=timedelta(hours=hours))
    assert queue.get_pending_timers(TOPIC) == ["t1", "t2", "t3"]
    in_between = datetime.fromtimestamp(client.time()[0], UTC) + timedelta(minutes=90)
    assert queue.get_pending_timers(TOPIC, before=in_between) == ["t1"]
    assert queue.has_pending(TOPIC, "t1")
    assert queue.cancel_timer(TOPIC, "t1")
    assert not queue.cancel_timer(TOPIC, "t1")
    assert not queue.has_pending(TOPIC, "t1")
    assert queue.cancel_all(TOPIC) == 2
    assert queue.cancel_all(TOPIC) == 0
    assert is_empty(client)


def test_a_long_listing_is_read_in_pages_and_tells_each_timer_once(
    queue: TimerQueue, timers: RedisTimers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_calls, "PAGE_COUNT", 10)
    # Many of them due at the very same time, over more than one page.
    expected = [f"t{number:03}" for number in range(60)]
    for number, timer_id in enumerate(expected):
        timers.publish(TOPIC, timer_id, b"x", at_score=float(min(number, 25) // 5))
    assert queue.get_pending_timers(TOPIC) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": ""},
        {"timer_id": "x" * 2000},
        {"activate_at": datetime(2030, 1, 1)},  # noqa: DTZ001
        {"activate_at": datetime(2030, 1, 1, tzinfo=UTC), "activate_in": SOON},
        {"activate_in": 5},
        {"headers": {"n": 1}},
        {"headers": {"correlation_id": "x"}},
        {"message": object()},
        {"message": "x" * 2_000_000},
    ],
)
def test_a_timer_that_cannot_work_is_refused(
    queue: TimerQueue, client: Any, wrong: dict[str, Any]
) -> None:
    arguments = {"message": "x", "topic": TOPIC, **wrong}
    with pytest.raises(InvalidTimer, match="Nothing was"):
        queue.publish(**arguments)
    assert is_empty(client)


def test_asyncio_has_the_same(redis_url: str, client: Any) -> None:
    async def work() -> None:
        async with TimerQueue(redis_url) as queue:
            published = await asyncio.gather(
                *(queue.publish_async(n, TOPIC, activate_in=LATER) for n in range(50))
            )
            assert sorted(await queue.get_pending_timers_async(TOPIC)) == sorted(published)
            assert await queue.has_pending_async(TOPIC, published[0])
            assert await queue.cancel_timer_async(TOPIC, published[0])
            assert not await queue.has_pending_async(TOPIC, published[0])
            assert await queue.cancel_all_async(TOPIC) == 49

    for _ in range(2):  # Each time in an event loop of its own.
        asyncio.run(work())
        client.script_flush()
    assert is_empty(client)


def test_a_given_client_serves_its_own_kind_and_stays_open(redis_url: str) -> None:
    async def in_a_loop() -> None:
        client = redis_asyncio.Redis.from_url(redis_url, decode_responses=True)
        async with TimerQueue(client) as queue:
            timer_id = await queue.publish_async(b"\xff", TOPIC)
            assert await queue.get_pending_timers_async(TOPIC) == [timer_id]
            with pytest.raises(UsageError, match="threads cannot use"):
                queue.publish("x", TOPIC)
        assert await client.ping()
        await client.aclose()

    asyncio.run(in_a_loop())
    with closing(redis.Redis.from_url(redis_url, decode_responses=True)) as client:
        with TimerQueue(client) as queue:
            assert len(queue.get_pending_timers(TOPIC)) == 1
            assert take(queue.store).payload.endswith(b"\xff")
            with pytest.raises(UsageError, match="asyncio cannot use"):
                asyncio.run(queue.publish_async("x", TOPIC))
        assert client.ping()


def test_a_command_whose_reply_is_lost_is_not_repeated(redis_url: str, queue: TimerQueue) -> None:
    async def in_a_loop(cut_off: TimerQueue) -> None:
        async with cut_off:
            await cut_off.has_pending_async(TOPIC, "t2")
            proxy.cut_reply_to(b"EVALSHA")
            with pytest.raises(ServerUnavailable, match="may have happened"):
                await cut_off.cancel_timer_async(TOPIC, "t2")

    for timer_id in ("t1", "t2", "t3"):
        queue.publish("x", TOPIC, timer_id=timer_id, activate_in=LATER)
    queue.cancel_timer(TOPIC, "t0")  # From now on the server knows the script.
    with Proxy.to(redis_url) as proxy:
        url = proxy.url(redis_url)
        with TimerQueue(url) as cut_off:
            cut_off.has_pending(TOPIC, "t1")
            proxy.cut_reply_to(b"EVALSHA")
            # Repeated, it would say that there is no such timer.
            with pytest.raises(ServerUnavailable, match="may have happened"):
                cut_off.cancel_timer(TOPIC, "t1")
        asyncio.run(in_a_loop(TimerQueue(url)))
        given = redis_asyncio.Redis.from_url(url)
        asyncio.run(in_a_loop(TimerQueue(given)))
        with (
            closing(redis.Redis.from_url(url)) as client,
            TimerQueue(client) as cut_off,
        ):
            cut_off.has_pending(TOPIC, "t3")
            proxy.cut_reply_to(b"EVALSHA")
            with pytest.raises(ServerUnavailable, match="may have happened"):
                cut_off.cancel_timer(TOPIC, "t3")
    assert queue.get_pending_timers(TOPIC) == []


def test_a_user_with_the_rights_of_timers_can_do_everything_with_them(
    redis_url: str, client: Any
) -> None:
    names = KeyNames(prefix="eu.", hash_tags=True)
    user = f"timers_{uuid4().hex}"
    client.execute_command(*timer_line(user, names).replace("…", "hush").split())
    try:
        parts = urlsplit(redis_url)
        address = f"{user}:hush@{parts.hostname}:{parts.port}"
        url = parts._replace(netloc=address).geturl()
        with closing(RedisTimers(url, names)) as timers, closing(timers.bell(TOPIC)) as bell:
            assert bell.wait(45)
            arm(timers)
            assert bell.wait(45)
            outcome, timer = timers.renew(take(timers), lease_seconds=LEASE)
            assert outcome == Outcome.DONE
            assert timers.retry(timer, delay_seconds=0) == Outcome.DONE
            timer = take(timers)
            assert timers.find(TOPIC, "t1") is not None
            assert len(timers.list_timers(TOPIC)) == 1
            assert timers.bury(timer, error_type="E", error_message="m") == Outcome.DONE
            assert len(timers.list_dead(TOPIC)) == 1
            assert timers.counts(TOPIC) == (0, 1)
            assert timers.redrive(TOPIC, "t1") == Redriven.REDRIVEN
            assert timers.commit(take(timers)) == Outcome.DONE
            client.hset(names.of(TOPIC).state, mapping={"left": "over", "and": "over"})
            arm(timers)
            assert take(timers).timer_id == "t1"
            assert not timers.discard(TOPIC, "t1")
            assert timers.cancel_all(TOPIC) == 1

        async def in_a_loop() -> None:
            client.script_flush()
            async with TimerQueue(url, prefix="eu.", hash_tags=True) as queue:
                await queue.publish_async("x", TOPIC, timer_id="t2")
                assert await queue.has_pending_async(TOPIC, "t2")

        asyncio.run(in_a_loop())
        with TimerQueue(url) as elsewhere, pytest.raises(ServerUnsuitable, match="refuses") as no:
            elsewhere.publish("x", TOPIC)
        assert "hush" not in str(no.value)
    finally:
        client.acl_deluser(user)


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with (
        TimerQueue("redis://user:canary@127.0.0.1:1/0", start_timeout=0) as queue,
        pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1") as refused,
    ):
        queue.publish("x", TOPIC)
    assert "canary" not in str(refused.value)
    with TimerQueue("http://canary@h") as queue, pytest.raises(SettingsError) as unusable:
        queue.publish("x", TOPIC)
    assert "canary" not in str(unusable.value)


def test_the_first_use_waits_for_the_server_and_no_longer(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path, persistence="none")
    with server:
        pass
    with TimerQueue(server.url, start_timeout=0) as queue:
        with pytest.raises(ServerUnavailable, match="cannot be reached"):
            queue.publish("x", TOPIC)
        with pytest.raises(ServerUnavailable, match="cannot be reached"):
            asyncio.run(queue.publish_async("x", TOPIC))
    with TimerQueue(server.url, start_timeout=30) as queue:
        published: list[str] = []
        waiting = threading.Thread(target=lambda: published.append(queue.publish("x", TOPIC)))
        waiting.start()
        with server:
            waiting.join()
            assert queue.get_pending_timers(TOPIC) == published


def test_a_key_of_another_kind_is_reported(queue: TimerQueue, client: Any) -> None:
    client.set(TIMELINE, "something else")
    with pytest.raises(ServerUnsuitable, match="wrong type"):
        queue.publish("x", TOPIC)


def test_where_the_state_cannot_be_touched_no_timer_changes(
    timers: RedisTimers, client: Any
) -> None:
    arm(timers)
    before = client.zscore(TIMELINE, "t1"), client.hgetall(PAYLOADS)
    client.set(STATE, "something else")
    for change in (
        lambda: timers.publish(TOPIC, "t1", b"new", delay_seconds=100),
        lambda: timers.publish(TOPIC, "t2", b"new", delay_seconds=100),
        lambda: timers.cancel(TOPIC, "t1"),
    ):
        with pytest.raises(ServerUnsuitable, match="wrong type") as refused:
            change()
        assert "Nothing was done" not in str(refused.value)
    assert (client.zscore(TIMELINE, "t1"), client.hgetall(PAYLOADS)) == before
    assert client.zcard(TIMELINE) == 1


def test_a_dead_timer_stays_dead_where_the_state_cannot_be_touched(
    timers: RedisTimers, client: Any
) -> None:
    arm(timers)
    timers.bury(take(timers), error_type="E", error_message="m")
    client.set(STATE, "something else")
    with pytest.raises(ServerUnsuitable):
        timers.redrive(TOPIC, "t1")
    assert timers.counts(TOPIC) == (0, 1)


def test_a_user_that_may_not_clear_the_state_arms_nothing(redis_url: str, client: Any) -> None:
    user = f"timers_{uuid4().hex}"
    line = timer_line(user, KeyNames()).replace("…", "hush").replace(" +hdel", "")
    client.execute_command(*line.split())
    try:
        parts = urlsplit(redis_url)
        url = parts._replace(netloc=f"{user}:hush@{parts.hostname}:{parts.port}").geturl()
        with TimerQueue(url) as narrow, pytest.raises(ServerUnsuitable, match="refuses"):
            narrow.publish("x", TOPIC)
        assert client.zcard(TIMELINE) == 0
    finally:
        client.acl_deluser(user)


def test_a_full_server_takes_no_timer_and_keeps_the_lease_of_another(
    timers: RedisTimers, client: Any
) -> None:
    arm(timers)
    taken = take(timers)
    client.config_set("maxmemory", "1mb")
    try:
        for timer_id in ("t1", "t2"):
            with pytest.raises(ServerUnavailable, match="Nothing was done"):
                arm(timers, timer_id, b"new")
    finally:
        client.config_set("maxmemory", "0")
    assert client.hgetall(PAYLOADS) == {b"t1": b"body"}
    assert timers.commit(taken) == Outcome.DONE


def test_the_pipeline_has_a_queue_by_its_settings(redis_url: str) -> None:
    database_url = "postgresql://nobody@127.0.0.1:1/none"
    pipeline = Pipeline(
        "shop", database_url=database_url, redis_url=None, timer_redis_url=redis_url
    )
    with pipeline.timers as queue:
        assert pipeline.timers is queue
        queue.publish("x", TOPIC, timer_id="t1", activate_in=LATER)
        assert queue.has_pending(TOPIC, "t1")
    apart = Pipeline("shop", database_url=database_url, redis_url=redis_url, timer_prefix="eu.")
    with apart.timers as queue:
        assert not queue.has_pending(TOPIC, "t1")
        assert queue.store.names.of(TOPIC).timeline == "timers_timeline:eu.mail"
    with pytest.raises(SettingsError, match="TIMER_REDIS_URL"):
        _ = Pipeline("shop", database_url=database_url, redis_url=None).timers


# ── waking ────────────────────────────────────────────────────────────────────────────────────


def test_an_earlier_timer_rings_the_bell_and_a_later_one_does_not(timers: RedisTimers) -> None:
    with closing(timers.bell(TOPIC)) as bell:
        assert bell.wait(45)  # It rings once it listens.
        assert bell.is_listening
        timers.publish(TOPIC, "t1", b"x", delay_seconds=100)
        assert bell.wait(45)
        timers.publish(TOPIC, "t2", b"x", delay_seconds=200)
        timers.publish("another", "t3", b"x", delay_seconds=1)
        assert not bell.wait(0.1)
        timers.publish(TOPIC, "t4", b"x", delay_seconds=50)
        assert bell.wait(45)
        bell.ring()
        assert bell.wait(45)


def test_a_timer_given_back_rings_the_bell(timers: RedisTimers) -> None:
    arm(timers)
    timer = take(timers)
    with closing(timers.bell(TOPIC)) as bell:
        assert bell.wait(45)
        assert timers.retry(timer, delay_seconds=0, is_counted=False) == Outcome.DONE
        assert bell.wait(45)


@pytest.mark.slow
def test_the_bell_finds_a_server_again(tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path, persistence="none") as server,
        closing(RedisTimers(server.url)) as timers,
        closing(timers.bell(TOPIC)) as bell,
    ):
        assert bell.wait(45)
        server.crash()
        wait_until(lambda: not bell.is_listening, what="the bell notices")
        server.start()
        wait_until(lambda: bell.is_listening, what="the bell listens again")
        assert bell.wait(45)
        timers.publish(TOPIC, "t1", b"x", delay_seconds=100)
        assert bell.wait(45)


# ── a cluster ─────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def cluster_url(tmp_path: Path) -> Iterator[str]:
    """A cluster of one node, with all slots."""
    settings = {"cluster-enabled": "yes"}
    with EmbeddedValkey(tmp_path, persistence="none", settings=settings) as server:
        with closing(redis.Redis.from_url(server.url)) as opened:
            client: Any = opened
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(
                lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok",
                what="the cluster is up",
            )
        yield server.url


@pytest.mark.long
def test_timers_work_on_a_cluster_with_hash_tags_and_say_so_without(cluster_url: str) -> None:
    with (
        closing(RedisTimers(cluster_url)) as timers,
        pytest.raises(ServerUnsuitable, match="hash_tags"),
    ):
        arm(timers)
    with closing(RedisTimers(cluster_url, KeyNames(hash_tags=True))) as timers:
        with closing(timers.bell(TOPIC)) as bell:
            assert bell.wait(45)
            due = arm(timers)
            assert bell.wait(45)
        timer = take(timers)
        assert timer.due_score == due
        outcome, timer = timers.renew(timer, lease_seconds=LEASE)
        assert outcome == Outcome.DONE
        assert timers.bury(timer, error_type="E", error_message="m") == Outcome.DONE
        assert timers.counts(TOPIC) == (0, 1)
        assert timers.redrive(TOPIC, "t1") == Redriven.REDRIVEN
        assert timers.commit(take(timers)) == Outcome.DONE
        assert not timers.has_pending(TOPIC, "t1")

    async def in_a_loop() -> None:
        async with TimerQueue(cluster_url, hash_tags=True) as queue:
            await queue.publish_async("x", TOPIC, timer_id="t2")
            assert await queue.get_pending_timers_async(TOPIC) == ["t2"]
            assert await queue.has_pending_async(TOPIC, "t2")
            assert await queue.cancel_timer_async(TOPIC, "t2")

    asyncio.run(in_a_loop())


def test_hash_tags_put_all_keys_of_a_topic_into_one_slot() -> None:
    keys = KeyNames(hash_tags=True, prefix="eu.").of(TOPIC)
    slots = {
        key_slot(name.encode()) for name in (keys.timeline, keys.payloads, keys.state, keys.dead)
    }
    assert len(slots) == 1
