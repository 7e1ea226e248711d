"""Streams cross services: each event once, in a database that did not produce it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from penstock import Pipeline
from penstock.core.mac import MacKeys
from penstock.core.options import ConsumerOptions, Start
from penstock.core.policy import Member, MemberKind, SecurityLevel
from penstock.core.policy_change import PolicyChange
from penstock.errors import RegistrationError, ServerUnavailable
from penstock.ops.check import find_problems
from penstock.ops.policy import set_policy
from penstock.ops.status import read_status
from penstock.ops.streams import rotate_key
from penstock.pipeline import foreign_stream, trust
from penstock.pipeline import reader as readers
from penstock.pipeline.foreign_stream import ForeignStream
from penstock.stores import source_tier
from penstock.stores.cleanup import Cleanup
from penstock.stores.hot_log import HotLog
from penstock.stores.inbox import Inbox
from penstock.stores.redis_log import FIELD
from penstock.stores.servers import Servers
from penstock.stores.sources import Sources
from penstock.telemetry import signals
from tests.databases import name_of, new_database
from tests.failing import heard
from tests.proxy import Proxy
from tests.publishing import log_key
from tests.services import CONSUMER, Producer, Reader, note
from tests.test_cli import Penstock
from tests.test_seams import working
from tests.waiting import wait_until

SHARED_KEY = "shared:" + "5a" * 32


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens once a second happens more often, so that nobody has to wait for it."""
    monkeypatch.setattr(foreign_stream, "REPORT_SECONDS", 0.1)
    monkeypatch.setattr(readers, "HEAD_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(trust, "KEYS_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(trust, "TRUSTED_SECONDS", 0.2)


@pytest.fixture
def producer(database_url: str, redis_url: str) -> Iterator[Producer]:
    with closing(Producer(database_url, redis_url)) as opened:
        yield opened


@pytest.fixture
def own_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def reader(own_url: str, redis_url: str, producer: Producer) -> Iterator[Reader]:
    """Reads the hot log and, behind it, the producer's database."""
    with closing(Reader(own_url, redis_url, source_url=producer.url)) as opened:
        yield opened


@pytest.fixture
def hot_reader(own_url: str, redis_url: str, producer: Producer) -> Iterator[Reader]:
    """Has nothing but the hot log."""
    with closing(Reader(own_url, redis_url, mac_key=producer.mac_key)) as opened:
        yield opened


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url, protocol=2)) as opened:
        yield opened


@pytest.fixture
def penstock(tmp_path: Path, own_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": own_url}, capsys)


@pytest.fixture
def there(penstock: Penstock, producer: Producer) -> Penstock:
    """The command line on the producer's side."""
    redis_url = str(producer.settings.redis_url)
    variables = {"PENSTOCK_DATABASE_URL": producer.url, "PENSTOCK_REDIS_URL": redis_url}
    return replace(penstock, variables=variables)


@pytest.fixture
def role(producer: Producer, client: Any) -> Iterator[tuple[str, str]]:
    """A role in PostgreSQL that may log in and nothing else, to be named in Redis too."""
    name, password = f"reader_{secrets.token_hex(4)}", secrets.token_hex(8)
    create = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
        sql.Identifier(name), sql.Literal(password)
    )
    producer.connection.execute(create)
    yield name, password
    client.acl_deluser(name)
    producer.connection.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
    producer.connection.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))


def as_role(url: str, role: tuple[str, str]) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{role[0]}:{role[1]}@{host}").geturl()


# ── exactly once ───────────────────────────────────────────────────────────────────────────────


