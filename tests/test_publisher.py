"""The publisher: every committed event gets one position, and the hot log follows the books."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis

from penstock.core.leases import Lease, consumer_role
from penstock.core.settings import Settings
from penstock.core.wire import Entry, decode_body, decode_entry, encode_entry
from penstock.errors import LeaseLost
from penstock.pipeline import publisher as publisher_module
from penstock.stores.announcements import Announcements
from penstock.stores.hot_log import Fence, NoHotLog
from penstock.stores.leases import LeaseTable
from penstock.stores.outbox import Outbox
from penstock.stores.redis_log import RedisLog
from penstock.stores.servers import EmbeddedValkey
from penstock.stores.streams import Streams
from penstock.telemetry import signals
from tests.publishing import (
    Crash,
    Worker,
    ask,
    at,
    crash,
    hot_entries,
    hot_ids,
    ids,
    in_threads,
    insert,
    log_key,
    numbered,
    running,
    send,
    told,
    worker,
)
from tests.signing import keys_of, signed
from tests.waiting import SOON_SECONDS, wait_until


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    return Settings(
        database_url=database_url,
        redis_url=redis_url,
        publish_batch_size=50,
        # No renewal comes in between when a test ends a lease by hand.
        lease_seconds=300.0,
        lease_renew_seconds=100.0,
    )


@pytest.fixture(autouse=True)
def _every_step_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "SWEEP_SECONDS", 0.0)
    monkeypatch.setattr(publisher_module, "REFUSED_RETRY_SECONDS", 0.0)


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url)) as opened:
        yield opened


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as opened:
        yield opened


def positions(settings: Settings, stream_name: str = "orders") -> list[int]:
    return [position for position, _ in numbered(settings.database_url, stream_name)]


def assert_published(settings: Settings, count: int, stream_name: str = "orders") -> None:
    """Positions 1..count, each once, in order, with equal bytes on both tiers."""
    assert settings.redis_url is not None
    books = numbered(settings.database_url, stream_name)
    hot = hot_entries(settings.redis_url, stream_name)
    assert [position for position, _ in books] == list(range(1, count + 1))
    keys = keys_of(settings.database_url)
    assert hot == [
        (f"{position}-0", {b"e": encode_entry(stream_name, position, body, keys)})
        for position, body in books
    ]


def uuids_in_order(settings: Settings, stream_name: str = "orders") -> list[str]:
    return [
        decode_body(stream_name, position, body.encode()).event_uuid
        for position, body in numbered(settings.database_url, stream_name)
    ]


def state_of(settings: Settings, stream_name: str = "orders") -> tuple[int, int]:
    """Head and confirmed; zeros for a stream that no publisher has met yet."""
    rows = ask(
        settings.database_url,
        "SELECT head, published FROM events.stream WHERE name = %s",
        stream_name,
    )
    return rows[0] if rows else (0, 0)


def read_up_to(settings: Settings, checkpoint: int, stream_name: str = "orders") -> None:
    """Pretend that a consumer is there, as far as the books know."""
    with psycopg.connect(settings.database_url) as opened:
        role = consumer_role("shop.bill")
        LeaseTable().ensure(opened, stream_name, role, checkpoint=checkpoint)


# ── numbering ──────────────────────────────────────────────────────────────────────────────────


def test_events_are_published_in_the_order_they_were_sent(settings: Settings) -> None:
    sent = send(settings.database_url, "orders", 120)
    with worker(settings) as publisher:
        publisher.publish_all()
    assert_published(settings, 120)
    assert uuids_in_order(settings) == sent
    assert state_of(settings) == (120, 120)


def test_the_hot_log_holds_the_outboxs_very_bytes(settings: Settings) -> None:
    awkward = {"n\n\u2028\u0041": [1.5, 12345678901234567890, "é\t\\", None]}
    send(settings.database_url, "orders", key="a\nb", payload=awkward, metadata={"x": "\n"})
    with worker(settings) as publisher:
        publisher.publish_all()
    assert settings.redis_url is not None
    ((_, fields),) = hot_entries(settings.redis_url, "orders")
    with psycopg.connect(settings.database_url) as opened:
        ((position, body),) = Outbox().read(opened, "orders", 0, 10)
    assert fields == {b"e": signed(settings.database_url, position, body)}
    entry = decode_entry("orders", position, fields[b"e"], keys_of(settings.database_url))
    assert isinstance(entry, Entry)
    assert (entry.key, entry.plain_payload()) == ("a\nb", json.loads(json.dumps(awkward)))


def test_events_that_commit_late_are_numbered_when_they_commit(settings: Settings) -> None:
    with worker(settings) as publisher, psycopg.connect(settings.database_url) as slow:
        (late,) = insert(slow, "orders")
        early = [send(settings.database_url, "orders")[0] for _ in range(4)]
        publisher.publish_all()
        assert uuids_in_order(settings) == early
        slow.commit()
        publisher.publish_all()
    assert uuids_in_order(settings) == [*early, late]
    assert_published(settings, 5)


def test_positions_have_no_gap_under_concurrent_senders_that_commit_out_of_order(
    settings: Settings,
) -> None:
    senders, transactions = 6, 40
    committed: list[int] = []

    def send_with_holds(seed: int) -> None:
        chance = random.Random(seed)  # noqa: S311
        hold = threading.Event()
        with psycopg.connect(settings.database_url) as opened:
            for _ in range(transactions):
                count = chance.randint(1, 5)
                insert(opened, "orders", count)
                hold.wait(chance.random() * 0.01)
                if chance.random() < 0.2:
                    opened.rollback()
                else:
                    opened.commit()
                    committed.append(count)

    with running(settings):
        in_threads([lambda seed=seed: send_with_holds(seed) for seed in range(senders)])  # type: ignore[misc]
        wait_until(
            lambda: state_of(settings)[1] == sum(committed),
            what="everything is published",
        )
    assert_published(settings, sum(committed))


def test_the_floor_never_passes_a_transaction_that_is_not_finished(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    """The early writer draws its xid first and its id last, as most business code does."""
    with (
        worker(replace(settings, publish_batch_size=1)) as publisher,
        psycopg.connect(settings.database_url) as slow,
        psycopg.connect(settings.database_url) as early,
    ):
        for _ in range(4):
            send(settings.database_url, "orders")
            publisher.publish_all()
        early.execute("SELECT pg_current_xact_id()")
        (late,) = insert(slow, "orders")
        ((late_id,),) = slow.execute("SELECT max(id) FROM events.outbox_event").fetchall()
        insert(early, "orders")
        early.commit()
        for _ in range(6):
            publisher.publish_all()
            send(settings.database_url, "orders")
        publisher.publish_all()
        ((floor,),) = connection.execute("SELECT id_floor FROM events.stream").fetchall()
        assert floor < late_id
        slow.commit()
        # Without a sweep: the floor alone must let the row be found.
        assert Outbox().has_unnumbered(connection, ["orders"]) == {"orders"}
        publisher.publish_all()
        assert uuids_in_order(settings)[-1] == late
        for _ in range(6):
            send(settings.database_url, "orders")
            publisher.publish_all()
        ((floor,),) = connection.execute("SELECT id_floor FROM events.stream").fetchall()
        assert floor > late_id, "the floor follows once the transaction is over"


def test_a_row_below_the_floor_is_found_by_the_sweep(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 3)
        publisher.publish_all()
        connection.execute("UPDATE events.stream SET id_floor = 1000000")
        send(settings.database_url, "orders")
        assert Outbox().has_unnumbered(connection, ["orders"]) == set()
        publisher.publish_all()
    assert_published(settings, 4)


def test_two_who_number_at_once_wait_for_each_other(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    lease = leased(settings, connection)
    send(settings.database_url, "orders", 10)
    second: list[tuple[int, str]] = []
    with psycopg.connect(settings.database_url) as first, connection:
        rows = Outbox().number(first, lease, 5)
        rival = threading.Thread(
            target=lambda: second.extend(Outbox().number(connection, lease, 5))
        )
        rival.start()
        pid = connection.info.backend_pid
        wait_until(
            lambda: ask(settings.database_url, "SELECT pg_blocking_pids(%s)", pid) != [([],)],
            what="the second waits for the first",
        )
        first.commit()
        rival.join(SOON_SECONDS)
    assert [position for position, _ in rows] == [1, 2, 3, 4, 5]
    assert [position for position, _ in second] == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("sent", [2, 3])
def test_a_row_that_goes_away_while_it_is_numbered_leaves_no_gap(
    settings: Settings, connection: psycopg.Connection[Any], sent: int
) -> None:
    lease = leased(settings, connection)
    gone, *rest = send(settings.database_url, "orders", sent)
    second: list[list[tuple[int, str]]] = []
    with psycopg.connect(settings.database_url) as operator, connection:
        operator.execute("DELETE FROM events.outbox_event WHERE event_uuid = %s", (gone,))
        # What is numbered begins with the row that is being deleted.
        numbering = threading.Thread(
            target=lambda: second.append(Outbox().number(connection, lease, sent - 1))
        )
        numbering.start()
        pid = connection.info.backend_pid
        wait_until(
            lambda: ask(settings.database_url, "SELECT pg_blocking_pids(%s)", pid) != [([],)],
            what="the numbering waits for the operator",
        )
        operator.commit()
        numbering.join(SOON_SECONDS)
    assert second == [[]]
    with psycopg.connect(settings.database_url) as again:
        rows = Outbox().number(again, lease, sent)
    assert [position for position, _ in rows] == list(range(1, sent))
    assert uuids_in_order(settings) == rest


def test_a_numbering_that_fails_at_its_commit_leaves_nothing_on_the_log(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    assert settings.redis_url is not None
    send(settings.database_url, "orders", 2)
    with worker(settings) as publisher:
        publisher.publish_all()
        connection.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " RAISE 'not today'; END $$;"
            "CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON events.outbox_event"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION refuse()"
        )
        send(settings.database_url, "orders", 3)
        with pytest.raises(psycopg.errors.RaiseException, match="not today"):
            publisher.step()
        assert hot_ids(settings.redis_url, "orders") == ids(1, 2)
        connection.execute("DROP TRIGGER late ON events.outbox_event")
        # Other events get the positions for which the first ones were signed.
        connection.execute("DELETE FROM events.outbox_event WHERE position IS NULL")
        send(settings.database_url, "orders", 3)
        publisher.publish_all()
    assert_published(settings, 5)


def test_whoever_lost_the_lease_numbers_nothing(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    lease = leased(settings, connection)
    send(settings.database_url, "orders", 10)
    for lost in (replace(lease, term=lease.term - 1), replace(lease, owner_id="somebody")):
        with pytest.raises(LeaseLost):
            Outbox().number(connection, lost, 5)
    assert positions(settings) == []


def leased(settings: Settings, connection: psycopg.Connection[Any]) -> Lease:
    """The publisher's lease, held by nobody in particular."""
    Streams().register(connection, "orders")
    LeaseTable().ensure(connection, "orders", "publisher")
    lease = LeaseTable().acquire(
        connection,
        "orders",
        "publisher",
        owner_id="a test",
        worker_id="a test",
        lease_seconds=settings.lease_seconds,
    )
    assert lease is not None
    return lease


