"""The hot log is a cache that anybody may have touched: what is wrong there is read elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.core.events import StreamEvent
from penstock.core.lanes import lane_of
from penstock.core.wire import encode_entry
from penstock.ops.streams import rotate_key
from penstock.pipeline import publisher as publisher_module
from penstock.pipeline import reader as readers
from penstock.pipeline import trust
from penstock.pipeline.lane import BROWNOUT_POLL_SECONDS
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.redis_log import FIELD
from penstock.stores.servers import EmbeddedValkey
from penstock.stores.warm_tier import OwnWarmTier
from penstock.telemetry import signals
from tests.bench_of_one import Workbench, run_until_idle
from tests.failing import LATER, Rests, drive, effects, heard
from tests.publishing import hot_entries, hot_ids, ids, log_key, numbered
from tests.signing import OTHER_KEYS, keys_of
from tests.waiting import wait_until

META_KEY = "penstock:{orders}:meta"


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    with closing(Workbench(database_url, redis_url)) as opened:
        opened.connection.execute(
            "CREATE TABLE effect (serial bigint GENERATED ALWAYS AS IDENTITY, n bigint)"
        )
        yield opened


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url, protocol=2)) as opened:
        yield opened


def note(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.position,))


def published(bench: Workbench, count: int) -> list[tuple[int, str]]:
    bench.send(count)
    bench.publish()
    return numbered(bench.settings.database_url, "orders")


def put(client: Any, entries: dict[str, bytes]) -> None:
    """Let the hot log hold exactly this."""
    client.delete(log_key("orders"))
    for entry_id, raw in entries.items():
        client.xadd(log_key("orders"), {FIELD: raw}, id=entry_id)


# ── integrity ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("forgery", ["forged", "altered", "swapped", "replayed", "unsigned"])
def test_what_the_publisher_did_not_sign_for_its_place_is_read_from_the_outbox(
    bench: Workbench, client: Any, forgery: str
) -> None:
    rows = published(bench, 6)
    keys = keys_of(bench.settings.database_url)
    genuine = {p: encode_entry("orders", p, body, keys) for p, body in rows}
    wrong = dict(genuine)
    match forgery:
        case "forged":
            wrong[3] = encode_entry("orders", 3, rows[2][1].replace('"n": 3', '"n": 9'), OTHER_KEYS)
        case "altered":
            wrong[3] = genuine[3].replace(b'"n": 3', b'"n": 9')
        case "swapped":
            wrong[3], wrong[4] = genuine[4], genuine[3]
        case "replayed":
            wrong[3] = genuine[2]
        case "unsigned":
            wrong[3] = b"1 - -\n" + rows[2][1].encode()
    put(client, {f"{position}-0": raw for position, raw in wrong.items()})
    consumer = bench.consumer(note)
    with heard(signals.ForgeryFound, signals.GapFound) as found:
        run_until_idle(consumer)
    assert effects(bench) == [1, 2, 3, 4, 5, 6]
    kinds = [type(signal) for signal in found if signal.position == 3]
    unknown = forgery in ("forged", "unsigned")
    assert kinds == ([] if unknown else [signals.ForgeryFound]) + [signals.GapFound]


def test_an_entry_of_another_stream_is_not_taken_for_this_ones(
    bench: Workbench, client: Any
) -> None:
    rows = published(bench, 2)
    keys = keys_of(bench.settings.database_url)
    put(client, {"1-0": encode_entry("others", 1, rows[0][1], keys)})
    with heard(signals.ForgeryFound) as found:
        run_until_idle(bench.consumer(note))
    assert effects(bench) == [1, 2]
    assert len(found) == 1


def test_a_poisoned_id_neither_blocks_nor_busies_a_reader(bench: Workbench, client: Any) -> None:
    published(bench, 3)
    consumer = bench.consumer(note)
    run_until_idle(consumer)
    client.xadd(log_key("orders"), {FIELD: b"poison"}, id="1000000000000000-0")
    with heard(signals.GapFound) as gaps:
        run_until_idle(consumer)
        consumer.wait(threading.Event())
        run_until_idle(consumer)
    assert len(gaps) == 1
    assert consumer._intake.is_polling
    published(bench, 2)
    drive(consumer, lambda: len(effects(bench)) == 5)
    assert hot_ids(bench.settings.redis_url or "", "orders") == ids(4, 5)


def test_a_new_key_signs_at_once_and_readers_learn_it(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "KEYS_CHECK_SECONDS", 0.0)
    published(bench, 2)
    consumer = bench.consumer(note)
    run_until_idle(consumer)
    new_key = MacKeyTable().rotate(bench.connection)
    published(bench, 2)
    last = client.xrevrange(log_key("orders"), count=1)[0][1][FIELD]
    assert last.startswith(f"1 {new_key} ".encode())
    with heard(signals.GapFound) as gaps:
        drive(consumer, lambda: len(effects(bench)) == 4)
    assert gaps == []


def test_what_a_retired_key_signed_is_read_from_the_outbox(bench: Workbench) -> None:
    published(bench, 2)
    old = keys_of(bench.settings.database_url).key_id.decode()
    MacKeyTable().rotate(bench.connection)
    assert MacKeyTable().retire(bench.connection) == [old]
    with heard(signals.GapFound) as gaps:
        run_until_idle(bench.consumer(note))
    assert effects(bench) == [1, 2]
    assert [gap.position for gap in gaps] == [1]
    assert "unknown key" in gaps[0].reason


@pytest.mark.parametrize("is_at_rest", [False, True])
def test_a_reader_that_runs_trusts_a_retired_key_no_longer(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch, is_at_rest: bool
) -> None:
    """At rest it looks by itself, so that no event has to wait for that."""
    monkeypatch.setattr(readers, "HEAD_CHECK_SECONDS", 0.0 if is_at_rest else 600.0)
    monkeypatch.setattr(trust, "TRUSTED_SECONDS", 600.0 if is_at_rest else 0.0)

    def note_payload(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.payload["n"],))

    published(bench, 2)
    consumer = bench.consumer(note_payload)
    run_until_idle(consumer)
    leaked = keys_of(bench.settings.database_url)
    rotate_key(bench.connection, bench.settings, retire_old=True)
    run_until_idle(consumer)
    _, _, (_, body) = published(bench, 1)
    # Nothing that the new key has signed is ever met.
    put(client, {"3-0": encode_entry("orders", 3, body.replace('"n": 1', '"n": 9'), leaked)})
    with heard(signals.GapFound) as gaps:
        run_until_idle(consumer)
    assert effects(bench) == [1, 2, 1]
    assert ["unknown key" in gap.reason for gap in gaps] == [True]


# ── holes ──────────────────────────────────────────────────────────────────────────────────────


def lose_commits(bench: Workbench, after: int) -> None:
    """As if a standby had taken over that lacked the last commits."""
    bench.connection.execute("DELETE FROM events.outbox_event WHERE position > %s", (after,))
    bench.connection.execute(
        "UPDATE events.stream SET head = %s, published = least(published, %s)", (after, after)
    )


def hole_of(bench: Workbench) -> tuple[int, int]:
    row = bench.connection.execute("SELECT first, last FROM events.hole").fetchone()
    assert row is not None
    return int(row[0]), int(row[1])


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_log_ahead_of_postgres_leaves_a_hole_that_everybody_steps_over(
    bench: Workbench, lanes: int
) -> None:
    consumer = bench.consumer(note, lanes=lanes)
    published(bench, 10)
    lose_commits(bench, 6)
    with heard(signals.PositionsSkipped, signals.HotLogRebuilt) as told:
        published(bench, 2)
    first, last = hole_of(bench)
    assert first == 7
    assert last > 10
    assert [type(signal) for signal in told] == [signals.PositionsSkipped, signals.HotLogRebuilt]
    assert hot_ids(bench.settings.redis_url or "", "orders") == [
        *ids(1, 6),
        *ids(last, last + 2),
    ]
    drive(consumer, lambda: consumer._intake.cursor == last + 2)
    assert set(effects(bench)) <= {1, 2, 3, 4, 5, 6, last + 1, last + 2}
    if lanes == 1:
        assert effects(bench) == [1, 2, 3, 4, 5, 6, last + 1, last + 2]


def test_a_hole_is_passed_on_the_warm_tier_too(bench: Workbench, client: Any) -> None:
    published(bench, 4)
    lose_commits(bench, 2)
    published(bench, 1)
    _, last = hole_of(bench)
    client.flushdb()
    with heard(signals.HolePassed) as passed:
        drive(consumer := bench.consumer(note), lambda: consumer._intake.cursor == last + 1)
    assert effects(bench) == [1, 2, last + 1]
    assert passed == [signals.HolePassed("test.consumer", 3, last)]


def test_a_stream_that_waits_behind_a_hole_keeps_nobody_busy(bench: Workbench) -> None:
    published(bench, 4)
    lose_commits(bench, 2)
    published(bench, 1)
    _, last = hole_of(bench)

    def fail_behind_the_hole(event: StreamEvent[Any]) -> None:
        assert event.position <= last

    lane = bench.consumer(fail_behind_the_hole, retry=LATER, order="stream")
    drive(lane, lambda: bench.checkpoint() == last + 1)
    run_until_idle(lane)
    lane.wait(rests := Rests())
    assert len(rests.seconds) == 1


def test_a_log_is_filled_again_from_within_a_hole(bench: Workbench, client: Any) -> None:
    published(bench, 4)
    lose_commits(bench, 2)
    published(bench, 1)
    first, last = hole_of(bench)
    consumer = bench.consumer(note)
    run_until_idle(consumer)
    bench.connection.execute(
        "UPDATE events.stream_lease SET checkpoint = %s WHERE role LIKE 'consumer:%%'", (first,)
    )
    client.flushdb()
    published(bench, 1)
    assert hot_ids(bench.settings.redis_url or "", "orders") == ids(last, last + 2)


def test_positions_that_consumers_know_are_never_given_out_again(bench: Workbench) -> None:
    published(bench, 4)
    lose_commits(bench, 2)
    bench.connection.execute(
        "INSERT INTO events.remote_consumer (name, stream_name, checkpoint)"
        " VALUES ('elsewhere', 'orders', 50000000)"
    )
    published(bench, 1)
    assert hole_of(bench)[1] > 50_000_000


def test_after_a_failover_numbering_goes_on_behind_a_hole(bench: Workbench) -> None:
    published(bench, 2)
    bench.connection.execute("UPDATE events.stream SET timeline = '00000000'")
    with heard(signals.PositionsSkipped) as skipped:
        published(bench, 2)
        published(bench, 1)
    first, last = hole_of(bench)
    assert first == 3
    assert [type(signal) for signal in skipped] == [signals.PositionsSkipped]
    drive(consumer := bench.consumer(note), lambda: consumer._intake.cursor == last + 3)
    assert effects(bench) == [1, 2, last + 1, last + 2, last + 3]


# ── copies of the database ─────────────────────────────────────────────────────────────────────


def incarnation(client: Any) -> str:
    return str(client.hget(META_KEY, "incarnation").decode())


@pytest.mark.parametrize("kind", ["another cluster", "another database", "an older timeline"])
def test_a_copy_of_the_database_may_not_write_the_log(
    bench: Workbench, client: Any, kind: str
) -> None:
    published(bench, 2)
    cluster, database, timeline = incarnation(client).split("/")
    match kind:
        case "another cluster":
            cluster = "7"
        case "another database":
            database = "7"
        case "an older timeline":
            timeline = "000000FF"
    # The log is the other's: it is this database that is the copy.
    client.hset(META_KEY, "incarnation", f"{cluster}/{database}/{timeline}")
    client.hset(META_KEY, "seen", 1)
    bench.send(1)
    with heard(signals.StreamRefused) as refused, closing(bench.publisher()) as publisher:
        publisher.step()
        publisher.step()
    assert len(refused) == 1
    assert "copy" in refused[0].reason
    assert bench.rows("SELECT head FROM events.stream") == [2]


def test_the_log_of_a_copy_that_went_apart_is_filled_again(bench: Workbench, client: Any) -> None:
    consumer = bench.consumer(note)
    rows = published(bench, 3)
    keys = keys_of(bench.settings.database_url)
    theirs = {position: body.replace('"n": ', '"n": 9') for position, body in rows}
    put(client, {f"{p}-0": encode_entry("orders", p, body, keys) for p, body in theirs.items()})
    client.delete(META_KEY)
    with heard(signals.HotLogRebuilt) as rebuilt:
        rows = published(bench, 1)
    assert [signal.reason for signal in rebuilt] == ["its entry at 3 is not the one in PostgreSQL"]
    found = [fields[FIELD] for _, fields in hot_entries(bench.settings.redis_url or "", "orders")]
    assert found == [encode_entry("orders", p, body, keys) for p, body in rows]
    run_until_idle(consumer)
    assert effects(bench) == [1, 2, 3, 4]


def test_a_copy_of_the_database_does_not_handle_what_the_log_brings(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "TRUSTED_SECONDS", 0.0)
    published(bench, 3)
    # As a copy sees it that was made before the third was sent.
    bench.connection.execute("DELETE FROM events.outbox_event WHERE position = 3")
    bench.connection.execute("UPDATE events.stream SET head = 2, published = 2")
    theirs = incarnation(client)
    cluster, _, timeline = theirs.split("/")
    consumer = bench.consumer(note)
    client.hset(META_KEY, "incarnation", f"{cluster}/7/{timeline}")
    with heard(signals.GapFound) as gaps:
        run_until_idle(consumer)
    assert effects(bench) == [1, 2]
    assert {gap.reason for gap in gaps} == {
        "the hot log is written by another copy of this database"
    }
    client.hset(META_KEY, "incarnation", f"{cluster}/{theirs.split('/')[1]}/00000000")
    drive(consumer, lambda: len(effects(bench)) == 3)


def test_a_publisher_that_may_not_ask_for_the_cluster_is_no_copy(
    bench: Workbench, client: Any
) -> None:
    published(bench, 2)
    _, database, timeline = incarnation(client).split("/")
    client.hset(META_KEY, "incarnation", f"/{database}/{timeline}")
    with heard(signals.GapFound) as gaps:
        run_until_idle(bench.consumer(note))
    assert effects(bench) == [1, 2]
    assert gaps == []


def test_an_heir_waits_until_the_other_is_silent(bench: Workbench, client: Any) -> None:
    published(bench, 2)
    cluster, database, _ = incarnation(client).split("/")
    client.hset(META_KEY, "incarnation", f"{cluster}/{database}/00000000")
    bench.send(1)
    with heard(signals.StreamRefused) as refused, closing(bench.publisher()) as publisher:
        publisher.step()
    assert len(refused) == 1
    client.hset(META_KEY, "seen", 1)
    bench.publish()
    assert hot_ids(bench.settings.redis_url or "", "orders") == ids(1, 3)


# ── bounds ─────────────────────────────────────────────────────────────────────────────────────


def test_the_log_stays_below_its_bytes_with_a_consumer_that_is_stopped(
    database_url: str, redis_url: str, client: Any
) -> None:
    limit = 2 * 1024 * 1024
    with closing(Workbench(database_url, redis_url, hot_log_bytes_max=limit)) as bench:
        bench.consumer(note)
        largest = 0
        for _ in range(12):
            bench.connection.execute(
                "SELECT events.send('orders', 'placed', jsonb_build_object('n', repeat('x', 2000)))"
                "  FROM generate_series(1, 200)"
            )
            bench.publish()
            largest = max(largest, client.memory_usage(log_key("orders"), samples=0))
        assert limit / 3 < largest <= limit
        assert bench.rows("SELECT head - published FROM events.stream") == [0]


@pytest.mark.parametrize("trouble", ["full", pytest.param("read only", marks=pytest.mark.long)])
def test_a_log_that_takes_nothing_delays_nobody_and_raises_the_alarm(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(publisher_module, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(readers, "HEAD_CHECK_SECONDS", 0.02)
    with (
        EmbeddedValkey(tmp_path) as server,
        closing(redis.Redis.from_url(server.url)) as client,
        closing(Workbench(database_url, server.url, outbox_backlog_max=10)) as bench,
    ):
        bench.connection.execute(
            "CREATE TABLE effect (serial bigint GENERATED ALWAYS AS IDENTITY, n bigint)"
        )
        published(bench, 2)
        spoil, mend = {
            "full": (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0")),
            "read only": (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
        }[trouble]
        command: Any = client.execute_command
        command(*spoil)
        consumer = bench.consumer(note)
        with (
            closing(bench.publisher()) as publisher,
            heard(signals.PublishingDelayed, signals.ServerLost, signals.ServerFound) as told,
        ):
            for _ in range(5):
                bench.send(9)
                publisher.step()
                drive(consumer, lambda: consumer._intake.cursor == bench.head())
            assert effects(bench) == list(range(1, 48))
            delays = [s.behind for s in told if isinstance(s, signals.PublishingDelayed)]
            assert delays == [18, 36]
            command(*mend)
            wait_until(
                lambda: publisher.step().moved == 0 and not bench.unpublished(),
                what="the log is filled again",
            )
        assert hot_ids(server.url, "orders")[-1] == "47-0"


def test_a_failover_before_the_first_position_leaves_a_hole_too(bench: Workbench) -> None:
    bench.consumer(note)
    bench.connection.execute("UPDATE events.stream SET timeline = '00000000'")
    published(bench, 2)
    first, last = hole_of(bench)
    assert first == 1
    assert [position for position, _ in numbered(bench.settings.database_url, "orders")] == [
        last + 1,
        last + 2,
    ]


def test_entries_of_positions_that_were_lost_do_not_stay_in_the_log(
    bench: Workbench, client: Any
) -> None:
    """PostgreSQL failed over while Redis was away, so nobody saw how far the log was."""
    bench.consumer(note)
    published(bench, 5)
    stale = client.dump(log_key("orders"))
    lose_commits(bench, 2)
    client.delete(log_key("orders"))
    bench.connection.execute("UPDATE events.stream SET timeline = '00000000'")
    published(bench, 1)
    client.restore(log_key("orders"), 0, stale, replace=True)
    _, last = hole_of(bench)
    with heard(signals.HotLogRebuilt) as rebuilt:
        published(bench, 1)
    assert [signal.reason for signal in rebuilt] == ["it ends at 5, which lies in a hole"]
    assert hot_ids(bench.settings.redis_url or "", "orders") == [*ids(1, 2), *ids(last, last + 2)]


def test_far_behind_the_log_a_reader_asks_it_once(bench: Workbench, client: Any) -> None:
    published(bench, 40)
    client.xtrim(log_key("orders"), minid="31-0", approximate=False)
    with heard(signals.GapFound, signals.WarmTierRead) as told:
        run_until_idle(bench.consumer(note, batch_size=10))
    assert effects(bench) == list(range(1, 41))
    gaps = [signal for signal in told if isinstance(signal, signals.GapFound)]
    assert [(gap.position, gap.reason) for gap in gaps] == [(1, "the hot log goes on at 31")]
    assert len(told) == 4


def test_what_an_empty_log_has_lost_is_not_asked_for_batch_by_batch(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(bench, 40)
    client.delete(log_key("orders"))
    monkeypatch.setattr(readers, "HEAD_CHECK_SECONDS", 0.05)
    with heard(signals.GapFound, signals.WarmTierRead) as told:
        drive(bench.consumer(note, batch_size=10), lambda: len(effects(bench)) == 40)
    assert effects(bench) == list(range(1, 41))
    gaps = [signal for signal in told if isinstance(signal, signals.GapFound)]
    assert [(gap.position, gap.reason) for gap in gaps] == [(1, "it is not in the hot log")]


def test_a_lane_behind_the_others_rests_while_the_log_lacks_what_it_needs(
    bench: Workbench, client: Any
) -> None:
    consumer = bench.consumer(note, lanes=2)
    published(bench, 6)
    consumer._intake._outlook._window.read(1, after=5, count=1, wait_seconds=0.0)
    client.delete(log_key("orders"))
    rests = Rests()
    assert consumer.step().is_idle
    consumer.wait(rests)
    assert rests.seconds == [BROWNOUT_POLL_SECONDS]


def test_a_lane_handles_what_comes_before_a_position_that_is_nowhere(
    bench: Workbench, client: Any
) -> None:
    published(bench, 20)
    bench.connection.execute("DELETE FROM events.outbox_event WHERE position = 11")
    client.xdel(log_key("orders"), "11-0")
    # What the first read brings ends right before it.
    lane = bench.consumer(note, lanes=2, batch_size=10)
    with heard(signals.ConsumerBlocked) as blocked:
        drive(lane, lambda: bool(blocked))
    keys = bench.rows("SELECT key FROM events.outbox_event WHERE position < 11 ORDER BY position")
    assert effects(bench) == [n for n, key in enumerate(keys, 1) if lane_of(key, "", 2) == 0] != []
    assert [signal.position for signal in blocked] == [11]


def looks_into_the_outbox(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After which positions readers ask PostgreSQL from now on."""
    looks: list[int] = []
    read = OwnWarmTier.read

    def look(tier: OwnWarmTier, after: int, count: int) -> list[tuple[int, str]]:
        looks.append(after)
        return read(tier, after, count)

    monkeypatch.setattr(OwnWarmTier, "read", look)
    return looks