def test_the_printed_grants_are_all_that_another_service_needs(
    producer: Producer,
    reader: Reader,
    client: Any,
    role: tuple[str, str],
    there: Penstock,
) -> None:
    producer.published(30)
    printed = there("streams", "share", "orders", "--role", role[0]).stdout
    assert producer.mac_key.partition(":")[2] not in printed
    lines = printed.splitlines()
    for grant in (line for line in lines if line.startswith("GRANT ")):
        producer.connection.execute(grant.encode())
    (acl,) = (line for line in lines if line.startswith("ACL "))
    client.execute_command(*acl.replace("…", role[1]).split())
    reader.source = {
        "redis_url": as_role(str(producer.settings.redis_url), role),
        "source_url": as_role(producer.url, role),
    }
    reader.run(1, 30, lanes=4)
    assert producer.remote() == {CONSUMER: 30}
    # While nobody reads, the hot log is cut short: the rest comes from the database.
    producer.published(20)
    client.xtrim(log_key("orders"), minid="45-0", approximate=False)
    with heard(signals.ServerLost) as lost, reader.working(lanes=4):
        reader.wait_until_handled(1, 50)
        client.delete(log_key("orders"), "penstock:{orders}:meta")
        producer.published(10)
        reader.wait_until_handled(1, 60)
        wait_until(lambda: reader.seen() == (1, 60), what="the lag is known")
    assert not lost
    for positions in reader.handled_by_key().values():
        assert positions == sorted(positions)
    with psycopg.connect(as_role(producer.url, role)) as intruder:
        for forbidden in ("DELETE FROM events.remote_consumer", "SELECT FROM events.consumer"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), intruder.transaction():
                intruder.execute(forbidden.encode())


def test_the_own_database_never_takes_the_stream_for_its_own(
    producer: Producer, reader: Reader, penstock: Penstock
) -> None:
    producer.published(5)
    with reader.working("consumer:bill", "publisher", "janitor"):
        reader.wait_until_handled(1, 5)
        wait_until(lambda: reader.seen() == (1, 5), what="the head is known")
        for stream_name in ("orders", "own"):
            reader.connection.execute("SELECT events.send(%s, 'T', '{}')", (stream_name,))
        published = "SELECT name, head FROM events.stream WHERE published > 0"
        wait_until(
            lambda: reader.connection.execute(published).fetchall() == [("own", 1)],
            what="the publisher has met everything",
        )
        reader.connection.execute("DELETE FROM events.outbox_event WHERE position IS NULL")
    assert reader.connection.execute("SELECT name FROM events.stream").fetchall() == [("own",)]
    producer.published(3)
    reader.connection.execute("UPDATE events.source SET head = 8")
    status = read_status(reader.connection)
    assert [(s.name, s.is_source, s.head) for s in status.streams] == [
        ("orders", True, 8),
        ("own", False, 1),
    ]
    assert [(c.checkpoint, c.lag_events) for c in status.consumers] == [(5, 3)]
    assert [problem.kind for problem in find_problems(status)] == ["no_worker"]
    listed = penstock("streams", "list", "--json").stdout
    assert '"is_source": true' in listed
    assert "of another service" in penstock("status").stdout
    penstock("consumers", "forget", "bill", "--yes")
    assert reader.connection.execute("SELECT FROM events.source").fetchall() == []


def test_a_producer_without_redis_is_read_from_its_database(
    database_url: str, reader: Reader
) -> None:
    reader.source["redis_url"] = None
    with closing(Producer(database_url, None)) as producer:
        producer.published(5)
        with reader.working():
            reader.wait_until_handled(1, 5)
            producer.published(5)
            reader.wait_until_handled(1, 10)
        assert producer.remote() == {CONSUMER: 10}


def test_a_stream_of_this_database_is_no_source(producer: Producer, redis_url: str) -> None:
    producer.published(1)
    with closing(Reader(producer.url, redis_url, mac_key=producer.mac_key)) as reader:
        with pytest.raises(RegistrationError, match="has a stream of that name"):
            reader.run(1, 1)
        producer.connection.execute("DELETE FROM events.outbox_event")
        producer.connection.execute("UPDATE events.stream SET head = 0")
        _foreign(reader, producer).enter(reader.connection)
        assert reader.connection.execute("SELECT FROM events.stream").fetchall() == []


