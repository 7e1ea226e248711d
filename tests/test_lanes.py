"""Lanes: keys stay in order while their consumer is split, shared out, and split anew."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest

from penstock.core.lanes import LaneView, fair_share, lane_of, lanes_for
from penstock.core.progress import AGAIN
from penstock.pipeline import window as windows
from penstock.pipeline.reader import TierReader
from penstock.stores.control_connection import ControlConnection
from penstock.stores.warm_tier import OwnWarmTier
from penstock.telemetry import signals
from tests.bench_of_one import Workbench
from tests.lanes_at_work import CONSUMER, Counted, Shop, insert
from tests.publishing import told
from tests.waiting import SOON_SECONDS, wait_until

IN_A_CENTURY = 100 * 365 * 24


@pytest.fixture
def shop(database_url: str, redis_url: str) -> Iterator[Shop]:
    with closing(Shop(database_url, redis_url)) as shop:
        yield shop


# ── shares ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("lanes", [1, 2, 7, 16])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 20])
def test_fair_shares_give_out_every_lane_once(lanes: int, workers: int) -> None:
    held = {f"worker {index}": index % 3 for index in range(workers)}
    shares = [fair_share(lanes, held, worker) for worker in held]
    assert sum(shares) == lanes
    assert max(shares) - min(shares) <= 1


def test_a_lane_does_not_move_without_need() -> None:
    view = LaneView(1, 1, False, frozenset({"a", "b"}), ("b",))
    assert lanes_for(view, "b") == {0}
    assert lanes_for(view, "a") == set()


def test_a_worker_gives_up_what_is_over_its_share() -> None:
    view = LaneView(4, 1, False, frozenset({"a", "b"}), ("a", "a", "a", "a"))
    assert lanes_for(view, "a") == {0, 1}
    assert lanes_for(view, "b") == set()


def test_nobody_takes_a_lane_of_a_paused_consumer() -> None:
    assert lanes_for(LaneView(2, 1, True, frozenset({"a"}), ("a", None)), "a") == set()


def test_lanes_of_a_dead_worker_are_taken_by_the_living() -> None:
    view = LaneView(3, 1, False, frozenset({"a"}), ("a", "dead", None))
    assert lanes_for(view, "a") == {0, 2}, "a lane whose lease still runs is left alone"


def test_a_key_has_the_same_lane_on_every_host_for_ever() -> None:
    assert [lane_of(f"key {n}", "", 8) for n in range(6)] == [6, 3, 0, 1, 0, 4]
    assert lane_of(None, "018f0000-0000-7000-8000-000000000001", 1) == 0


def test_keys_are_spread_over_the_lanes() -> None:
    count = Counter(lane_of(f"key {n}", "", 16) for n in range(16_000))
    assert min(count.values()) > 800


# ── handling ───────────────────────────────────────────────────────────────────────────────────


def test_one_process_serves_all_lanes_and_keeps_every_key_in_order(shop: Shop) -> None:
    shop.send(600, keys=40)
    with shop.publisher(), shop.worker(lanes=8):
        shop.wait_until_handled()
        shop.send(600, keys=40)
        shop.wait_until_handled()
    assert {
        outcome
        for (outcome,) in shop.connection.execute(
            "SELECT DISTINCT outcome FROM events.processed_event"
        )
    } == {"handled"}


def test_lanes_that_have_nothing_to_do_move_on(shop: Shop) -> None:
    shop.send(50, keys=1)
    with shop.publisher(), shop.worker(lanes=4):
        shop.wait_until_handled()
        wait_until(lambda: shop.checkpoints() == [50] * 4, what=lambda: str(shop.checkpoints()))


def test_a_lane_that_only_passes_events_of_others_writes_down_how_far_it_is(
    database_url: str, redis_url: str
) -> None:
    lanes = 3
    assert 0 not in {lane_of(f"k{n}", "", lanes) for n in range(3)}
    with closing(Workbench(database_url, redis_url)) as bench:
        bench.send(50)
        bench.publish()
        lane = bench.consumer(insert, lanes=lanes, batch_size=5)
        assert lane.step() == AGAIN
        assert 0 < bench.checkpoint("test.consumer/1/0") < 50, "there is more to pass"


def test_a_lane_far_behind_reads_for_itself(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "KEPT_ENTRIES_MAX", 20)
    release = threading.Event()

    def handle(event: Counted, cursor: psycopg.Cursor[Any]) -> None:
        if event.key == "key 0":
            release.wait(SOON_SECONDS)
        insert(event, cursor)

    slow = lane_of("key 0", "", 4)
    others = [f"key {n}" for n in range(10) if lane_of(f"key {n}", "", 4) != slow]
    with shop.publisher(), shop.worker(lanes=4, handler=handle, batch_size=5):
        shop.send(400, keys=10)
        wait_until(
            lambda: all(len(shop.effects().get(key, [])) == 40 for key in others),
            what="the other lanes are done",
        )
        release.set()
        shop.wait_until_handled()


def test_a_lane_that_is_behind_does_not_wait_for_one_that_is_not(
    database_url: str, redis_url: str
) -> None:
    with closing(Workbench(database_url, redis_url)) as bench:
        bench.send(20)
        bench.publish()
        hot_log = bench.hot_log()
        control = ControlConnection(database_url, "penstock test", statement_seconds=10.0)
        warm_tier = OwnWarmTier(bench.settings, "orders", control.get)
        readers = [TierReader("test.consumer", "orders", hot_log, warm_tier) for _ in range(2)]
        window = windows.StreamWindow(2, 10, ahead=readers[0], behind=readers[1])
        ahead = threading.Thread(
            target=lambda: window.read(0, after=20, count=10, wait_seconds=SOON_SECONDS)
        )
        ahead.start()
        wait_until(lambda: window._is_reading, what="one lane waits for new entries")
        scan = window.read(1, after=0, count=10, wait_seconds=0.0)
        assert scan.entries
        bench.send(1)
        bench.publish()
        ahead.join(SOON_SECONDS)
        assert not ahead.is_alive()
        hot_log.close()
        control.close()


def test_async_handlers_have_lanes_too(shop: Shop) -> None:
    async def handle(event: Counted, connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(
            "INSERT INTO effect (key, number) VALUES (%s, %s)", (event.key, event.number)
        )

    shop.send(200, keys=20)
    with shop.publisher(), shop.worker(lanes=4, handler=handle):
        shop.wait_until_handled()


def test_lanes_work_without_redis(database_url: str) -> None:
    with closing(Shop(database_url, None)) as shop:
        shop.send(200, keys=20)
        with shop.publisher(), shop.worker(lanes=4):
            shop.wait_until_handled()
            shop.send(200, keys=20)
            shop.wait_until_handled()


# ── sharing ────────────────────────────────────────────────────────────────────────────────────


def test_lanes_are_shared_by_all_workers_as_they_come_and_go(shop: Shop) -> None:
    with shop.publisher(), shop.worker(lanes=8) as first, ExitStack() as others:
        shop.wait_for_shares(8)
        others.enter_context(shop.worker(lanes=8))
        shop.wait_for_shares(4, 4)
        others.enter_context(shop.worker(lanes=8))
        shop.wait_for_shares(3, 3, 2)
        shop.send(400, keys=40)
        first.set()
        shop.wait_for_shares(4, 4)
        shop.send(400, keys=40)
        shop.wait_until_handled()


def test_a_paused_consumer_gives_its_lanes_back_until_it_is_resumed(shop: Shop) -> None:
    with (
        told(signals.ConsumerPaused, signals.ConsumerResumed) as heard,
        shop.publisher(),
        shop.worker(lanes=2),
    ):
        shop.wait_for_shares(2)
        shop.connection.execute("UPDATE events.consumer SET paused_at = now()")
        shop.wait_for_shares(0)
        shop.send(20)
        shop.connection.execute("UPDATE events.consumer SET paused_at = NULL")
        shop.wait_until_handled()
    assert heard == [signals.ConsumerPaused(CONSUMER), signals.ConsumerResumed(CONSUMER)]


def test_a_process_has_one_connection_for_each_lane_and_one_besides(shop: Shop) -> None:
    """So 40 consumers, a process each, have 80; the publisher and its supervisor add a handful."""
    shop.send(20)
    with shop.publisher():
        shop.wait_until_published()
    with shop.worker(lanes=3):
        shop.wait_until_handled()
        opened = shop.connection.execute(
            "SELECT application_name, count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'penstock %' GROUP BY 1"
        ).fetchall()
    assert dict(opened) == {"penstock control": 1, f"penstock {CONSUMER}": 3}


def test_without_redis_all_consumers_of_a_process_listen_on_one_connection(
    database_url: str,
) -> None:
    with closing(Shop(database_url, None)) as shop, shop.publisher(), shop.worker(lanes=3):
        shop.send(20)
        shop.wait_until_handled()

        def listening() -> int:
            ((count,),) = shop.connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'penstock reader'"
            ).fetchall()
            return int(count)

        wait_until(lambda: listening() > 0, what="an idle lane listens")
        shop.send(20)
        shop.wait_until_handled()
        assert listening() == 1


# ── another number of lanes ────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_the_number_of_lanes_changes_under_load_and_every_event_is_handled_once(
    shop: Shop,
) -> None:
    with shop.publisher(), ExitStack() as workers:
        for deploy, lanes in enumerate((2, 5, 1, 16, 3), start=1):
            shop.send(500, keys=40)
            workers.enter_context(shop.worker(lanes=lanes, deploy=deploy))
            shop.wait_for_lanes(lanes)
        shop.send(500, keys=40)
        shop.wait_until_handled()
        assert shop.view().epoch == 5
        wait_until(lambda: sum(shop.shares()) == 3, what="all lanes are held")


def test_a_worker_of_an_earlier_deploy_does_not_change_the_lanes_back(shop: Shop) -> None:
    with shop.worker(lanes=4, deploy=2):
        shop.wait_for_shares(4)
        with shop.worker(lanes=2, deploy=1):
            shop.wait_for_shares(2, 2)
    assert (shop.view().lanes, shop.view().epoch) == (4, 1)


def test_who_needs_the_order_of_the_whole_stream_has_one_lane_whoever_was_deployed_later(
    shop: Shop,
) -> None:
    with shop.worker(lanes=3, deploy=2), shop.publisher():
        shop.wait_for_shares(3)
        with shop.worker(order="stream", deploy=1):
            shop.wait_for_lanes(1)
            with shop.worker(lanes=2, deploy=IN_A_CENTURY):
                wait_until(
                    lambda: (shop.view().lanes, shop.view().epoch) == (1, 4),
                    what="there is one lane again",
                )
                shop.send(20)
                shop.wait_until_handled()


def test_a_worker_of_a_former_epoch_that_hangs_does_not_hold_up_the_next(shop: Shop) -> None:
    hanging, release = threading.Event(), threading.Event()

    def hang_once(event: Counted, connection: psycopg.Connection[Any]) -> None:
        with connection.cursor() as cursor:
            insert(event, cursor)
        if not hanging.is_set():
            hanging.set()
            release.wait(SOON_SECONDS)

    shop.send(30)
    with shop.publisher(), shop.worker(lanes=1, handler=hang_once):
        assert hanging.wait(SOON_SECONDS)
        with told(signals.PredecessorEnded) as ended, shop.worker(lanes=3, deploy=2):
            shop.wait_until_handled()
            assert ended
            release.set()
    assert shop.effects() == shop.expected()


def test_whoever_takes_a_lane_leaves_the_others_of_its_epoch_alone(shop: Shop) -> None:
    in_hand, release = threading.Event(), threading.Event()

    def take_time(event: Counted, connection: psycopg.Connection[Any]) -> None:
        with connection.cursor() as cursor:
            insert(event, cursor)
        # Whoever has two lanes gives the second one away.
        if lane_of(event.key, "", 2) == 0 and not in_hand.is_set():
            in_hand.set()
            release.wait(SOON_SECONDS)

    with shop.worker(lanes=2):
        shop.wait_for_shares(2)
    shop.connection.execute("SELECT events.begin_epoch(%s, 2)", (CONSUMER,))
    shop.send(30)
    with (
        told(signals.PredecessorEnded) as ended,
        shop.publisher(),
        shop.worker(lanes=2, handler=take_time),
    ):
        assert in_hand.wait(SOON_SECONDS)
        with shop.worker(lanes=2):
            shop.wait_for_shares(1, 1)
            release.set()
            shop.wait_until_handled()
    assert ended == []


def test_a_crash_is_remembered_over_a_change_of_lanes(shop: Shop) -> None:
    with shop.worker(lanes=2):
        shop.wait_for_shares(2)
    shop.connection.execute("UPDATE events.stream_lease SET clean = false WHERE lane = 1")
    shop.connection.execute("SELECT events.begin_epoch(%s, 3)", (CONSUMER,))
    cleans = shop.connection.execute(
        "SELECT clean FROM events.stream_lease WHERE role LIKE 'consumer:%'"
    ).fetchall()
    assert cleans == [(False,)] * 3


@pytest.mark.slow
def test_an_epoch_that_ended_while_a_worker_registered_does_not_come_back(shop: Shop) -> None:
    with shop.worker(lanes=2):
        shop.wait_for_shares(2)
    stop = threading.Event()

    def register(lanes: int) -> None:
        with psycopg.connect(shop.database_url, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute(
                    "SELECT events.agree_on_lanes(%s, %s, '-infinity')", (CONSUMER, lanes)
                )

    threads = [threading.Thread(target=register, args=(lanes,)) for lanes in (1, 2)]
    for thread in threads:
        thread.start()
    for turn in range(400):
        shop.connection.execute("SELECT events.begin_epoch(%s, %s)", (CONSUMER, 1 + turn % 3))
    stop.set()
    for thread in threads:
        thread.join()
    strays = shop.connection.execute(
        "SELECT l.role FROM events.stream_lease l, events.consumer c "
        "WHERE l.role LIKE 'consumer:%' AND l.epoch <> c.epoch"
    ).fetchall()
    assert strays == []