def test_while_the_log_is_away_a_lane_looks_into_the_outbox_once_between_two_rests(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, looks = bench.consumer(note), looks_into_the_outbox(monkeypatch)
    client.set(log_key("orders"), "something else")
    drive(consumer, lambda: consumer._intake.is_polling)
    looks.clear()
    rests = Rests()
    assert consumer.step().is_idle
    consumer.wait(rests)
    assert (len(looks), rests.seconds) == (1, [BROWNOUT_POLL_SECONDS])


def test_a_log_that_goes_on_lacking_what_comes_is_told_of_once(
    bench: Workbench, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "HEAD_CHECK_SECONDS", 0.05)
    consumer = bench.consumer(note)

    def handled(count: int, *, is_lost: bool) -> None:
        published(bench, 1)
        if is_lost:
            client.delete(log_key("orders"))
        drive(consumer, lambda: len(effects(bench)) == count)

    with heard(signals.GapFound) as gaps:
        for count in (1, 2, 3):
            handled(count, is_lost=True)
        assert [gap.position for gap in gaps] == [1]
        handled(4, is_lost=False)
        handled(5, is_lost=True)
        assert [gap.position for gap in gaps] == [1, 5]


def test_without_a_log_a_lane_looks_into_the_outbox_once_between_two_waits(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Workbench(database_url, None)) as bench:
        consumer, looks = bench.consumer(note), looks_into_the_outbox(monkeypatch)
        for _ in range(3):
            assert consumer.step().is_idle
            consumer.wait(threading.Event())
        assert looks == [0, 0, 0]