@contextmanager
def taking_it_for_an_own_stream(reader: Reader, start: Start) -> Iterator[None]:
    """A worker of the deployment in which nobody had said that it is another service's."""
    pipeline = Pipeline("billing", database_url=reader.database_url, redis_url=None)
    pipeline.consumer("orders", name="bill", start=start)(note)
    held = "SELECT 1 FROM events.stream_lease WHERE owner_id IS NOT NULL"
    with working(pipeline, "consumer:bill"):
        wait_until(
            lambda: reader.connection.execute(held).fetchone() is not None,
            what="it holds its lane",
        )
        yield


@pytest.mark.parametrize(("start", "first"), [("latest", 11), ("earliest", 6), (8, 8)])
def test_a_source_that_was_taken_for_an_own_stream_is_read_from_where_its_consumer_starts(
    producer: Producer, reader: Reader, client: Any, start: Start, first: int
) -> None:
    producer.published(10)
    client.flushdb()
    producer.connection.execute("DELETE FROM events.outbox_event WHERE position <= 5")
    with taking_it_for_an_own_stream(reader, start):
        pass
    with heard(signals.ConsumerRegistered) as registered, reader.working(start=start):
        wait_until(lambda: bool(registered), what="the consumer is registered")
        producer.published(2)
        reader.wait_until_handled(first, 12)
    reader.run(first, 12, start=start)


def test_a_consumer_that_was_moved_by_hand_meanwhile_stays_there(
    producer: Producer, reader: Reader, penstock: Penstock
) -> None:
    with taking_it_for_an_own_stream(reader, "latest"):
        pass
    producer.published(10)
    reader.connection.execute("SELECT events.register_source('orders')")
    reader.connection.execute("UPDATE events.source SET head = 10")
    penstock("consumers", "seek", "bill", "--to", "4", "--yes")
    reader.run(4, 10, start="latest")


def test_a_source_that_is_no_longer_declared_is_not_read_as_an_own_stream(
    producer: Producer, reader: Reader
) -> None:
    producer.published(1)
    reader.run(1, 1)
    sentence = r"write pipeline\.source\('orders'"
    with (
        closing(Producer(reader.database_url, None)) as bench,
        pytest.raises(RegistrationError, match=sentence),
    ):
        bench.consumer(note)


# ── the hot window alone ───────────────────────────────────────────────────────────────────────


def test_without_the_database_a_trimmed_log_blocks_until_a_seek(
    producer: Producer, hot_reader: Reader, client: Any, penstock: Penstock
) -> None:
    producer.published(10)
    with heard(signals.HotWindowOnly) as warned:
        hot_reader.run(1, 10)
    assert warned == [signals.HotWindowOnly(CONSUMER, "orders")]
    producer.published(20)
    client.xtrim(log_key("orders"), minid="21-0", approximate=False)
    with heard(signals.ConsumerBlocked) as blocked, hot_reader.working():
        wait_until(lambda: bool(blocked), what="the consumer is blocked")
        assert blocked[0].position == 11
        assert "source_url" in blocked[0].reason
        wait_until(lambda: hot_reader.seen() == (21, 30), what="the window is known")
        refused = penstock("consumers", "seek", "bill", "--to", "2026-01-01T00:00:00Z", code=1)
        assert "earliest (21)" in refused.stderr
        done = penstock("consumers", "seek", "bill", "--to", "earliest", "--yes").stdout
        assert "10 positions were passed over" in done
        wait_until(lambda: len(hot_reader.handled()) == 20, what="it goes on")
    assert hot_reader.handled() == [*range(1, 11), *range(21, 31)]
    assert producer.remote() == {}


def test_a_lost_log_blocks_a_consumer_that_was_behind(
    producer: Producer, hot_reader: Reader, client: Any
) -> None:
    producer.published(10)
    hot_reader.run(1, 10)
    producer.published(5)
    hot_reader.connection.execute("UPDATE events.source SET head = 15")
    client.flushdb()
    with heard(signals.ConsumerBlocked) as blocked, hot_reader.working():
        wait_until(lambda: bool(blocked), what="the consumer is blocked")
    assert blocked[0].position == 11


