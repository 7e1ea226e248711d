"""The hot log in Redis: positions once, in order, by the current term of one database only."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from penstock import TimerQueue
from penstock.errors import (
    LeaseLost,
    ServerUnavailable,
    ServerUnsuitable,
    SettingsError,
    StreamForeign,
)
from penstock.stores import redis_link, redis_log
from penstock.stores.hot_log import (
    Fence,
    HotLogClosed,
    HotLogGap,
    HotLogTermOver,
    HotLogUnusable,
)
from penstock.stores.redis_link import RedisLink, Script
from penstock.stores.redis_log import RedisLog
from penstock.stores.redis_refusals import TERM_MAX
from penstock.stores.redis_server import look_at
from penstock.stores.servers import EmbeddedValkey
from penstock.stores.timer_queue import RedisTimers
from tests.proxy import Proxy
from tests.publishing import hot_ids, ids, log_key
from tests.waiting import SOON_SECONDS, wait_until

HERE = "11111111-1111-1111-1111-111111111111"
DATABASE = "7001/5/00000001"
META_KEY = "penstock:{orders}:meta"
ELSEWHERE = "22222222-2222-2222-2222-222222222222"
LOG_NAME = "penstock-test-log"
MEBIBYTE = 1024 * 1024


@pytest.fixture
def log(redis_url: str) -> Iterator[RedisLog]:
    with closing(RedisLog(redis_url)) as opened:
        yield opened


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url)) as opened:
        yield opened


def bodies(first: int, last: int) -> list[bytes]:
    return [b"entry %d" % position for position in range(first, last + 1)]


def append(
    log: RedisLog,
    first: int,
    last: int,
    *,
    term: int = 1,
    origin: str = HERE,
    timeline: str = DATABASE,
) -> int:
    return log.append(
        "orders", Fence(origin, timeline, term), first=first, entries=bodies(first, last)
    )


def open_log(
    log: RedisLog,
    *,
    term: int = 1,
    base: int = 0,
    origin: str = HERE,
    timeline: str = DATABASE,
) -> int | None:
    return log.open("orders", Fence(origin, timeline, term), base=base)


def read_all(log: RedisLog, after: int = 0) -> list[tuple[int, bytes]]:
    return log.read("orders", after=after, count=1000, wait_seconds=0.0)


# ── appending ──────────────────────────────────────────────────────────────────────────────────


def test_what_is_appended_is_read_back_under_its_position(log: RedisLog) -> None:
    assert open_log(log) is None
    assert append(log, 1, 3) == 3
    assert read_all(log) == list(enumerate(bodies(1, 3), 1))
    assert read_all(log, after=2) == [(3, b"entry 3")]
    assert log.last("orders") == 3


def test_appending_the_same_batch_again_changes_nothing(log: RedisLog) -> None:
    open_log(log)
    append(log, 1, 5)
    assert append(log, 1, 5) == 5
    assert read_all(log) == list(enumerate(bodies(1, 5), 1))


def test_a_batch_that_overlaps_adds_only_what_is_missing(log: RedisLog) -> None:
    open_log(log)
    append(log, 1, 5)
    assert append(log, 3, 8) == 8
    assert read_all(log) == list(enumerate(bodies(1, 8), 1))


def test_a_batch_that_would_leave_a_gap_is_refused(log: RedisLog) -> None:
    open_log(log)
    append(log, 1, 5)
    with pytest.raises(HotLogGap) as refused:
        append(log, 7, 9)
    assert refused.value.last == 5
    assert log.last("orders") == 5


def test_an_empty_log_starts_at_its_base_and_nowhere_else(log: RedisLog) -> None:
    assert open_log(log, base=10) is None
    for first in (1, 10, 12):
        with pytest.raises(HotLogClosed):
            append(log, first, first)
    assert append(log, 11, 12) == 12


def test_a_flushed_log_has_to_be_opened_again(log: RedisLog, client: Any) -> None:
    open_log(log)
    append(log, 1, 5)
    client.flushdb()
    with pytest.raises(HotLogClosed):
        append(log, 6, 7)
    assert log.last("orders") is None


def test_a_log_that_went_back_to_an_older_term_has_to_be_opened_again(
    log: RedisLog, client: Any
) -> None:
    open_log(log, term=2)
    client.hset(META_KEY, "term", 1)
    with pytest.raises(HotLogClosed):
        append(log, 1, 1, term=2)


def test_a_tail_removed_by_hand_is_noticed_and_can_be_filled_again(
    log: RedisLog, client: Any
) -> None:
    open_log(log)
    append(log, 1, 5)
    client.xdel(log_key("orders"), "5-0")
    with pytest.raises(HotLogClosed):
        append(log, 5, 6)
    assert open_log(log, base=2) is None
    assert append(log, 3, 6) == 6


def test_a_log_trimmed_to_nothing_can_be_filled_again(log: RedisLog, client: Any) -> None:
    open_log(log)
    append(log, 1, 5)
    client.xtrim(log_key("orders"), maxlen=0, approximate=False)
    with pytest.raises(HotLogClosed):
        append(log, 6, 6)
    assert open_log(log, base=3) is None
    assert append(log, 4, 6) == 6


def test_a_log_is_kept_near_its_length_limit(redis_url: str) -> None:
    with closing(RedisLog(redis_url, length_max=100)) as log:
        open_log(log)
        append(log, 1, 1000)
        assert len(hot_ids(redis_url, "orders")) < 400
        assert log.last("orders") == 1000


def test_the_size_is_looked_at_first_of_all_and_after_a_part_of_what_fits(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, looked = 16 * 10_000, list[bool]()
    with closing(RedisLog(redis_url, bytes_max=limit)) as log:
        open_log(log)
        run = log._writer.run

        def spy(script: Script, keys: list[str], *arguments: Any) -> Any:
            looked.append(arguments[4] == limit)
            return run(script, keys, *arguments)

        monkeypatch.setattr(log._writer, "run", spy)
        # A predecessor may have written a lot.
        append(log, 1, 1)
        append(log, 2, 2)
        append(log, 3, 3)
        log.append("orders", Fence(HERE, DATABASE, 1), first=4, entries=[b"x" * 10_001])
        append(log, 5, 5)
    assert looked == [True, False, False, True, False]


def test_whoever_appends_is_seen_to_be_alive(log: RedisLog, client: Any) -> None:
    open_log(log)
    client.hset(META_KEY, "seen", 1)
    append(log, 1, 1)
    assert int(client.hget(META_KEY, "seen")) > 1


# ── terms and origins ──────────────────────────────────────────────────────────────────────────


def test_a_term_that_is_over_is_refused(log: RedisLog) -> None:
    open_log(log, term=1)
    append(log, 1, 3, term=1)
    assert open_log(log, term=2) == 3
    with pytest.raises(LeaseLost):
        append(log, 4, 5, term=1)
    with pytest.raises(LeaseLost):
        open_log(log, term=1)
    with pytest.raises(LeaseLost):
        log.restart("orders", Fence(HERE, DATABASE, 1), base=0)
    assert log.last("orders") == 3


def test_a_paused_publisher_that_wakes_late_does_no_harm(log: RedisLog, redis_url: str) -> None:
    open_log(log, term=1)
    append(log, 1, 5, term=1)
    with closing(RedisLog(redis_url)) as successor:
        open_log(successor, term=2)
        append(successor, 1, 10, term=2)
        with pytest.raises(LeaseLost):
            append(log, 1, 5, term=1)
        append(successor, 11, 12, term=2)
    assert hot_ids(redis_url, "orders") == ids(1, 12)


def test_another_database_may_not_write_the_log(log: RedisLog) -> None:
    open_log(log)
    append(log, 1, 2)
    with pytest.raises(StreamForeign, match=HERE):
        open_log(log, term=9, origin=ELSEWHERE)
    with pytest.raises(StreamForeign, match=HERE):
        append(log, 3, 3, term=9, origin=ELSEWHERE)
    assert log.last("orders") == 2


def test_a_former_timeline_may_not_write_whatever_its_term(log: RedisLog, client: Any) -> None:
    """A standby that took over may count terms again that were given out before."""
    heir = "7001/5/00000002"
    open_log(log, term=7)
    append(log, 1, 2, term=7)
    client.hset(META_KEY, "seen", 1)
    assert open_log(log, term=5, timeline=heir) == 2
    for term in (4, 5, 7):
        with pytest.raises(HotLogClosed):
            append(log, 3, 3, term=term)
        with pytest.raises(HotLogClosed):
            log.restart("orders", Fence(HERE, DATABASE, term), base=0)
        with pytest.raises(StreamForeign, match=heir):
            open_log(log, term=term)
    assert append(log, 3, 3, term=5, timeline=heir) == 3


def test_only_its_publisher_is_seen_to_be_alive(log: RedisLog, client: Any) -> None:
    open_log(log, term=2)
    client.hset(META_KEY, "seen", 1)
    for stranger in (None, Fence(HERE, DATABASE, 1), Fence(HERE, "7001/5/00000002", 2)):
        log.last("orders", stranger)
        assert client.hget(META_KEY, "seen") == b"1"
    log.last("orders", Fence(HERE, DATABASE, 2))
    assert int(client.hget(META_KEY, "seen")) > 1


def test_a_key_that_is_something_else_concerns_one_stream_only(log: RedisLog, client: Any) -> None:
    client.set(log_key("orders"), "mine")
    with pytest.raises(HotLogUnusable, match="orders"):
        open_log(log)
    assert log.open("other", Fence(HERE, DATABASE, 1), base=0) is None


def test_a_key_that_is_something_else_is_the_one_that_is_named(log: RedisLog, client: Any) -> None:
    client.lpush("penstock:{orders}:keys", "mine")
    with pytest.raises(HotLogUnusable, match=r"\{orders\}:keys at") as refused:
        log.read_keys("orders")
    assert ":log" not in str(refused.value)
    assert ":meta" not in str(refused.value)


@pytest.mark.parametrize("term", [5, TERM_MAX])
def test_a_later_term_is_told_as_it_is(log: RedisLog, client: Any, term: int) -> None:
    open_log(log)
    client.hset(META_KEY, "term", term)
    with pytest.raises(HotLogTermOver) as over:
        open_log(log)
    assert over.value.term == term


@pytest.mark.parametrize("term", [TERM_MAX + 1, 2**63 - 1, "abc", "inf", "1e30", "0x99"])
def test_a_term_that_no_publisher_had_makes_one_record_unusable(
    log: RedisLog, client: Any, term: int | str
) -> None:
    open_log(log)
    client.hset(META_KEY, "term", term)
    unreadable = r"delete the key penstock:\{orders\}:meta"
    with pytest.raises(HotLogUnusable, match=unreadable):
        append(log, 1, 1)
    with pytest.raises(HotLogUnusable, match=unreadable):
        open_log(log)
    client.delete(META_KEY)
    assert open_log(log) is None


def test_a_base_that_is_no_number_is_replaced(log: RedisLog, client: Any) -> None:
    open_log(log)
    client.hset(META_KEY, "base", "abc")
    assert log.last("orders", Fence(HERE, DATABASE, 1)) is None
    with pytest.raises(HotLogUnusable, match="meta"):
        append(log, 1, 1)
    open_log(log)
    assert append(log, 1, 1) == 1


# ── reading ────────────────────────────────────────────────────────────────────────────────────


def read_patiently(log: RedisLog) -> list[tuple[int, bytes]]:
    """As a lane does that has nothing else to do."""
    while not (found := log.read("orders", after=0, count=10, wait_seconds=30)):
        continue
    return found


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_read_waits_for_the_next_entry(redis_url: str, client: Any, protocol: int) -> None:
    found: list[tuple[int, bytes]] = []
    with (
        closing(RedisLog(f"{redis_url}?protocol={protocol}")) as log,
        closing(RedisLog(redis_url)) as writer,
    ):
        open_log(writer)
        reader = threading.Thread(target=lambda: found.extend(read_patiently(log)))
        reader.start()
        wait_until(
            lambda: any(c["cmd"] == "xread" and "b" in c["flags"] for c in client.client_list()),
            what="the reader blocks",
        )
        append(writer, 1, 1)
        reader.join(SOON_SECONDS)
    assert found == [(1, b"entry 1")]


def test_a_server_that_hangs_is_not_waited_for_again_and_again(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy.to(redis_url) as proxy, closing(RedisLog(proxy.url(redis_url))) as log:
        open_log(log)
        append(log, 1, 1)
        with proxy.black_hole():
            with pytest.raises(ServerUnavailable):
                log.read("orders", after=0, count=10, wait_seconds=0.0)
            # Whatever is asked from now on, the shortest of all limits holds.
            monkeypatch.setattr(RedisLink, "call", only_with(redis_log.PROBE_SECONDS))
            for ask in (
                lambda: log.read("orders", after=0, count=10, wait_seconds=30),
                lambda: append(log, 2, 2),
                log.check,
            ):
                with pytest.raises(ServerUnavailable):
                    ask()
            monkeypatch.undo()
        wait_until(lambda: answers(log), what="it answers again")
        assert append(log, 2, 2) == 2
        assert len(read_all(log)) == 2


def answers(log: RedisLog) -> bool:
    try:
        log.check()
    except ServerUnavailable:
        return False
    return True


def only_with(seconds: float) -> Callable[..., Any]:
    """Lets nobody wait for an answer for longer."""
    call = RedisLink.call

    def limited(link: RedisLink, *words: Any) -> Any:
        assert link._pool.connection_kwargs["socket_timeout"] == seconds
        return call(link, *words)

    return limited


def test_a_read_in_vain_returns_after_its_time(log: RedisLog) -> None:
    assert log.read("orders", after=0, count=10, wait_seconds=0.0) == []
    assert log.read("orders", after=0, count=10, wait_seconds=0.01) == []


def test_entries_that_are_not_ours_are_read_as_malformed(log: RedisLog, client: Any) -> None:
    open_log(log)
    append(log, 1, 1)
    client.xadd(log_key("orders"), {"e": "x"}, id="1-5")
    client.xadd(log_key("orders"), {"other": "x"}, id="2-0")
    client.xadd(log_key("orders"), {"e": "x", "other": "x"}, id="3-0")
    assert read_all(log) == [(1, b"entry 1"), (1, b""), (2, b""), (3, b"")]


def test_trimming_never_removes_the_last_entry(log: RedisLog) -> None:
    open_log(log)
    append(log, 1, 5)
    assert log.trim("orders", through=2) == 2
    assert log.trim("orders", through=99) == 2
    assert read_all(log) == [(5, b"entry 5")]
    assert log.trim("empty", through=9) == 0


# ── servers in trouble ─────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_server_out_of_memory_leaves_a_beginning_and_never_a_gap(tmp_path: Path) -> None:
    entries = [bytes(MEBIBYTE)] * 40
    with (
        EmbeddedValkey(tmp_path, settings={"maxmemory": "20mb"}) as valkey,
        closing(RedisLog(valkey.url)) as log,
        closing(redis.Redis.from_url(valkey.url)) as client,
    ):
        open_log(log)
        with pytest.raises(ServerUnavailable, match="Nothing was lost"):
            log.append("orders", Fence(HERE, DATABASE, 1), first=1, entries=entries)
        there = log.last("orders")
        assert there is not None
        assert 0 < there < 40
        client.config_set("maxmemory", "0")
        assert log.append("orders", Fence(HERE, DATABASE, 1), first=1, entries=entries) == 40
        assert hot_ids(valkey.url, "orders") == ids(1, 40)


@pytest.mark.slow
def test_a_restarted_server_is_used_again_and_learns_the_scripts_anew(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, persistence="none")
    with valkey, closing(RedisLog(valkey.url)) as log:
        open_log(log)
        append(log, 1, 2)
        valkey.crash()
        with pytest.raises(ServerUnavailable):
            append(log, 3, 3)
        valkey.start()
        with pytest.raises(HotLogClosed):
            append(log, 3, 3)
        assert open_log(log, base=2) is None
        assert append(log, 3, 3) == 3


@pytest.mark.slow
def test_a_replica_a_wrong_password_and_a_forbidden_key_are_told_apart(tmp_path: Path) -> None:
    with (
        EmbeddedValkey(tmp_path, persistence="none") as valkey,
        closing(RedisLog(valkey.url.replace("//", "//penstock:hush@"))) as log,
        closing(RedisLog(valkey.url.replace("//", "//penstock:canary@"))) as wrong,
        closing(RedisLog(valkey.url.replace("//", "//narrow:pw@"))) as narrow,
        closing(redis.Redis.from_url(valkey.url)) as client,
    ):
        client.acl_setuser(
            "penstock", enabled=True, passwords="+hush", keys=["*"], categories=["+@all"]
        )
        client.acl_setuser(
            "narrow", enabled=True, passwords="+pw", keys=["other:*"], categories=["+@all"]
        )
        open_log(log)
        with pytest.raises(ServerUnsuitable) as refused:
            open_log(wrong)
        assert "canary" not in str(refused.value)
        with pytest.raises(ServerUnsuitable, match="penstock:"):
            open_log(narrow)
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(ServerUnavailable):
            append(log, 1, 1)


def test_an_unreachable_server_is_named_without_its_password() -> None:
    log = RedisLog("redis://user:canary@127.0.0.1:1/0?password=canary")
    with pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1") as refused:
        log.last("orders")
    assert "canary" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:6379", "redis://canary@h:port", "http://canary@h"),
        *("redis://h/0?ssl_cert_reqs=none", "redis://h/0?canary=1", "redis://h?parser_class=x"),
        *("redis://h/0?protocol=9", "rediss://h/0?ssl_cert_reqs=canary", "unix:///s?canary=1"),
    ],
)
def test_an_address_that_cannot_be_used_is_a_settings_error(url: str) -> None:
    with pytest.raises(SettingsError, match="redis://") as refused:
        RedisLog(url)
    assert "canary" not in str(refused.value)
    with closing(RedisTimers(url)) as timers, pytest.raises(SettingsError, match="redis://"):
        timers.has_pending("mail", "t1")
    with pytest.raises(SettingsError, match="redis://"):
        asyncio.run(has_pending(url))


@pytest.mark.slow
def test_a_server_is_reached_through_its_socket_file(tmp_path: Path) -> None:
    path = tmp_path / "valkey.sock"
    with EmbeddedValkey(tmp_path, persistence="none", settings={"unixsocket": str(path)}):
        url = f"unix://{path}"
        with closing(RedisLog(url)) as log:
            open_log(log)
            assert append(log, 1, 1) == 1
        assert look_at(url).information["role"] == "master"
        with TimerQueue(url) as queue:
            queue.publish("x", "mail", timer_id="t1")
        assert asyncio.run(has_pending(url))


async def has_pending(url: str) -> bool:
    async with TimerQueue(url) as queue:
        return await queue.has_pending_async("mail", "t1")


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b":1\r\n", b"$-1\r\n", b"*1\r\n:1\r\n", b"HTTP/1.1\r\n"]
)
@pytest.mark.parametrize("option", ["", "?protocol=2"])
def test_whoever_answers_something_else_is_no_redis(answer: bytes, option: str) -> None:
    with talking_server(answer, option) as url, closing(RedisLog(url)) as log:
        # Twice: the first time must not leave a connection on which nobody was greeted.
        for ask in (lambda: open_log(log), lambda: read_all(log)) * 2:
            with pytest.raises(ServerUnsuitable, match="like Redis"):
                ask()
        with pytest.raises(ServerUnsuitable):
            look_at(url)
        if option:
            return
        with closing(RedisTimers(url)) as timers, pytest.raises(ServerUnsuitable):
            timers.claim("mail", count=1, lease_seconds=3)


@pytest.mark.slow
def test_a_stream_on_another_node_of_a_cluster_is_the_only_one_without_a_log(
    cluster_urls: tuple[str, str],
) -> None:
    first, second = (closing(RedisLog(url)) for url in cluster_urls)
    with first as log, second as other:
        fence = Fence(HERE, DATABASE, 1)
        # By their slots: `orders` is in the upper half, `a` is not.
        here, there = sorted(("orders", "a"), key=lambda name: key_slot(log_key(name).encode()))
        assert log.open(here, fence, base=0) is None
        with pytest.raises(HotLogUnusable, match="cluster"):
            log.open(there, fence, base=0)
        assert other.open(there, fence, base=0) is None


def is_whole(client: Any) -> bool:
    found = client.execute_command("CLUSTER INFO")
    return (found["cluster_state"], found["cluster_slots_ok"]) == ("ok", "16384")


@pytest.fixture
def cluster_urls(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two nodes, with half of the slots each."""
    settings = {"cluster-enabled": "yes"}
    with (
        EmbeddedValkey(tmp_path / "1", persistence="none", settings=settings) as first,
        EmbeddedValkey(tmp_path / "2", persistence="none", settings=settings) as second,
        closing(redis.Redis.from_url(first.url)) as opened,
        closing(redis.Redis.from_url(second.url)) as other,
    ):
        clients: list[Any] = [opened, other]
        clients[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
        clients[1].execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", second.port)
        wait_until(lambda: all(map(is_whole, clients)), what="both know all slots")
        yield first.url, second.url


def test_a_server_that_is_too_old_is_named_with_its_version() -> None:
    with (
        fake_server(b"redis_version:5.0.7\r\n") as (url, _),
        closing(RedisLog(url)) as log,
        pytest.raises(ServerUnsuitable, match=r"5\.0\.7"),
    ):
        open_log(log)


def test_a_command_whose_reply_is_cut_is_not_repeated() -> None:
    with (
        fake_server(b"redis_version:7.0.0\r\n") as (url, commands),
        closing(RedisLog(url)) as log,
        pytest.raises(ServerUnavailable),
    ):
        open_log(log)
    assert commands.count(b"EVALSHA") == 1


# ── connections that are kept ──────────────────────────────────────────────────────────────────


@pytest.fixture
def named_log(redis_url: str) -> Iterator[RedisLog]:
    """A log whose connections can be told from all others of the server."""
    with closing(RedisLog(f"{redis_url}?client_name={LOG_NAME}")) as opened:
        yield opened


def connections(client: Any) -> list[dict[str, str]]:
    return [found for found in client.client_list() if found["name"] == LOG_NAME]


def kill_connections(client: Any) -> None:
    for found in connections(client):
        client.client_kill_filter(_id=found["id"])


def test_scripts_that_the_server_forgot_are_told_again(log: RedisLog, client: Any) -> None:
    open_log(log)
    append(log, 1, 2)
    client.script_flush()
    assert append(log, 3, 4) == 4
    assert read_all(log) == list(enumerate(bodies(1, 4), 1))


def test_a_connection_that_was_closed_while_it_rested_is_replaced(
    named_log: RedisLog, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_log(named_log)
    monkeypatch.setattr(redis_link, "REST_SECONDS_MAX", 0.0)
    for position in (1, 2):
        append(named_log, position, position)
        assert read_all(named_log, after=position - 1) == [(position, b"entry %d" % position)]
        kill_connections(client)
    assert named_log.last("orders") == 2


def test_after_an_error_the_next_command_has_a_new_connection(
    named_log: RedisLog, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_link, "REST_SECONDS_MAX", SOON_SECONDS)
    open_log(named_log)
    kill_connections(client)
    with pytest.raises(ServerUnavailable):
        append(named_log, 1, 1)
    assert append(named_log, 1, 1) == 1


def test_a_reply_that_nobody_waited_for_is_not_taken_for_the_next_ones(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with closing(RedisLink(client)) as link:
        with monkeypatch.context() as patched:
            patched.setattr(redis.Connection, "read_response", interrupted)
            with pytest.raises(KeyboardInterrupt):
                link.call("ECHO", "first")
        assert link.call("ECHO", "second") == b"second"


def test_several_threads_wait_for_entries_each_on_its_own_connection(
    named_log: RedisLog, client: Any
) -> None:
    open_log(named_log)
    found: list[list[tuple[int, bytes]]] = []
    readers = [
        threading.Thread(target=lambda: found.append(read_patiently(named_log))) for _ in range(3)
    ]
    for reader in readers:
        reader.start()
    wait_until(
        lambda: sum("b" in found["flags"] for found in connections(client)) == 3,
        what="all of them block",
    )
    append(named_log, 1, 1)
    for reader in readers:
        reader.join(SOON_SECONDS)
    assert found == [[(1, b"entry 1")]] * 3


def test_a_closed_log_leaves_no_connection_and_can_be_used_again(
    named_log: RedisLog, client: Any
) -> None:
    open_log(named_log)
    append(named_log, 1, 1)
    read_all(named_log)
    assert connections(client)
    named_log.close()
    wait_until(lambda: not connections(client), what="its connections are gone")
    assert read_all(named_log) == [(1, b"entry 1")]
    assert append(named_log, 2, 2) == 2


@contextmanager
def fake_server(server_lines: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that tells its version, agrees to any greeting, and hangs up on scripts."""
    commands: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while line := self.rfile.readline():
                words = [self._word() for _ in range(int(line[1:]))]
                commands.append(words[0].upper())
                if words[0].upper() == b"EVALSHA":
                    return
                if words[0].upper() == b"INFO":
                    self.wfile.write(b"$%d\r\n%s\r\n" % (len(server_lines), server_lines))
                elif words[0].upper() == b"HELLO":
                    self.wfile.write(b"-ERR unknown command\r\n")
                else:
                    self.wfile.write(b"+OK\r\n")

        def _word(self) -> bytes:
            size = int(self.rfile.readline()[1:])
            return self.rfile.read(size + 2)[:size]

    with serving(Handler) as port:
        yield f"redis://127.0.0.1:{port}?protocol=2", commands


@contextmanager
def talking_server(answer: bytes, option: str) -> Iterator[str]:
    """A server that says the same to everything."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(65536):
                self.request.sendall(answer)

    with serving(Handler) as port:
        yield f"redis://127.0.0.1:{port}/0{option}"


@contextmanager
def serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    """A server in threads of its own. Gives its port."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()


def test_a_read_that_somebody_breaks_off_is_tried_again(log: RedisLog, client: Any) -> None:
    """As a server does that becomes a replica, to whoever waits."""

    def read() -> None:
        while not log.read("orders", after=0, count=1, wait_seconds=1.0):
            pass

    with ThreadPoolExecutor(1) as pool:

        def is_broken_off() -> bool:
            waiting = [each["id"] for each in client.client_list() if each["cmd"] == "xread"]
            return any(client.client_unblock(number, error=True) for number in waiting)

        reading = pool.submit(read)
        wait_until(is_broken_off, what="it waits, and no longer")
        with pytest.raises(ServerUnavailable, match="accepts nothing for now"):
            reading.result(SOON_SECONDS)
    assert log.read("orders", after=0, count=1, wait_seconds=0.0) == []
