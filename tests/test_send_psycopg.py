"""Sending on a psycopg connection inserts at once; so does the SQL function, from any language."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import dict_row

from penstock.core.events import Event, RawEvent
from penstock.errors import (
    EventIdentityConflict,
    InvalidEvent,
    SchemaMismatch,
    UnsafeTransaction,
    UsageError,
)
from penstock.pipeline.sending import peek_pending, take_pending
from penstock.stores.servers import Servers
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.signals import EventsInserted
from tests.databases import new_database
from tests.sending import Outbox, make_sender
from tests.waiting import SOON_SECONDS

sender = make_sender()
SLEEP = "SELECT pg_advisory_lock(hashtext('penstock wake-up'), hashtext(%s) & 255)"
WAKE = "SELECT pg_advisory_unlock(hashtext('penstock wake-up'), hashtext(%s) & 255)"


class OrderPlaced(Event, type="psycopg.placed", version=2, key="order_id"):
    order_id: int


class Undo(Exception):
    """Raised in tests to leave a block by rolling it back."""


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def outbox(database_url: str) -> Iterator[Outbox]:
    outbox = Outbox(database_url)
    outbox.clear()
    yield outbox
    outbox.close()


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


def send(target: Any, name: str, **options: Any) -> UUID:
    return sender.send(target, "orders", RawEvent(name, {"n": 1}), **options)


# ── in the connection's transaction ────────────────────────────────────────────────────────────


def test_the_event_is_there_at_once_and_goes_with_the_transaction(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    send(connection, "A")
    row = connection.execute("SELECT count(*) FROM events.outbox_event").fetchone()
    assert (row, outbox.sent) == ((1,), [])
    connection.commit()
    send(connection, "lost")
    connection.rollback()
    assert outbox.sent == ["A"]
    assert (peek_pending(connection), take_pending(connection)) == ([], {})


def test_a_rolled_back_savepoint_takes_its_events_along(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    with connection.transaction():
        send(connection, "A")
        with suppress(Undo), connection.transaction():
            send(connection, "lost")
            raise Undo
    connection.commit()
    assert outbox.sent == ["A"]


def test_everything_about_an_event_is_stored(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    uuid = sender.send(connection, "orders", OrderPlaced(order_id=7), metadata={"tenant": "x"})
    connection.commit()
    row = outbox.connection.execute(
        "SELECT event_uuid, stream_name, event_type, version, key, key_id, payload,"
        " metadata - '__creation_timestamp_ms__', position FROM events.outbox_event"
    ).fetchone()
    expected = (uuid, "orders", "psycopg.placed", 2, "7", None, {"order_id": 7}, {"tenant": "x"})
    assert row == (*expected, None)
    assert uuid.version == 7


def test_the_time_of_an_event_is_the_databases(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    clock = "SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
    before = outbox.connection.execute(clock).fetchone()
    sender.send(
        connection, "orders", RawEvent("A", {}), metadata={"__creation_timestamp_ms__": 5, "x": 1}
    )
    connection.commit()
    after = outbox.connection.execute(clock).fetchone()
    [metadata] = outbox.column("metadata")
    [created_at] = outbox.column("created_at")
    assert before is not None
    assert after is not None
    assert before[0] <= metadata["__creation_timestamp_ms__"] <= after[0]
    assert int(created_at.timestamp() * 1000) == metadata["__creation_timestamp_ms__"]
    assert metadata["x"] == 1


def test_a_thousand_events_are_one_insert_in_the_order_given(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    signals: list[EventsInserted] = []
    subscribe(EventsInserted, signals.append)
    try:
        events = [RawEvent(f"t{n:04}", {"n": n}, key=str(n % 7)) for n in range(1000)]
        uuids = sender.send_many(connection, "orders", events)
    finally:
        unsubscribe(signals.append)
    connection.commit()
    assert signals == [EventsInserted(1000)]
    assert outbox.sent == [event.event_type for event in events]
    assert outbox.column("event_uuid") == uuids
    assert sender.send_many(connection, "orders", []) == []


@pytest.mark.parametrize(
    "options",
    [
        {"row_factory": dict_row},
        {"cursor_factory": psycopg.ClientCursor},
        {"cursor_factory": psycopg.RawCursor},
    ],
)
def test_the_connections_own_cursors_do_not_matter(
    database_url: str, outbox: Outbox, options: dict[str, Any]
) -> None:
    with psycopg.connect(database_url, **options) as connection:
        send(connection, "A")
    assert outbox.sent == ["A"]


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


def test_autocommit_is_refused_outside_a_transaction_block(
    database_url: str, outbox: Outbox
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        with pytest.raises(UnsafeTransaction, match=r"with connection\.transaction\(\)"):
            send(connection, "A")
        with connection.transaction():
            send(connection, "B")
        with connection.pipeline(), connection.transaction():
            send(connection, "C")
        with pytest.raises(UnsafeTransaction):
            send(connection, "D")
    assert outbox.sent == ["B", "C"]


def test_autocommit_is_refused_in_a_pipeline_too(database_url: str, outbox: Outbox) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        with connection.pipeline():
            connection.execute("SELECT 1")
            with pytest.raises(UnsafeTransaction, match=r"with connection\.transaction\(\)"):
                send(connection, "A")
        with connection.pipeline(), connection.transaction():
            connection.execute("SELECT 1")
            send(connection, "B")
            with connection.transaction():
                send(connection, "C")
        with connection.transaction(), connection.pipeline():
            connection.execute("SELECT 1")
            send(connection, "D")
        connection.execute("BEGIN")
        send(connection, "E")
        connection.execute("COMMIT")
    assert outbox.sent == ["B", "C", "D", "E"]


def test_so_it_is_on_an_asynchronous_connection(database_url: str, outbox: Outbox) -> None:
    async def run() -> None:
        connect = psycopg.AsyncConnection.connect
        async with await connect(database_url, autocommit=True) as connection:
            async with connection.pipeline():
                await connection.execute("SELECT 1")
                with pytest.raises(UnsafeTransaction):
                    await sender.send_async(connection, "orders", RawEvent("A", {}))
            async with connection.pipeline(), connection.transaction():
                await sender.send_async(connection, "orders", RawEvent("B", {}))
                await connection.execute("SELECT 1")
                await sender.send_async(connection, "orders", RawEvent("C", {}))

    asyncio.run(run())
    assert outbox.sent == ["B", "C"]


def test_two_phase_transactions_are_refused(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    connection.tpc_begin("sent in two phases")
    with pytest.raises(UnsafeTransaction, match="two-phase"):
        send(connection, "A")
    connection.tpc_rollback()
    send(connection, "B")
    connection.commit()
    assert outbox.sent == ["B"]


def test_a_missing_schema_says_what_to_run(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(SchemaMismatch, match=r"penstock migrate.*nowhere"):
        make_sender("nowhere").send(connection, "orders", RawEvent("A", {}))


def test_bad_events_leave_the_transaction_usable(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    with pytest.raises(InvalidEvent):
        sender.send_many(connection, "orders", [RawEvent("A", {}), RawEvent("B", object())])
    with pytest.raises(InvalidEvent, match="one for each event"):
        sender.send_many(connection, "orders", [RawEvent("A", {})], event_uuids=[])
    send(connection, "C")
    connection.commit()
    assert outbox.sent == ["C"]


# ── identity ───────────────────────────────────────────────────────────────────────────────────


def test_a_second_try_with_the_same_uuid_changes_nothing(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    uuid = uuid4()
    for _ in range(2):
        assert send(connection, "A", event_uuid=uuid, key="k", metadata={"try": _}) == uuid
        connection.commit()
    null, batch = uuid4(), [RawEvent("A", {"n": 1}, key="k"), RawEvent("B", None)]
    for _ in range(2):
        sender.send_many(connection, "orders", batch, event_uuids=[uuid, null])
        connection.commit()
    twice = uuid4()
    sender.send_many(connection, "orders", [RawEvent("C", {})] * 2, event_uuids=[twice, twice])
    connection.commit()
    assert outbox.sent == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("stream", "event"),
    [
        ("others", RawEvent("A", {"n": 1}, key="k")),
        ("orders", RawEvent("B", {"n": 1}, key="k")),
        ("orders", RawEvent("A", {"n": 2}, key="k")),
        ("orders", RawEvent("A", None, key="k")),
        ("orders", RawEvent("A", {"n": 1}, version=2, key="k")),
        ("orders", RawEvent("A", {"n": 1}, key="l")),
        ("orders", RawEvent("A", {"n": 1})),
    ],
)
def test_the_same_uuid_for_another_event_is_refused(
    connection: psycopg.Connection[Any], outbox: Outbox, stream: str, event: RawEvent
) -> None:
    uuid = send(connection, "A", key="k")
    connection.commit()
    with pytest.raises(EventIdentityConflict, match=f"{uuid} is already taken"):
        sender.send_many(
            connection, stream, [RawEvent("new", {}), event], event_uuids=[uuid4(), uuid]
        )
    connection.rollback()
    assert outbox.sent == ["A"]


# ── asyncio ────────────────────────────────────────────────────────────────────────────────────


def test_asynchronous_connections_are_awaited(database_url: str, outbox: Outbox) -> None:
    async def work() -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            with pytest.raises(UsageError, match="await send_async"):
                send(connection, "lost")
            await sender.send_async(connection, "orders", RawEvent("A", {}))
            await sender.send_many_async(connection, "orders", [RawEvent("B", {})] * 2)
            await connection.commit()
            await sender.send_async(connection, "orders", RawEvent("lost", {}))
            await connection.rollback()
            taken = await sender.send_async(connection, "orders", RawEvent("C", {}))
            with pytest.raises(EventIdentityConflict):
                await sender.send_async(
                    connection, "orders", RawEvent("other", {}), event_uuid=taken
                )
            await connection.rollback()
            await connection.set_autocommit(True)
            with pytest.raises(UnsafeTransaction):
                await sender.send_async(connection, "orders", RawEvent("lost", {}))
            async with connection.transaction():
                await sender.send_async(connection, "orders", RawEvent("D", {}))

    asyncio.run(work())
    assert outbox.sent == ["A", "B", "B", "D"]


def test_an_asynchronous_send_takes_plain_connections_too(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    asyncio.run(sender.send_async(connection, "orders", RawEvent("A", {})))
    connection.commit()
    assert outbox.sent == ["A"]


# ── plain SQL ──────────────────────────────────────────────────────────────────────────────────


def test_any_language_can_send_with_the_sql_function(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    row = connection.execute(
        """SELECT events.send('orders', 'A', '{"n": 1}', key => 'k', version => 3,
                              metadata => '{"x": 1}'),
                  events.send('orders', 'B', 'null')"""
    ).fetchone()
    connection.commit()
    assert row is not None
    assert outbox.column("event_uuid") == list(row)
    assert [uuid.version for uuid in row] == [7, 7]
    assert outbox.column("version") == [3, 1]
    assert outbox.column("key") == ["k", None]
    assert outbox.column("payload") == [{"n": 1}, None]
    assert outbox.column("metadata")[0]["x"] == 1


def test_the_sql_function_keeps_identities_too(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    query = "SELECT events.send('orders', 'A', %s, event_uuid => %s)"
    uuid = uuid4()
    for _ in range(2):
        connection.execute(query, ["{}", uuid])
    connection.commit()
    with pytest.raises(psycopg.Error) as conflict:
        connection.execute(query, ["[]", uuid])
    assert conflict.value.sqlstate == "PS010"
    assert outbox.sent == ["A"]


@pytest.mark.parametrize(
    "arguments",
    [
        "'orders', 'A', NULL",
        "'or ders', 'A', '{}'",
        "'orders', E'A\\n', '{}'",
        "'orders', 'A', '{}', metadata => '[]'",
        "'orders', 'A', '{}', version => 0",
        "'orders', 'A', '{}', key => repeat('k', 1001)",
    ],
)
def test_the_table_guards_itself(connection: psycopg.Connection[Any], arguments: str) -> None:
    with pytest.raises(psycopg.IntegrityError):
        connection.execute(f"SELECT events.send({arguments})")


# ── waking the publisher ───────────────────────────────────────────────────────────────────────


@pytest.fixture
def listener(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as listener:
        listener.execute("LISTEN events_outbox_insert")
        yield listener


def heard(listener: psycopg.Connection[Any]) -> list[str]:
    """What was notified until now: a last notification of our own ends the listening."""
    listener.execute("SELECT pg_notify('events_outbox_insert', 'end')")
    payloads = []
    for notification in listener.notifies(timeout=SOON_SECONDS):
        if notification.payload == "end":
            break
        payloads.append(notification.payload)
    return payloads


def test_a_sender_wakes_a_publisher_that_sleeps(
    connection: psycopg.Connection[Any], outbox: Outbox, listener: psycopg.Connection[Any]
) -> None:
    outbox.connection.execute(SLEEP, ["orders"])
    sender.send_many(connection, "orders", [RawEvent("A", {})] * 3)
    assert heard(listener) == []
    connection.commit()
    assert heard(listener) == [""]


def test_a_sender_that_rolls_back_wakes_nobody(
    connection: psycopg.Connection[Any], outbox: Outbox, listener: psycopg.Connection[Any]
) -> None:
    outbox.connection.execute(SLEEP, ["orders"])
    send(connection, "A")
    connection.rollback()
    assert heard(listener) == []


def test_nobody_is_notified_while_the_publisher_is_awake(
    connection: psycopg.Connection[Any], outbox: Outbox, listener: psycopg.Connection[Any]
) -> None:
    outbox.connection.execute(SLEEP, ["others"])
    send(connection, "A")
    connection.execute("SELECT events.send('orders', 'B', '{}')")
    connection.commit()
    assert heard(listener) == []


def test_a_publisher_cannot_fall_asleep_over_an_undecided_sender(
    connection: psycopg.Connection[Any], outbox: Outbox
) -> None:
    attempt = SLEEP.replace("pg_advisory_lock", "pg_try_advisory_lock")
    send(connection, "A")
    assert outbox.connection.execute(attempt, ["orders"]).fetchone() == (False,)
    connection.commit()
    assert outbox.connection.execute(attempt, ["orders"]).fetchone() == (True,)
    assert outbox.connection.execute(WAKE, ["orders"]).fetchone() == (True,)