def test_a_forged_entry_blocks_instead_of_being_taken(
    producer: Producer, hot_reader: Reader, client: Any
) -> None:
    producer.published(3)
    ((_, fields),) = client.xrevrange(log_key("orders"), count=1)
    client.xadd(log_key("orders"), {FIELD: fields[FIELD]}, id="4-0")
    with heard(signals.ConsumerBlocked, signals.ForgeryFound) as told, hot_reader.working():
        wait_until(lambda: len(told) >= 2, what="the consumer is blocked")
        hot_reader.wait_until_handled(1, 3)
        client.xdel(log_key("orders"), "4-0")
    assert {type(signal) for signal in told} == {signals.ConsumerBlocked, signals.ForgeryFound}
    assert hot_reader.seen()[1] <= 3, "nobody moves the head by writing into Redis"


def test_a_hole_on_the_hot_log_is_stepped_over(producer: Producer, hot_reader: Reader) -> None:
    producer.published(3)
    producer.connection.execute("UPDATE events.stream SET timeline = '00000000'")
    producer.published(2)
    head = producer.head()
    assert head > 5
    with hot_reader.working(lanes=2):
        wait_until(lambda: len(hot_reader.handled()) == 5, what="everything is handled")
    assert hot_reader.handled() == [1, 2, 3, head - 1, head]


# ── servers that are away ──────────────────────────────────────────────────────────────────────


def test_while_the_producers_database_is_away_the_hot_log_serves(
    producer: Producer, reader: Reader, client: Any
) -> None:
    producer.published(5)
    with Proxy.to(producer.url) as proxy:
        reader.source |= {"source_url": proxy.url(producer.url), "mac_key": producer.mac_key}
        with heard(signals.ServerLost, signals.ServerFound) as told, reader.working():
            reader.wait_until_handled(1, 5)
            with proxy.refusing():
                wait_until(lambda: bool(told), what="the loss was told")
                producer.published(5)
                reader.wait_until_handled(1, 10)
            producer.wait_for_remote(10)
        # Also from the beginning, once it is registered; only what is missing is waited for.
        with ExitStack() as away, heard(signals.GapFound) as gaps:
            away.enter_context(proxy.refusing())
            producer.published(5)
            reader.run(1, 15)
            producer.published(5)
            client.xtrim(log_key("orders"), minid="20-0", approximate=False)
            with reader.working():
                wait_until(lambda: bool(gaps), what="a gap was met")
                away.close()
                reader.wait_until_handled(1, 20)


def test_a_database_that_stands_still_is_not_waited_for(
    producer: Producer, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_tier, "ANSWER_SECONDS_MAX", 0.3)
    producer.published(5)
    with Proxy.to(producer.url) as proxy, heard(signals.ServerLost) as lost:
        reader.source["source_url"] = proxy.url(producer.url)
        foreign = _foreign(reader, producer)
        foreign.enter(reader.connection)
        assert foreign.tier.bounds() == (1, 5)
        with proxy.black_hole(), pytest.raises(ServerUnavailable):
            foreign.tier.bounds()
        assert foreign.tier.head() == 5
        assert len(lost) == 1
        foreign.close()


@pytest.mark.parametrize("brownout", [False, True])
def test_while_redis_is_away_a_consumer_waits_unless_told_otherwise(
    producer: Producer, reader: Reader, redis_url: str, brownout: bool
) -> None:
    producer.published(5)
    with Proxy.to(redis_url) as proxy:
        reader.source |= {"redis_url": proxy.url(redis_url), "brownout": brownout}
        with heard(signals.ServerLost) as lost, reader.working():
            reader.wait_until_handled(1, 5)
            with proxy.refusing():
                wait_until(lambda: bool(lost), what="the loss was told")
                producer.published(5)
                wait_until(lambda: reader.seen() == (1, 10), what="the lag is known")
                if brownout:
                    reader.wait_until_handled(1, 10)
                assert brownout or reader.handled() == [1, 2, 3, 4, 5]
            reader.wait_until_handled(1, 10)


