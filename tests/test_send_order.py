"""A key's events have the order of its commits, whatever their senders do meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from penstock.core.events import RawEvent
from penstock.stores.postgres import sqlalchemy_url
from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.sending import Outbox, make_sender
from tests.waiting import SOON_SECONDS, wait_until

WRITERS = 8
TRANSACTIONS = 40
KEYS = 5
LOCK_SLOTS = 256
HOLD = "SELECT pg_sleep({seconds})"
CHANGE = "UPDATE aggregate SET version = version + 1 WHERE key = '{key}' RETURNING version"
RECORD = "INSERT INTO journal VALUES ('{uuid}', '{key}', {version})"
TABLES = """
    DROP TABLE IF EXISTS aggregate, journal;
    CREATE TABLE aggregate (key text PRIMARY KEY, version bigint NOT NULL);
    INSERT INTO aggregate SELECT 'k' || n, 0 FROM generate_series(0, 4) AS n;
    CREATE TABLE journal (event_uuid uuid, key text, version bigint);
"""
INVERSIONS = """
    SELECT count(*), count(*) FILTER (WHERE version < version_before) FROM (
        SELECT j.version, lag(j.version) OVER (PARTITION BY j.key ORDER BY o.id) AS version_before
          FROM journal j JOIN events.outbox_event o USING (event_uuid)
    ) AS journey
"""
Work = Callable[[Any, str, float], None]
sender = make_sender()


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = create_engine(sqlalchemy_url(database_url), pool_size=WRITERS)
    yield engine
    engine.dispose()


@pytest.fixture
def outbox(database_url: str) -> Iterator[Outbox]:
    outbox = Outbox(database_url)
    outbox.clear()
    outbox.connection.execute(TABLES)
    yield outbox
    outbox.close()


def change_aggregate(execute: Callable[[str], Any], uuid: Any, key: str, seconds: float) -> None:
    execute(HOLD.format(seconds=seconds))
    [version] = execute(CHANGE.format(key=key)).fetchone()
    execute(HOLD.format(seconds=seconds / 2))
    execute(RECORD.format(uuid=uuid, key=key, version=version))


def through_a_session(connection: Any, key: str, seconds: float) -> None:
    with Session(connection) as session:
        uuid = sender.send(session, "orders", RawEvent("T", {}), key=key)
        change_aggregate(lambda query: session.execute(text(query)), uuid, key, seconds)
        session.commit()
    connection.commit()


def through_psycopg(connection: Any, key: str, seconds: float) -> None:
    driver = connection.connection.driver_connection
    with driver.transaction():
        uuid = sender.send(driver, "orders", RawEvent("T", {}), key=key)
        change_aggregate(driver.execute, uuid, key, seconds)


def by_a_plain_insert(connection: Any, key: str, seconds: float) -> None:
    driver = connection.connection.driver_connection
    with driver.transaction():
        uuid = uuid4()
        driver.execute(
            "INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, key, payload)"
            " VALUES (%s, 'orders', 'T', %s, '{}')",
            [uuid, key],
        )
        change_aggregate(driver.execute, uuid, key, seconds)


def write_concurrently(engine: Engine, work: Work) -> None:
    def writer(number: int) -> None:
        chance = random.Random(number)  # noqa: S311 - repeatable, not secret
        with engine.connect() as connection:
            for _ in range(TRANSACTIONS):
                work(connection, f"k{chance.randrange(KEYS)}", chance.random() * 0.002)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(writer, range(WRITERS)))


@pytest.mark.parametrize("work", [through_a_session, through_psycopg])
def test_events_sent_before_the_row_lock_keep_the_order_of_the_row(
    engine: Engine, outbox: Outbox, work: Work
) -> None:
    write_concurrently(engine, work)
    assert outbox.connection.execute(INVERSIONS).fetchone() == (WRITERS * TRANSACTIONS, 0)


def test_a_plain_insert_would_lose_that_order(engine: Engine, outbox: Outbox) -> None:
    # Why there are locks and a buffer at all: this is what an outbox without them does.
    write_concurrently(engine, by_a_plain_insert)
    row = outbox.connection.execute(INVERSIONS).fetchone()
    assert row is not None
    assert row[0] == WRITERS * TRANSACTIONS
    assert row[1] > 0


def test_a_sender_waits_for_another_of_the_same_key_and_for_no_one_else(
    database_url: str, outbox: Outbox
) -> None:
    first, second = psycopg.connect(database_url), psycopg.connect(database_url)
    sender.send(first, "orders", RawEvent("first", {}), key="k")
    for stream, key in (("orders", "another"), ("orders", None), ("others", "k")):
        sender.send(second, stream, RawEvent("unrelated", {}), key=key)
        second.rollback()

    def send_second() -> None:
        sender.send(second, "orders", RawEvent("second", {}), key="k")
        second.commit()

    thread = threading.Thread(target=send_second)
    thread.start()
    wait_until(lambda: is_waiting(outbox, second), what="the second sender waits")
    first.commit()
    thread.join(SOON_SECONDS)
    assert outbox.sent == ["first", "second"]
    first.close()
    second.close()


def is_waiting(outbox: Outbox, connection: psycopg.Connection[Any]) -> bool:
    query = "SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory' AND NOT granted"
    return outbox.connection.execute(query, [connection.info.backend_pid]).fetchone() == (1,)


@pytest.mark.slow
def test_forty_thousand_keys_in_one_transaction_take_a_bounded_number_of_locks(
    engine: Engine, outbox: Outbox
) -> None:
    with engine.connect() as connection:
        sender.send_many(
            connection, "orders", [RawEvent("T", {}, key=str(n)) for n in range(40_000)]
        )
        locks: list[Any] = []
        count = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
            " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )

        # Registered after the sender's own listener, so the events are in by now.
        def count_locks(_: Any) -> None:
            locks.append(outbox.connection.execute(count).fetchone())

        event.listen(engine, "commit", count_locks)
        connection.commit()
    # One slot more is the shared lock that keeps the publisher awake.
    assert locks == [(LOCK_SLOTS + 1,)]
    assert len(outbox.sent) == 40_000


def test_keys_in_opposite_order_never_deadlock(engine: Engine, outbox: Outbox) -> None:
    keys = [str(n) for n in range(40)]
    rounds = 60
    together = threading.Barrier(2)

    def writer(order: list[str]) -> None:
        for _ in range(rounds):
            with Session(engine) as session:
                for key in order:
                    sender.send(session, "orders", RawEvent("T", {}, key=key))
                together.wait(SOON_SECONDS)
                session.commit()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(writer, [keys, keys[::-1]]))
    assert len(outbox.sent) == 2 * rounds * len(keys)
