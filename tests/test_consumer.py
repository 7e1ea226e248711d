"""The consumer: one transaction per batch, each event once, nothing of a batch that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest
import redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.events import Event, StreamEvent
from penstock.errors import LeaseLost, RegistrationError, ServerUnavailable
from penstock.pipeline.consumer import Consumer
from penstock.pipeline.context import Context
from penstock.pipeline.sending import Sender
from penstock.runtime.crew import Crew
from penstock.runtime.heartbeat import LoopPulse
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe, unsubscribe
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Cancelled, Placed
from tests.waiting import SOON_SECONDS, wait_until


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    yield bench
    bench.close()


def write_effect(event: StreamEvent[Any], session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.payload["n"]})


@contextmanager
def heard(signal_type: type[signals.Signal]) -> Iterator[list[Any]]:
    """The signals of one type that are emitted meanwhile."""
    found: list[Any] = []
    subscribe(signal_type, found.append)
    try:
        yield found
    finally:
        unsubscribe(found.append)


def effects(bench: Workbench) -> list[Any]:
    return bench.rows("SELECT n FROM effect ORDER BY serial")


def test_a_batch_is_handled_in_order_in_one_transaction(bench: Workbench) -> None:
    bench.send(7)
    bench.publish()
    with heard(signals.BatchCommitted) as commits:
        run_until_idle(bench.consumer(write_effect))
    assert effects(bench) == [1, 2, 3, 4, 5, 6, 7]
    assert bench.checkpoint() == 7
    assert bench.settled() == [(n, "handled") for n in range(1, 8)]
    assert [(c.first, c.last) for c in commits] == [(1, 7)]


def on_psycopg_connection(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))


def on_psycopg_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))


def reading_back(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect (n) VALUES (%s) RETURNING n", (event.n,))
    assert cursor.fetchone() == (event.n,)


def in_lists(events: list[Placed], connection: psycopg.Connection[Any]) -> None:
    with connection.cursor().copy("COPY effect (n) FROM STDIN") as copy:
        for event in events:
            copy.write_row((event.n,))


def copying_each(event: Placed, connection: psycopg.Connection[Any]) -> None:
    with connection.cursor().copy("COPY effect (n) FROM STDIN") as copy:
        copy.write_row((event.n,))


def row_by_row(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    returned = cursor.stream("INSERT INTO effect (n) VALUES (%s) RETURNING n", (event.n,))
    assert list(returned) == [(event.n,)]


def row_by_row_below_a_session(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    row_by_row(event, driver.cursor())


async def row_by_row_asynchronously(event: Placed, cursor: psycopg.AsyncCursor[Any]) -> None:
    returned = cursor.stream("INSERT INTO effect (n) VALUES (%s) RETURNING n", (event.n,))
    assert [row async for row in returned] == [(event.n,)]


def wrapped(event: StreamEvent[Placed], session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.payload.n})


def of_either_kind(event: Placed | Cancelled, session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


def with_context(context: Context, event: Placed, session: Session) -> None:
    assert context.event.payload == {"n": event.n}
    assert context.attempt == 1
    assert not context.is_replay
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


def in_a_savepoint(event: Placed, session: Session) -> None:
    with session.begin_nested():
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


async def asynchronously(event: Placed, session: AsyncSession) -> None:
    await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


async def asynchronously_on_psycopg(event: Placed, cursor: psycopg.AsyncCursor[Any]) -> None:
    await cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))


@pytest.mark.parametrize(
    "handler",
    [
        write_effect,
        on_psycopg_connection,
        on_psycopg_cursor,
        reading_back,
        in_lists,
        copying_each,
        row_by_row,
        row_by_row_below_a_session,
        row_by_row_asynchronously,
        wrapped,
        of_either_kind,
        with_context,
        in_a_savepoint,
        asynchronously,
        asynchronously_on_psycopg,
    ],
)
def test_every_signature_handles_each_event_once(bench: Workbench, handler: Any) -> None:
    bench.send(25)
    bench.publish()
    run_until_idle(bench.consumer(handler, batch_size=10))
    assert effects(bench) == list(range(1, 26))
    assert bench.checkpoint() == 25


def test_a_handler_that_cannot_be_pipelined_is_found_out_once(bench: Workbench) -> None:
    bench.send(25)
    bench.publish()
    with heard(signals.BatchRolledBack) as rolled_back:
        run_until_idle(bench.consumer(copying_each, batch_size=5))
    assert len(rolled_back) == 1


def test_types_that_a_handler_does_not_name_pass_by_as_skipped(bench: Workbench) -> None:
    bench.send(2)
    bench.send(1, event_type="cancelled")
    bench.publish()
    run_until_idle(bench.consumer(on_psycopg_cursor))
    assert bench.settled() == [(1, "handled"), (2, "handled"), (3, "skipped")]
    assert bench.checkpoint() == 3


def test_a_consumer_that_must_understand_everything_waits_at_an_unknown_type(
    bench: Workbench,
) -> None:
    bench.send(1)
    bench.send(1, event_type="cancelled")
    bench.publish()
    consumer = bench.consumer(on_psycopg_cursor, on_unknown="block")
    with heard(signals.ConsumerBlocked) as blocked:
        for _ in range(6):
            consumer.step()
    assert bench.checkpoint() == 1
    assert "cancelled" in blocked[0].reason


def test_an_unknown_version_is_waited_for(bench: Workbench) -> None:
    bench.connection.execute("""SELECT events.send('orders', 'placed', '{"n": 1}', version => 9)""")
    bench.publish()
    consumer = bench.consumer(on_psycopg_cursor)
    with heard(signals.ConsumerBlocked) as blocked:
        for _ in range(3):
            consumer.step()
    assert ["has version 9" in block.reason for block in blocked] == [True]
    assert bench.settled() == []


def test_an_event_that_was_settled_before_is_not_handled_again(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    bench.connection.execute(
        "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
        " SELECT 'test.consumer', event_uuid, position, 'handled'"
        "   FROM events.outbox_event WHERE position = 2"
    )
    run_until_idle(bench.consumer(write_effect))
    assert effects(bench) == [1, 3]
    assert bench.checkpoint() == 3


def test_another_consumer_of_the_stream_sees_everything_too(bench: Workbench) -> None:
    bench.send(3)
    bench.publish()
    run_until_idle(bench.consumer(write_effect, name="first"))
    run_until_idle(bench.consumer(write_effect, name="second"))
    assert effects(bench) == [1, 2, 3, 1, 2, 3]


# ── failures ───────────────────────────────────────────────────────────────────────────────────


class Moody:
    """Fails on one event until it is told to stop; notes which batches it was shown."""

    def __init__(self, bad: int, error: Exception) -> None:
        self.bad: int | None = bad
        self.error = error

    def on_session(self, event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        if event.n == self.bad:
            raise self.error

    def on_cursor(self, event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))
        if event.n == self.bad:
            cursor.execute("SELECT 1/0")

    def on_list(self, events: list[Placed], session: Session) -> None:
        for event in events:
            self.on_session(event, session)

    async def on_async(self, event: Placed, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        if event.n == self.bad:
            raise self.error


def test_events_before_and_after_the_failing_one_stay_batches(bench: Workbench) -> None:
    bench.send(9)
    bench.publish()
    moody = Moody(5, ValueError("not today"))
    consumer = bench.consumer(moody.on_session)
    with heard(signals.BatchCommitted) as commits:
        with heard(signals.EventFailed) as failures:
            while not failures:
                consumer.step()
        moody.bad = None
        run_until_idle(consumer)
    # The failing one is parked by itself, and its key's successor with the rest.
    assert [(c.first, c.last, c.handled) for c in commits] == [(1, 4, 4), (5, 5, 0), (6, 9, 3)]


def test_a_commit_that_fails_is_tracked_down_one_by_one(bench: Workbench) -> None:
    bench.connection.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE 'not this one'; END $$;"
        " CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW WHEN (NEW.n = 4) EXECUTE FUNCTION refuse()"
    )
    bench.send(6)
    bench.publish()
    consumer = bench.consumer(write_effect)
    with heard(signals.EventFailed) as failures:
        while not failures:
            consumer.step()
    assert failures[0].position == 4
    assert effects(bench) == [1, 2, 3]


def test_an_error_whose_text_fails_is_survived(bench: Workbench) -> None:
    class Nasty(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    bench.send(1)
    bench.publish()
    consumer = bench.consumer(Moody(1, Nasty()).on_session)
    with heard(signals.EventFailed) as failures:
        consumer.step()
    assert "Nasty" in failures[0].error


def test_a_payload_that_does_not_fit_names_the_field_and_not_the_value(bench: Workbench) -> None:
    bench.connection.execute("""SELECT events.send('orders', 'placed', '{"n": "s3cret"}')""")
    bench.publish()
    consumer = bench.consumer(on_psycopg_cursor)
    with heard(signals.EventFailed) as failures:
        consumer.step()
    assert "n: " in failures[0].error
    assert "s3cret" not in failures[0].error


def test_a_deadlock_costs_no_attempt(bench: Workbench) -> None:
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(Moody(1, psycopg.errors.DeadlockDetected("nobody")).on_session)
    with heard(signals.EventFailed) as failures:
        for _ in range(20):
            consumer.step()
        assert failures == []
        consumer.step()
        assert len(failures) == 1


def test_a_batch_ends_between_events_when_its_time_is_over(bench: Workbench) -> None:
    bench.send(5)
    bench.publish()
    with heard(signals.BatchCommitted) as commits:
        run_until_idle(bench.consumer(write_effect, batch_seconds=1e-9))
    assert [(c.first, c.last) for c in commits] == [(n, n) for n in range(1, 6)]
    assert bench.settled() == [(n, "handled") for n in range(1, 6)]


def test_a_batch_ends_between_events_when_the_worker_shall_stop(bench: Workbench) -> None:
    stop = threading.Event()

    def stopping(event: Placed, session: Session) -> None:
        write = text("INSERT INTO effect (n) VALUES (:n)")
        session.execute(write, {"n": event.n})
        if event.n == 2:
            stop.set()

    bench.send(5)
    bench.publish()
    bench.consumer(stopping, stop=stop).step()
    assert effects(bench) == [1, 2]
    assert bench.checkpoint() == 2
    assert bench.settled() == [(1, "handled"), (2, "handled")]


def test_around_is_entered_for_each_batch(bench: Workbench) -> None:
    entered: list[str] = []

    @contextmanager
    def around() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    bench.send(3)
    bench.publish()
    run_until_idle(bench.consumer(write_effect, around=around, batch_size=2))
    assert entered == ["in", "out", "in", "out"]


# ── gaps ───────────────────────────────────────────────────────────────────────────────────────


def log_key(client: redis.Redis) -> str:
    (key,) = client.keys("*log*")
    return key.decode() if isinstance(key, bytes) else key


@pytest.mark.parametrize("damage", ["first", "middle", "last", "all", "foreign", "forged"])
def test_what_the_hot_log_lacks_comes_from_the_outbox(
    bench: Workbench, redis_url: str, damage: str
) -> None:
    bench.send(10)
    bench.publish()
    client = redis.Redis.from_url(redis_url)
    key = log_key(client)
    match damage:
        case "first":
            client.xdel(key, "1-0", "2-0")
        case "middle":
            client.xdel(key, "5-0")
        case "last":
            client.xdel(key, "9-0", "10-0")
        case "all":
            client.flushdb()
        case "foreign":
            client.xadd(key, {"hello": "world"})
        case "forged":
            client.delete(key)
            client.xadd(key, {"e": "1 - -\nnonsense"}, id="1-0")
    client.close()
    consumer = bench.consumer(write_effect)
    while bench.checkpoint() < 10:
        if consumer.step().is_idle:
            consumer.wait(threading.Event())
    assert effects(bench) == list(range(1, 11))


def test_a_position_in_no_tier_blocks_and_is_never_skipped(
    bench: Workbench, redis_url: str
) -> None:
    bench.send(3)
    bench.publish()
    with redis.Redis.from_url(redis_url) as client:
        client.xdel(log_key(client), "2-0")
    bench.connection.execute("DELETE FROM events.outbox_event WHERE position = 2")
    consumer = bench.consumer(write_effect)
    with heard(signals.ConsumerBlocked) as blocked:
        for _ in range(4):
            consumer.step()
    assert effects(bench) == [1]
    assert [signal.position for signal in blocked] == [2]


def test_a_position_that_is_missed_while_waiting_is_handled_when_it_is_back(
    bench: Workbench, redis_url: str
) -> None:
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(write_effect)
    run_until_idle(consumer)
    bench.send(2)
    bench.publish()
    with redis.Redis.from_url(redis_url) as client:
        client.xdel(log_key(client), "2-0")
    move = "UPDATE events.outbox_event SET stream_name = %s WHERE position = 2"
    bench.connection.execute(move, ("elsewhere",))
    consumer.wait(threading.Event())
    bench.connection.execute(move, ("orders",))
    with heard(signals.ConsumerBlocked) as blocked:
        assert consumer.step().pause_seconds
        run_until_idle(consumer)
    assert [signal.position for signal in blocked] == [2]
    assert effects(bench) == [1, 1, 2]


def test_without_redis_postgresql_serves_the_reads(database_url: str) -> None:
    bench = Workbench(database_url, None)
    bench.connection.execute("CREATE TABLE effect (serial bigserial, n bigint)")
    bench.send(10)
    bench.publish()
    run_until_idle(bench.consumer(write_effect, batch_size=4))
    assert effects(bench) == list(range(1, 11))
    bench.close()


# ── where it starts, who it is ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("start", "handled"), [("earliest", [1, 2, 3, 4]), ("latest", []), (3, [3, 4])]
)
def test_a_new_consumer_starts_where_it_says(
    bench: Workbench, start: Any, handled: list[int]
) -> None:
    bench.send(4)
    bench.publish()
    run_until_idle(bench.consumer(write_effect, start=start))
    assert effects(bench) == handled


def test_a_known_consumer_goes_on_where_it_was(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    first = bench.consumer(write_effect)
    run_until_idle(first)
    first.close()
    bench.send(2)
    bench.publish()
    run_until_idle(bench.consumer(write_effect, start="latest"))
    assert effects(bench) == [1, 2, 1, 2]


def test_a_consumer_cannot_change_its_stream(bench: Workbench) -> None:
    bench.consumer(write_effect)
    with pytest.raises(RegistrationError, match="reads 'orders' according to the database"):
        bench.consumer(write_effect, stream_name="invoices")


# ── leases ─────────────────────────────────────────────────────────────────────────────────────


def test_only_the_holder_of_the_lease_works(bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    holder = bench.consumer(write_effect)
    rival = bench.consumer(write_effect)
    run_until_idle(holder)
    assert rival.step().pause_seconds > 0
    holder.close()
    assert rival.step().is_idle
    assert effects(bench) == [1, 2]


@pytest.mark.parametrize("shape", ["session", "cursor", "async"])
def test_a_worker_whose_lease_was_taken_commits_nothing(bench: Workbench, shape: str) -> None:
    def take_the_lease() -> None:
        bench.connection.execute(
            "UPDATE events.stream_lease SET owner_id = 'rival', term = term + 1"
            " WHERE role = 'consumer:test.consumer'"
        )

    def on_session(event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        take_the_lease()

    def on_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
        cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.n,))
        take_the_lease()

    async def on_async(event: Placed, session: AsyncSession) -> None:
        await session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        take_the_lease()

    bench.send(3)
    bench.publish()
    handlers: dict[str, Any] = {"session": on_session, "cursor": on_cursor, "async": on_async}
    consumer = bench.consumer(handlers[shape])
    with pytest.raises(LeaseLost):
        consumer.step()
    assert effects(bench) == []
    assert bench.settled() == []
    assert bench.checkpoint() == 0


def test_a_checkpoint_that_moved_meanwhile_refuses_the_commit(bench: Workbench) -> None:
    def meddling(event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        bench.connection.execute("UPDATE events.stream_lease SET checkpoint = 7")

    bench.send(3)
    bench.publish()
    with pytest.raises(LeaseLost):
        bench.consumer(meddling).step()
    assert effects(bench) == []


def test_an_expired_lease_refuses_the_commit_even_if_nobody_took_it(bench: Workbench) -> None:
    def slow(event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        bench.connection.execute("UPDATE events.stream_lease SET lease_until = '-infinity'")

    bench.send(1)
    bench.publish()
    with pytest.raises(LeaseLost):
        bench.consumer(slow).step()
    assert effects(bench) == []


# ── sending from handlers ──────────────────────────────────────────────────────────────────────


class Billed(Event, type="billed", version=1):
    n: int


def chained(sender: Sender, how: str) -> Any:
    def on_session(event: Placed, session: Session) -> None:
        sender.send(session, "invoices", Billed(n=event.n), metadata={"own": True})
        try:
            with session.begin_nested():
                sender.send(session, "invoices", Billed(n=-event.n))
                raise KeyError
        except KeyError:
            pass

    def on_connection(event: Placed, connection: psycopg.Connection[Any]) -> None:
        sender.send(connection, "invoices", Billed(n=event.n))

    async def on_async(event: Placed, session: AsyncSession) -> None:
        sender.send(session, "invoices", Billed(n=event.n))

    return {"session": on_session, "connection": on_connection, "async": on_async}[how]


@pytest.mark.parametrize("how", ["session", "connection", "async"])
def test_what_a_handler_sends_commits_with_its_effects(bench: Workbench, how: str) -> None:
    sender = Sender(schema="events", payload_bytes_max=10_000, metadata_bytes_max=10_000)
    bench.connection.execute(
        """SELECT events.send('orders', 'placed', jsonb_build_object('n', n),
                  metadata => '{"traceparent": "00-1-1-01"}') FROM generate_series(1, 3) n"""
    )
    bench.publish()
    run_until_idle(bench.consumer(chained(sender, how)))
    sent = bench.connection.execute(
        "SELECT o.payload->>'n', o.metadata->>'traceparent', c.payload->>'n'"
        "  FROM events.outbox_event o JOIN events.outbox_event c"
        "    ON c.event_uuid::text = o.metadata->>'causation_id'"
        " WHERE o.stream_name = 'invoices' ORDER BY o.id"
    ).fetchall()
    assert sent == [(str(n), "00-1-1-01", str(n)) for n in (1, 2, 3)]


def test_what_a_failing_handler_sends_is_never_sent(bench: Workbench) -> None:
    sender = Sender(schema="events", payload_bytes_max=10_000, metadata_bytes_max=10_000)

    def failing(event: Placed, session: Session) -> None:
        sender.send(session, "invoices", Billed(n=event.n))
        if event.n == 2:
            raise ValueError

    bench.send(2)
    bench.publish()
    consumer = bench.consumer(failing)
    for _ in range(4):
        consumer.step()
    sent = bench.rows(
        "SELECT payload->>'n' FROM events.outbox_event WHERE stream_name = 'invoices'"
    )
    assert sent == ["1"]


def test_a_connection_lost_in_mid_batch_is_no_attempt(bench: Workbench) -> None:
    def cut(event: Placed, session: Session) -> None:
        session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})
        bench.connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'penstock test worker' AND datname = current_database()"
        )
        session.execute(text("SELECT 1"))

    bench.send(2)
    bench.publish()
    consumer = bench.consumer(cut)
    with heard(signals.EventFailed) as failures, pytest.raises(ServerUnavailable):
        consumer.step()
    assert failures == []
    assert effects(bench) == []


def test_a_lease_that_runs_out_cuts_the_connection_that_is_in_use_by_then(
    bench: Workbench,
) -> None:
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(write_effect)
    run_until_idle(consumer)
    consumer._workplace.renew(is_doubtful=True)
    bench.send(1)
    bench.publish()
    lease = consumer._lease
    assert lease is not None
    (keeper,) = (keeper for keeper in bench.keepers if keeper.is_held(lease))
    held = keeper._held[lease.stream_name, lease.role]
    assert held.end is not None
    held.end()
    with pytest.raises(ServerUnavailable):
        run_until_idle(consumer)
    assert effects(bench) == [1]


@pytest.mark.parametrize("handler", [asynchronously, on_psycopg_cursor])
def test_a_connection_lost_between_batches_is_told_by_nobody_but_us(
    bench: Workbench, handler: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(handler)
    run_until_idle(consumer)
    bench.connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'penstock test worker' AND datname = current_database()"
    )
    bench.send(1)
    bench.publish()
    with pytest.raises(ServerUnavailable):
        run_until_idle(consumer)
    assert [record for record in caplog.records if record.name.startswith("psycopg")] == []


@pytest.mark.parametrize(
    "error",
    [psycopg.OperationalError("the handler's other database is away"), TimeoutError("slow")],
)
def test_trouble_with_somebody_elses_server_is_an_attempt(
    bench: Workbench, error: Exception
) -> None:
    bench.send(1)
    bench.publish()
    consumer = bench.consumer(Moody(1, error).on_session)
    with heard(signals.EventFailed) as failures:
        consumer.step()
    assert len(failures) == 1


def test_a_consumer_whose_next_events_are_in_no_tier_waits_and_says_so(
    database_url: str,
) -> None:
    def ignore(event: Placed) -> None: ...

    with (
        closing(Workbench(database_url, None)) as bench,
        heard(signals.ConsumerBlocked) as blocked,
    ):
        bench.send(3)
        bench.publish()
        consumer = bench.consumer(ignore)
        bench.connection.execute("DELETE FROM events.outbox_event")
        progress = consumer.step()
        assert (progress.moved, bench.settled()) == (0, [])
        assert [signal.position for signal in blocked] == [1]


def test_a_consumer_that_waits_for_its_handlers_to_end_does_not_look_hung(
    bench: Workbench,
) -> None:
    """It ends with every broken connection, and begins again."""
    is_called, may_end = threading.Event(), threading.Event()

    def handle(event: Placed) -> None:
        is_called.set()
        may_end.wait(SOON_SECONDS)

    bench.send(1)
    bench.publish()
    bench.consumer(handle)
    consumer, pulse = bench._stages[-1], LoopPulse("consumer")
    assert isinstance(consumer, Consumer)
    consumer._crew, consumer._excused = Crew(), pulse.excused
    consumer.step()
    assert is_called.wait(SOON_SECONDS)
    thread = threading.Thread(target=consumer.close)
    thread.start()
    wait_until(lambda: pulse.is_well(hung_after_seconds=0.0), what="it is excused")
    may_end.set()
    thread.join(SOON_SECONDS)
    assert bench.settled() == [(1, "handled")]