# ── origin ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def other(servers: Servers, template_database: str, redis_url: str) -> Iterator[Producer]:
    """A second database that publishes a stream of the same name, with the same key."""
    with (
        new_database(servers.database_url, template_database) as url,
        closing(Producer(url, redis_url, mac_key=SHARED_KEY)) as opened,
    ):
        # All databases of this run are copies of one.
        opened.connection.execute("UPDATE events.origin SET id = gen_random_uuid()")
        yield opened


@pytest.mark.parametrize("has_database", [False, True])
def test_another_database_with_the_same_key_is_refused(
    database_url: str, reader: Reader, other: Producer, client: Any, has_database: bool
) -> None:
    redis_url = other.settings.redis_url
    reader.source = {"mac_key": SHARED_KEY}
    reader.source |= {"source_url": database_url} if has_database else {}
    with closing(Producer(database_url, redis_url, mac_key=SHARED_KEY)) as producer:
        producer.published(3)
    reader.run(1, 3)
    client.flushdb()
    other.published(6)
    if has_database:
        reader.source["source_url"] = other.url
    with heard(signals.ConsumerBlocked, signals.GapFound) as told, reader.working():
        wait_until(lambda: len(told) >= 2, what="the consumer is blocked")
    assert reader.handled() == [1, 2, 3]
    assert "comes from another database" in told[0].reason
    assert ("leads to another database" in told[1].reason) is has_database


def test_a_database_in_which_nothing_was_published_is_not_pinned(
    producer: Producer, reader: Reader, other: Producer
) -> None:
    producer.published(3)
    reader.source |= {"source_url": other.url, "mac_key": producer.mac_key}
    with heard(signals.GapFound) as gaps, reader.working():
        wait_until(lambda: bool(gaps), what="the wrong database is noticed")
    assert "comes from another database" in gaps[0].reason
    reader.source["source_url"] = producer.url
    reader.run(1, 3)


@pytest.mark.parametrize("is_log_lost", [False, True])
def test_a_database_that_was_restored_from_a_dump_gives_out_no_position_again(
    database_url: str, own_url: str, servers: Servers, client: Any, is_log_lost: bool
) -> None:
    with closing(Producer(database_url, servers.redis_url)) as shop:
        shop.published(3)
    with (
        new_database(servers.database_url, name_of(database_url)) as restored_url,
        closing(Reader(own_url, servers.redis_url, source_url=database_url)) as reader,
    ):
        with closing(Producer(database_url, servers.redis_url)) as shop:
            shop.published(3)
            reader.run(1, 6)
        reader.source["source_url"] = restored_url
        client.delete("penstock:{orders}:meta")
        with closing(Producer(restored_url, servers.redis_url)) as shop:
            if is_log_lost:
                client.delete(log_key("orders"))
                shop.connection.execute("UPDATE events.stream SET timeline = 'restored'")
            shop.published(3)
            head = shop.head()
            with reader.working():
                wait_until(lambda: len(reader.handled()) == 9, what="all of them are handled")
        assert reader.handled() == [*range(1, 7), head - 2, head - 1, head]


# ── what the producer keeps ────────────────────────────────────────────────────────────────────


def prune(producer: Producer) -> list[int]:
    """Make everything old, prune, and return the positions that are left."""
    producer.connection.execute("UPDATE events.outbox_event SET published_at = '2020-01-01'")
    Cleanup().prune_outbox(
        producer.connection, "orders", after=0, retention_days=7, batch_size=1000
    )
    return producer.rows("SELECT position FROM events.outbox_event ORDER BY position")