def test_numbering_is_durable_even_where_commits_are_not(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    lease = leased(settings, connection)
    send(settings.database_url, "orders", 3)
    with psycopg.connect(settings.database_url) as numbering:
        numbering.execute("SET synchronous_commit = off")
        Outbox().number(numbering, lease, 10)
        setting = numbering.execute("SHOW synchronous_commit").fetchone()
        assert setting == ("on",), "the setting that holds at COMMIT"


def test_the_confirmation_alone_may_be_lost_in_a_crash(
    connection: psycopg.Connection[Any],
) -> None:
    Streams().register(connection, "orders")
    with connection.transaction():
        connection.execute("SET LOCAL synchronous_commit = on")
        Streams().confirm(connection, "orders", 1)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("off",)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_stale_statistics_do_not_lead_the_planner_astray(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    """Analysed when everything waited, asked when 200,000 rows are published."""
    connection.execute("ALTER TABLE events.outbox_event SET (autovacuum_enabled = off)")
    connection.execute(
        "INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, payload) "
        "SELECT gen_random_uuid(), 'orders', 'T', '{}' FROM generate_series(1, 200000)"
    )
    connection.execute("ANALYZE events.outbox_event")
    connection.execute("UPDATE events.outbox_event SET position = id, term = 1")
    lease = leased(settings, connection)
    connection.execute("UPDATE events.stream SET head = 200000, id_floor = 199000")
    send(settings.database_url, "orders", 10)
    plans = plans_of(connection, lease)
    assert plans, "auto_explain told nothing"
    for plan in plans:
        assert "Seq Scan on outbox_event" not in plan, plan
        assert "outbox_event_unnumbered" in plan, plan


def plans_of(connection: psycopg.Connection[Any], lease: Lease) -> list[str]:
    """The plans that the server really used for looking and for claiming."""
    heard: list[str] = []
    connection.add_notice_handler(lambda notice: heard.append(notice.message_primary or ""))
    connection.execute("LOAD 'auto_explain'")
    for name, value in (
        ("auto_explain.log_min_duration", "0"),
        ("auto_explain.log_nested_statements", "on"),
        ("client_min_messages", "log"),
    ):
        connection.execute("SELECT set_config(%s, %s, false)", [name, value])
    outbox = Outbox()
    outbox.has_unnumbered(connection, ["orders", "others"])
    outbox.unnumbered_streams(connection)
    for sweep in (False, True):
        assert len(outbox.number(connection, lease, 5, sweep=sweep)) == 5
    return [plan for plan in heard if "position IS NULL" in plan]


def test_a_publisher_with_nothing_to_do_writes_nothing(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    def next_xid() -> Any:
        return connection.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())").fetchone()

    with worker(settings) as publisher:
        send(settings.database_url, "orders", 3)
        publisher.publish_all()

        def is_quiet() -> bool:
            before = next_xid()
            for _ in range(5):
                publisher.step()
            return bool(next_xid() == before)

        # The server may write something of its own meanwhile, but not every time.
        wait_until(is_quiet, what="idle steps write nothing")


# ── two publishers ─────────────────────────────────────────────────────────────────────────────


def test_a_publisher_that_lost_its_lease_after_numbering_leaves_appending_to_its_successor(
    settings: Settings,
) -> None:
    send(settings.database_url, "orders", 20)
    with worker(settings) as paused, worker(settings) as successor:

        def take_over() -> None:
            ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")
            send(settings.database_url, "orders", 5)
            successor.publish_all()

        with at(signals.BatchNumbered, take_over), told(signals.LeaseLost) as lost:
            paused.step()
        assert [signal.stream_name for signal in lost] == ["orders"]
        send(settings.database_url, "orders", 5)
        successor.publish_all()
    assert_published(settings, 30)


def test_a_publisher_numbers_behind_a_predecessor_that_was_slow(settings: Settings) -> None:
    """The predecessor numbers after its successor has opened the log and before it numbers."""
    send(settings.database_url, "orders", 10)
    with worker(settings) as slow, worker(settings) as successor:
        slow.publish_all()
        ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")
        send(settings.database_url, "orders", 10)

        def number_late() -> None:
            ask(
                settings.database_url,
                "WITH lease AS (SELECT owner_id, term FROM events.stream_lease) "
                "SELECT n.* FROM lease, events.number_events("
                "'orders', lease.owner_id, lease.term, 4, false) AS n",
            )

        with at(signals.HotLogOpened, number_late):
            successor.publish_all()
    assert_published(settings, 20)


def test_a_stopped_publisher_that_does_not_read_its_rows_holds_up_nobody(
    settings: Settings, connection: psycopg.Connection[Any]
) -> None:
    lease = leased(settings, connection)
    send(settings.database_url, "orders", 20, payload="x" * 900_000)
    with psycopg.connect(settings.database_url) as stopped, worker(settings) as successor:
        number = "SELECT * FROM events.number_events('orders', 'a test', $1, 20, false)"
        stopped.pgconn.send_query_params(number.encode(), [str(lease.term).encode()])
        stopped.pgconn.flush()
        wait_until(
            lambda: (
                ask(
                    settings.database_url,
                    "SELECT wait_event FROM pg_stat_activity WHERE pid = %s",
                    stopped.info.backend_pid,
                )
                == [("ClientWrite",)]
            ),
            what="its backend cannot send any more",
        )
        ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")
        with told(signals.PredecessorEnded) as ended:
            successor.publish_all()
        assert ended == [signals.PredecessorEnded("orders", "publisher", 1)]
        stopped.close()
    assert_published(settings, 20)


def test_what_a_predecessor_appends_at_the_last_moment_does_not_look_like_a_log_ahead(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It numbers before its lease ends, and commits and appends before its successor opens."""
    # Ending a backend takes a moment, in which it may still commit.
    monkeypatch.setattr(LeaseTable, "end_predecessor", lambda *_: 0)
    send(settings.database_url, "orders", 10)
    with (
        worker(settings) as slow,
        worker(settings) as successor,
        psycopg.connect(settings.database_url) as numbering,
        told(signals.StreamRefused) as refused,
    ):
        slow.publish_all()
        (held,) = slow.publisher._publications.values()
        send(settings.database_url, "orders", 10)
        rows = Outbox().number(numbering, held.lease, 5)
        ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")
        open_for_real = RedisLog.open

        def open_late(log: RedisLog, stream_name: str, fence: Fence, *, base: int) -> int | None:
            numbering.commit()
            assert held.fence is not None
            log.append(
                stream_name,
                held.fence,
                first=rows[0][0],
                entries=[signed(settings.database_url, *row) for row in rows],
            )
            monkeypatch.setattr(RedisLog, "open", open_for_real)
            return open_for_real(log, stream_name, fence, base=base)

        monkeypatch.setattr(RedisLog, "open", open_late)
        successor.publish_all()
        assert refused == []
    assert_published(settings, 20)


@pytest.mark.slow
def test_publishers_that_fight_for_a_stream_give_out_every_position_once(
    settings: Settings,
) -> None:
    """Leases end at random moments, whoever holds them and whatever is under way."""
    rounds, per_round = 60, 10
    settings = replace(settings, publish_batch_size=7)
    done = threading.Event()

    def disturb() -> None:
        chance = random.Random(7)  # noqa: S311
        while not done.wait(chance.random() * 0.02):
            ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")

    def work() -> None:
        for _ in range(rounds):
            send(settings.database_url, "orders", per_round)
        wait_until(
            lambda: positions(settings) == list(range(1, rounds * per_round + 1)),
            what="everything has a position",
        )
        done.set()

    with running(settings, "one"), running(settings, "two"), running(settings, "three"):
        in_threads([disturb, work])
        wait_until(
            lambda: state_of(settings) == (rounds * per_round, rounds * per_round),
            what="everything is published",
        )
    assert_published(settings, rounds * per_round)


# ── crashes ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "moment", [signals.BatchNumbered, signals.BatchAppended, signals.BatchConfirmed]
)
def test_nothing_is_lost_or_repeated_by_a_crash(
    settings: Settings, moment: type[signals.Signal]
) -> None:
    send(settings.database_url, "orders", 120)
    for _ in range(2):
        doomed = Worker(settings)
        with at(moment, crash), pytest.raises(Crash):
            doomed.publish_all()
        doomed.die()
    with worker(settings) as publisher:
        publisher.publish_all()
    assert_published(settings, 120)
    assert state_of(settings) == (120, 120)


def test_a_crash_between_taking_the_lease_and_opening_the_log_is_harmless(
    settings: Settings,
) -> None:
    send(settings.database_url, "orders", 3)
    for moment in (signals.LeaseAcquired, signals.HotLogOpened):
        doomed = Worker(settings)
        with at(moment, crash), pytest.raises(Crash):
            doomed.publish_all()
        doomed.die()
    with worker(settings) as publisher:
        publisher.publish_all()
    assert_published(settings, 3)


# ── the hot log in trouble ─────────────────────────────────────────────────────────────────────


def test_a_flushed_log_is_filled_again_from_the_slowest_consumer(
    settings: Settings, client: Any
) -> None:
    read_up_to(settings, 30)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 100)
        publisher.publish_all()
        client.flushdb()
        with told(signals.HotLogLost) as lost:
            publisher.publish_all()
            publisher.publish_all()
        assert lost == [signals.HotLogLost("orders", 0, 100)]
        assert hot_ids(settings.redis_url or "", "orders") == ids(31, 100)
        send(settings.database_url, "orders", 1)
        publisher.publish_all()
    assert hot_ids(settings.redis_url or "", "orders") == ids(31, 101)


@pytest.mark.parametrize(
    "moment", [signals.BatchNumbered, signals.BatchAppended, signals.HotLogOpened]
)
def test_a_log_that_is_flushed_in_mid_stream_is_filled_again(
    settings: Settings, client: Any, moment: type[signals.Signal]
) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 230)
        publisher.step()
        if moment is signals.HotLogOpened:
            client.flushdb()
        with at(moment, client.flushdb):
            publisher.publish_all()
    assert_published(settings, 230)


def test_a_lost_tail_is_filled_again(settings: Settings, client: Any) -> None:
    """As after a failover to a replica that was behind."""
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        stale = client.dump(log_key("orders"))
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        client.restore(log_key("orders"), 0, stale, replace=True)
        with told(signals.HotLogLost) as lost:
            publisher.publish_all()
        assert lost == [signals.HotLogLost("orders", 60, 120)]
        assert_published(settings, 120)
        client.restore(log_key("orders"), 0, stale, replace=True)
        send(settings.database_url, "orders", 1)
        publisher.publish_all()
    assert_published(settings, 121)


def test_a_tail_that_was_deleted_or_trimmed_by_hand_is_filled_again(
    settings: Settings, client: Any
) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        client.xdel(log_key("orders"), *ids(58, 60))
        publisher.publish_all()
        assert_published(settings, 60)
        client.xtrim(log_key("orders"), maxlen=0, approximate=False)
        publisher.publish_all()
    assert_published(settings, 60)


def test_a_log_that_begins_where_the_outbox_was_pruned_starts_anew(
    settings: Settings, client: Any, connection: psycopg.Connection[Any]
) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        stale = client.dump(log_key("orders"))
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        connection.execute("DELETE FROM events.outbox_event WHERE position <= 100")
        client.restore(log_key("orders"), 0, stale, replace=True)
        with told(signals.HotLogRebuilt) as rebuilt:
            publisher.publish_all()
        assert [signal.stream_name for signal in rebuilt] == ["orders"]
        assert hot_ids(settings.redis_url or "", "orders") == ids(101, 120)
        client.flushdb()
        publisher.publish_all()
    assert hot_ids(settings.redis_url or "", "orders") == ids(101, 120)


@pytest.mark.parametrize("entry_id", ["*", "1000000000000000-0"])
def test_an_entry_that_somebody_else_wrote_is_thrown_away(
    settings: Settings, client: Any, entry_id: str
) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        client.xadd(log_key("orders"), {"e": "not ours"}, id=entry_id)
        with told(signals.HotLogRebuilt, signals.StreamRefused) as told_of:
            send(settings.database_url, "orders", 5)
            publisher.publish_all()
        assert [type(signal) for signal in told_of] == [signals.HotLogRebuilt]
    assert_published(settings, 65)


def test_an_id_that_stands_in_the_next_positions_place_is_thrown_away(
    settings: Settings, client: Any
) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        client.xadd(log_key("orders"), {"e": "not ours"}, id="61-7")
        send(settings.database_url, "orders", 5)
        publisher.publish_all()
        assert_published(settings, 65)
        client.xadd(log_key("orders"), {"e": "not ours"}, id="65-7")
        publisher.publish_all()
    assert_published(settings, 65)


def test_an_idle_publisher_notices_a_foreign_entry(settings: Settings, client: Any) -> None:
    read_up_to(settings, 0)
    with worker(settings) as publisher:
        send(settings.database_url, "orders", 3)
        publisher.publish_all()
        client.xadd(log_key("orders"), {"e": "not ours"})
        publisher.publish_all()
    assert_published(settings, 3)


def test_a_loss_that_nobody_needs_filled_in_is_told_once(settings: Settings, client: Any) -> None:
    with worker(settings) as publisher, told(signals.HotLogLost) as losses:
        send(settings.database_url, "orders", 3)
        publisher.publish_all()
        client.flushdb()
        for _ in range(3):
            publisher.publish_all()
        assert len(losses) == 1
        send(settings.database_url, "orders", 1)
        publisher.publish_all()
    assert hot_ids(settings.redis_url or "", "orders") == ids(4, 4)


def test_another_databases_log_is_left_alone(settings: Settings, client: Any) -> None:
    foreign = {"origin": str(uuid4()), "term": 1, "base": 0}
    client.hset("penstock:{orders}:meta", mapping=foreign)
    send(settings.database_url, "orders", 3)
    send(settings.database_url, "others", 3)
    with worker(settings) as publisher, told(signals.StreamRefused) as refused:
        for _ in range(3):
            publisher.publish_all()
        assert [signal.stream_name for signal in refused] == ["orders"]
        assert positions(settings) == []
        assert hot_ids(settings.redis_url or "", "orders") == []
        assert_published(settings, 3, "others")
        client.delete("penstock:{orders}:meta")
        publisher.publish_all()
    assert_published(settings, 3)


@pytest.mark.parametrize("key", ["penstock:{orders}:log", "penstock:{orders}:meta"])
@pytest.mark.parametrize("is_early", [True, False])
def test_something_else_in_the_place_of_the_log_is_as_good_as_no_log(
    settings: Settings, client: Any, key: str, is_early: bool
) -> None:
    count = 3 if is_early else 5
    with worker(settings) as publisher, told(signals.ServerLost, signals.ServerFound) as said:
        if not is_early:
            send(settings.database_url, "orders", 2)
            publisher.publish_all()
        client.delete(key)
        client.lpush(key, "mine")
        send(settings.database_url, "orders", 3)
        send(settings.database_url, "others", 3)
        # Positions are the truth and go on; nothing is touched.
        wait_until(
            lambda: publisher.step() >= 0 and len(positions(settings)) == count,
            what="all are numbered",
        )
        assert client.lrange(key, 0, -1) == [b"mine"]
        assert_published(settings, 3, "others")
        client.delete(key)
        wait_until(lambda: publisher.step() >= 0 and len(said) > 1, what="the log is there again")
    assert hot_ids(settings.redis_url or "", "orders")[-3:] == ids(count - 2, count)
    assert [(type(each), each.server) for each in said] == [
        (signals.ServerLost, "the hot log of orders"),
        (signals.ServerFound, "the hot log of orders"),
    ]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_term_that_postgres_has_forgotten_is_passed_in_one_step(
    settings: Settings, client: Any, is_running: bool
) -> None:
    with worker(settings) as publisher, told(signals.LeaseLost) as lost:
        if is_running:
            send(settings.database_url, "orders", 3)
            publisher.publish_all()
        client.hset("penstock:{orders}:meta", mapping=meta_of(settings, client, term=999_999))
        send(settings.database_url, "orders", 3)
        wait_until(lambda: publisher.step() >= 0 and bool(lost), what="it is noticed")
        publisher.publish_all()
    [(reason,)] = [(signal.reason,) for signal in lost]
    assert "term 999999" in reason
    assert_published(settings, 6 if is_running else 3)
    assert client.hget("penstock:{orders}:meta", "term") == b"1000000"
    assert ask(settings.database_url, "SELECT term FROM events.stream_lease") == [(1_000_000,)]


def meta_of(settings: Settings, client: Any, **fields: Any) -> dict[str, Any]:
    """The record beside the log as this database's publisher would leave it."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        streams = Streams()
        streams.register(connection, "orders")
        origin = streams.read(connection, "orders").origin
        return {"origin": origin, "incarnation": streams.incarnation(connection), **fields}


@pytest.mark.parametrize("term", ["abc", 2**63 - 1, 2**64])
def test_a_term_that_no_publisher_had_is_as_good_as_no_log(
    settings: Settings, client: Any, term: int | str
) -> None:
    with worker(settings) as publisher, told(signals.ServerLost) as lost:
        send(settings.database_url, "orders", 2)
        publisher.publish_all()
        client.hset("penstock:{orders}:meta", "term", term)
        send(settings.database_url, "orders", 3)
        wait_until(
            lambda: publisher.step() >= 0 and len(positions(settings)) == 5,
            what="all are numbered",
        )
        assert [signal.server for signal in lost] == ["the hot log of orders"]
        client.delete("penstock:{orders}:meta")
        publisher.publish_all()
    assert_published(settings, 5)
    assert ask(settings.database_url, "SELECT term FROM events.stream_lease") == [(1,)]


def test_whoever_holds_the_lease_is_not_overtaken_by_a_publisher_that_lost_it(
    settings: Settings,
) -> None:
    send(settings.database_url, "orders", 1)
    paused = Worker(settings)
    paused.publish_all()
    ask(settings.database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")
    with worker(settings) as successor:
        successor.publish_all()
        send(settings.database_url, "orders", 1)
        successor.publish_all()
        for publication in paused.publisher._publications.values():
            publication.last = None
        paused.step()
        assert ask(settings.database_url, "SELECT term FROM events.stream_lease") == [(2,)]
        send(settings.database_url, "orders", 1)
        successor.publish_all()
        paused.close()
    assert_published(settings, 3)


@pytest.mark.slow
def test_positions_are_given_out_while_redis_is_away(settings: Settings, tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, persistence="none")
    settings = replace(settings, redis_url=valkey.url)
    read_up_to(settings, 0)
    with (
        told(signals.ServerLost, signals.ServerFound, signals.LeaseAcquired) as told_of,
        valkey,
        running(settings),
    ):
        send(settings.database_url, "orders", 120)
        wait_until(lambda: state_of(settings) == (120, 120), what="all is published")
        valkey.crash()
        send(settings.database_url, "orders", 120)
        send(settings.database_url, "others", 120)
        wait_until(
            lambda: len(positions(settings) + positions(settings, "others")) == 360,
            what="everything has a position",
        )
        assert state_of(settings) == (240, 120)
        valkey.start()
        wait_until(
            lambda: state_of(settings) == (240, 240) and state_of(settings, "others")[1] == 120,
            what="the restarted server has everything",
        )
        assert_published(settings, 240)
        assert_published(settings, 120, "others")
    kinds = [type(signal).__name__ for signal in told_of]
    assert kinds.count("ServerLost") == kinds.count("ServerFound") == 1
    assert kinds.count("LeaseAcquired") == 2, "no lease was given up"


# ── streams ────────────────────────────────────────────────────────────────────────────────────


def test_new_streams_are_found_without_being_told(settings: Settings) -> None:
    with worker(settings) as publisher:
        publisher.publish_all()
        for stream_name in ("a", "b/c", "d.e:f"):
            send(settings.database_url, stream_name, 3)
            publisher.publish_all()
            assert_published(settings, 3, stream_name)


def test_a_lease_given_back_is_taken_by_the_next_publisher_at_once(settings: Settings) -> None:
    with worker(settings) as first:
        send(settings.database_url, "orders", 3)
        first.publish_all()
    with worker(settings) as second:
        send(settings.database_url, "orders", 3)
        second.publish_all()
    assert_published(settings, 6)


def test_a_publisher_asked_to_stop_begins_no_further_batch(settings: Settings) -> None:
    send(settings.database_url, "orders", 3)
    with worker(settings) as publisher:
        publisher.publisher._stop_requested = lambda: True
        assert publisher.step() == 0
    assert positions(settings) == []


# ── PostgreSQL alone ───────────────────────────────────────────────────────────────────────────


def test_without_redis_events_are_numbered_and_readers_are_woken(settings: Settings) -> None:
    settings = replace(settings, redis_url=None)
    with (
        worker(settings) as publisher,
        closing(Announcements(settings.database_url)) as announcements,
    ):
        reader = NoHotLog(announcements)
        send(settings.database_url, "orders", 60)
        publisher.publish_all()
        assert positions(settings) == list(range(1, 61))
        assert state_of(settings) == (60, 60)

        def read(wait_seconds: float) -> list[tuple[int, bytes]]:
            return reader.read("orders", after=60, count=10, wait_seconds=wait_seconds)

        assert read(SOON_SECONDS) == [], "the first call only begins to listen"
        send(settings.database_url, "orders", 1)
        publisher.publish_all()
        with told(signals.BatchConfirmed) as confirmed:
            waiting = threading.Thread(target=read, args=(SOON_SECONDS,))
            waiting.start()
            waiting.join(SOON_SECONDS / 2)
            assert not waiting.is_alive(), "the notification was waiting"
            assert confirmed == []
        assert read(0.0) == []


def test_without_redis_a_crash_before_the_confirmation_is_made_good(settings: Settings) -> None:
    settings = replace(settings, redis_url=None)
    send(settings.database_url, "orders", 3)
    doomed = Worker(settings)
    with at(signals.BatchNumbered, crash), pytest.raises(Crash):
        doomed.publish_all()
    doomed.die()
    assert state_of(settings) == (3, 0)
    with worker(settings) as publisher:
        publisher.publish_all()
    assert state_of(settings) == (3, 3)


def test_a_lease_that_cannot_be_made_use_of_is_not_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(settings.database_url, "orders", 3)
    read = Streams.read
    broken = [True]

    def read_once_in_vain(self: Streams, *arguments: Any) -> Any:
        if broken.pop() if broken else False:
            raise psycopg.OperationalError
        return read(self, *arguments)

    monkeypatch.setattr(Streams, "read", read_once_in_vain)
    with running(settings):
        wait_until(lambda: state_of(settings) == (3, 3), what="another try publishes them")
    assert not broken