def test_pruning_waits_for_a_remote_consumer_but_not_for_a_forgotten_one(
    producer: Producer, reader: Reader, there: Penstock
) -> None:
    producer.published(5)
    reader.run(1, 5)
    producer.published(5)
    assert prune(producer) == [6, 7, 8, 9, 10]
    listed = there("streams", "list").stdout
    assert CONSUMER in listed
    refused = there("consumers", "forget", "--remote", CONSUMER, "--yes", code=1)
    assert "it runs" in refused.stderr
    producer.connection.execute("UPDATE events.remote_consumer SET seen_at = '2020-01-01'")
    there("consumers", "forget", "--remote", "nobody.here", code=1)
    there("consumers", "forget", "--remote", CONSUMER, "--yes")
    assert prune(producer) == []


def test_a_seek_back_is_known_to_the_producer(
    producer: Producer, reader: Reader, client: Any, penstock: Penstock
) -> None:
    producer.published(6)
    # Nobody fills the log again: everything is read from the database.
    client.flushdb()
    with reader.working():
        reader.wait_until_handled(1, 6)
        producer.wait_for_remote(6)
        penstock("consumers", "pause", "bill", "--wait", "20")
        penstock("consumers", "seek", "bill", "--to", "3", "--again")
        producer.wait_for_remote(2)
        penstock("consumers", "resume", "bill")
        wait_until(lambda: len(reader.handled()) == 10, what="they are handled again")
    assert reader.handled() == [1, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert producer.remote() == {CONSUMER: 6}


def test_a_remote_checkpoint_never_moves_back_by_a_late_report(producer: Producer) -> None:
    producer.published(10)

    def record(checkpoint: int | None, generation: int, name: str = CONSUMER) -> int:
        producer.connection.execute(
            "SELECT events.record_remote_checkpoint(%s, 'orders', %s, %s)",
            (name, checkpoint, generation),
        )
        return producer.remote()[CONSUMER]

    assert record(0, 1) == 0
    assert record(7, 1) == 7
    assert record(4, 1) == 7
    assert record(2, 2) == 2, "a later generation was moved by hand"
    assert record(9, 1) == 2, "an earlier one knows nothing of that"
    for checkpoint, name in ((-1, CONSUMER), (None, CONSUMER), (10**15, CONSUMER), (1, "bill")):
        with pytest.raises(psycopg.errors.InvalidParameterValue):
            record(checkpoint, 3, name)
    unknown = "SELECT events.record_remote_checkpoint('billing.bill', 'nowhere', 1)"
    assert producer.rows(unknown) == [False]


# ── where it starts ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("has_database", [False, True])
def test_a_start_is_chosen_by_what_can_be_read(
    producer: Producer, reader: Reader, hot_reader: Reader, client: Any, has_database: bool
) -> None:
    producer.published(10)
    moments = producer.rows("SELECT created_at FROM events.outbox_event ORDER BY position")
    producer.connection.execute("DELETE FROM events.outbox_event WHERE position <= 4")
    client.xtrim(log_key("orders"), minid="5-0", approximate=False)
    service = reader if has_database else hot_reader
    foreign = _foreign(service, producer)
    starts = foreign.enter(service.connection)

    def start(asked: Start) -> int:
        options = ConsumerOptions(stream_name="orders", name="bill", start=asked)
        return starts.choose(service.connection, CONSUMER, options)

    with heard(signals.ConsumerStartedLate) as late:
        assert start("earliest") == 5
        assert start(2) == 5
    assert len(late) == 2
    assert start("latest") == 11
    assert start(8) == 8
    assert start(moments[0]) == 5
    assert start(datetime.now(UTC) + timedelta(hours=1)) == 11
    assert producer.remote() == ({CONSUMER: 0} if has_database else {})
    foreign.close()


def let_read(producer: Producer, role: str | None) -> None:
    """Restrict the stream to this consumer, with this role."""
    change = PolicyChange(
        stream_name="orders",
        security_level=SecurityLevel.RESTRICTED,
        producers=(Member(MemberKind.PRODUCER, "shop", None),),
        consumers=(Member(MemberKind.CONSUMER, CONSUMER, role),),
    )
    set_policy(producer.connection, change, by="tests")


def test_whoever_may_not_see_the_rows_does_not_start_behind_them(
    producer: Producer, reader: Reader, role: tuple[str, str], there: Penstock
) -> None:
    producer.published(5)
    printed = there("streams", "share", "orders", "--role", role[0]).stdout
    for grant in (line for line in printed.splitlines() if line.startswith("GRANT ")):
        producer.connection.execute(grant.encode())
    reader.source["source_url"] = as_role(producer.url, role)
    let_read(producer, None)
    with heard(signals.ServerLost) as lost, reader.working():
        wait_until(lambda: bool(lost), what="it is told what is wrong")
        assert "is not among its consumers. Nothing was lost" in lost[0].error
        assert reader.connection.execute("SELECT FROM events.consumer").fetchall() == []
        let_read(producer, role[0])
        reader.wait_until_handled(1, 5)


SLOW_COMMIT = """
CREATE FUNCTION commit_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(4711);
    RETURN NULL;
END $$;
CREATE TRIGGER commit_late AFTER INSERT ON events.consumer
    FOR EACH ROW EXECUTE FUNCTION commit_late();
"""
WAITING = """
SELECT count(*) FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


def test_of_two_workers_that_register_at_once_the_second_tells_the_producer_nothing(
    producer: Producer, reader: Reader
) -> None:
    producer.published(3)
    options = ConsumerOptions(stream_name="orders", name="bill", start="earliest")

    def register() -> None:
        foreign = _foreign(reader, producer)
        with closing(foreign), psycopg.connect(reader.database_url, autocommit=True) as own:
            starts = foreign.enter(own)
            Inbox(starts=starts).register(own, CONSUMER, options, datetime.now(UTC))

    def is_waiting(count: int) -> bool:
        return reader.connection.execute(WAITING).fetchone() == (count,)

    def next_second() -> None:
        present = Sources().generation(reader.connection)
        wait_until(
            lambda: Sources().generation(reader.connection) > present, what="the next second"
        )

    # Generations are counted in seconds, and the first one's COMMIT takes until the next.
    reader.connection.execute(SLOW_COMMIT)
    reader.connection.execute("SELECT pg_advisory_lock(4711)")
    workers = [threading.Thread(target=register) for _ in range(2)]
    for number, worker in enumerate(workers, 1):
        worker.start()
        wait_until(partial(is_waiting, number), what=f"{number} wait")
        next_second()
    reader.connection.execute("SELECT pg_advisory_unlock(4711)")
    for worker in workers:
        worker.join()
    progress = Sources().progress(reader.connection, CONSUMER)
    assert progress is not None
    (told,) = producer.rows("SELECT generation FROM events.remote_consumer")
    assert told < progress.generation, "what is reported from now on counts"


class PublishedMeanwhile:
    """A hot log in which the first events arrive between the first question and the second."""

    def __init__(self, hot_log: HotLog, publish: Callable[[], object]) -> None:
        self._hot_log = hot_log
        self._publish = publish
        self._is_asked = False

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any, **options: Any) -> Any:
            answer = getattr(self._hot_log, name)(*arguments, **options)
            if not self._is_asked:
                self._is_asked = True
                self._publish()
            return answer

        return ask


def test_a_start_misses_nothing_that_is_published_meanwhile(
    producer: Producer, hot_reader: Reader
) -> None:
    hot_log = PublishedMeanwhile(producer.hot_log(), lambda: producer.published(2))
    foreign = _foreign(hot_reader, producer, cast("HotLog", hot_log))
    starts = foreign.enter(hot_reader.connection)
    options = ConsumerOptions(stream_name="orders", name="bill", start="earliest")
    assert starts.choose(hot_reader.connection, CONSUMER, options) == 1
    assert producer.head() == 2
    foreign.close()


def test_a_start_is_never_before_what_was_trimmed_meanwhile(
    producer: Producer, hot_reader: Reader, client: Any
) -> None:
    def publish() -> None:
        producer.published(5)
        client.xtrim(log_key("orders"), minid="4-0", approximate=False)

    hot_log = PublishedMeanwhile(producer.hot_log(), publish)
    foreign = _foreign(hot_reader, producer, cast("HotLog", hot_log))
    starts = foreign.enter(hot_reader.connection)
    options = ConsumerOptions(stream_name="orders", name="bill", start="latest")
    assert starts.choose(hot_reader.connection, CONSUMER, options) == 5
    foreign.close()


def _foreign(service: Reader, producer: Producer, hot_log: HotLog | None = None) -> ForeignStream:
    """The stream as a consumer of the service would enter it."""
    source = service.pipeline()._registry.sources["orders"]
    return ForeignStream(_consuming(service), source, hot_log or producer.hot_log())


def _consuming(service: Reader) -> Any:
    """As much of it as registering needs."""

    class Known:
        name = CONSUMER
        stream_name = "orders"

        class settings:  # noqa: N801 - stands for an attribute
            schema = "events"

        @staticmethod
        def control() -> psycopg.Connection[Any]:
            return service.connection

    return Known()


def test_a_key_that_the_producer_retires_is_trusted_until_its_next_report(
    producer: Producer, reader: Reader
) -> None:
    producer.published(1)
    foreign = _foreign(reader, producer)
    foreign.enter(reader.connection)
    old = foreign.tier.keys().key_id
    new, _ = rotate_key(producer.connection, producer.settings, retire_old=True)
    assert foreign.tier.keys_seen().key_id == old, "readers of the hot log ask nobody"
    foreign.tier.bounds()
    assert set(foreign.tier.keys_seen().secrets) == {new.encode()}
    foreign.close()


def test_keys_that_the_producer_told_are_kept_while_it_is_away(
    producer: Producer, reader: Reader
) -> None:
    producer.published(1)
    with Proxy.to(producer.url) as proxy:
        reader.source |= {"source_url": proxy.url(producer.url), "mac_key": SHARED_KEY}
        foreign = _foreign(reader, producer)
        foreign.enter(reader.connection)
        assert foreign.tier.keys() == MacKeys.parse(SHARED_KEY)
        told = foreign.tier.keys()
        assert told.key_id == MacKeys.parse(producer.mac_key).key_id
        with proxy.refusing():
            assert foreign.tier.keys() == told
        foreign.close()


def test_keys_are_read_from_the_producer_and_rotated_there(
    producer: Producer, reader: Reader, there: Penstock
) -> None:
    producer.published(2)
    reader.source["mac_key"] = producer.mac_key
    foreign = _foreign(reader, producer)
    foreign.enter(reader.connection)
    assert foreign.tier.keys() == MacKeys.parse(producer.mac_key)
    with reader.working():
        reader.wait_until_handled(1, 2)
        old = MacKeys.parse(producer.mac_key)
        assert "within a second" in there("streams", "rotate-key").stdout
        producer.published(2)
        reader.wait_until_handled(1, 4)
        there("streams", "rotate-key", "--retire-old", code=2)
        done = there("streams", "rotate-key", "--retire-old", "--yes").stdout
        assert old.key_id.decode() in done
        producer.published(2)
        reader.wait_until_handled(1, 6)
    assert foreign.tier.keys().key_id == MacKeys.parse(producer.mac_key).key_id
    assert old.key_id in foreign.tier.keys().secrets, "it was given by hand"
    foreign.close()
    there("streams", "share", "orders", "--role", "no name", code=2)
    shown = there("streams", "share", "orders", "--role", "r", "--show-secrets").stdout
    assert producer.mac_key in shown
    refused = there("streams", "rotate-key", code=1, MAC_KEY=SHARED_KEY).stderr
    assert "PENSTOCK_MAC_KEY" in refused
