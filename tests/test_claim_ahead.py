"""Claimed ahead: the handler runs while the server still looks which events are new."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session

from penstock.core.wire import Entry
from penstock.pipeline.signature import HandlerPlan
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed

INSERT = "INSERT INTO effect (n) VALUES (%s)"
SETTLE = (
    "INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)"
    " SELECT 'test.consumer', event_uuid, position, 'dead'"
    "   FROM events.outbox_event WHERE position = 2"
)
WORKERS = (
    "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'penstock test worker'"
)
STATES = (
    "SELECT state FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name = 'penstock test worker'"
)
REGISTER = (
    "INSERT INTO events.consumer (name, stream_name, start_position, settled_to)"
    " VALUES ('test.consumer', 'orders', 1, 3)"
)


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (n bigint PRIMARY KEY)")
    bench.send(3)
    bench.publish()
    yield bench
    bench.close()


@pytest.fixture
def heard() -> Iterator[list[signals.Signal]]:
    """Everything that is emitted meanwhile."""
    found: list[signals.Signal] = []
    subscribe_to_all(found.append)
    yield found
    unsubscribe(found.append)


def through_a_session(event: Placed, session: Session) -> None:
    session.execute(text("INSERT INTO effect (n) VALUES (:n)"), {"n": event.n})


def through_a_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(INSERT, (event.n,))


def reading_back(event: Placed, connection: psycopg.Connection[Any]) -> None:
    returned = connection.execute(INSERT + " RETURNING n", (event.n,))
    assert returned.fetchone() == (event.n,)


def in_lists(events: list[Placed], connection: psycopg.Connection[Any]) -> None:
    with connection.cursor().copy("COPY effect (n) FROM STDIN") as copy:
        for event in events:
            copy.write_row((event.n,))


def in_a_savepoint_of_the_driver(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    with driver.transaction():
        driver.execute(INSERT, (event.n,))


def in_a_pipeline_of_the_driver(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    with driver.pipeline():
        driver.execute(INSERT, (event.n,))


def through_one_cursor_that_prepares(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    for n in (-event.n, event.n):
        driver.cursor().execute(INSERT, (n,), prepare=True)
    driver.cursor().execute("DELETE FROM effect WHERE n < %s", (0,))


def many_at_once(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    driver.cursor().executemany(INSERT, [(event.n,)])


def row_by_row(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    returned = list(driver.cursor().stream(INSERT + " RETURNING n", (event.n,)))
    assert returned == [(event.n,)]


def in_several_statements(event: Placed, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    driver.execute(f"SELECT 1; {INSERT}".replace("%s", str(event.n)))


def behind_a_statement_that_fails(event: Placed, session: Session) -> None:
    with pytest.raises(DataError), session.begin_nested():
        session.execute(text("SELECT 1 / (:n - :n)"), {"n": event.n})
    through_a_session(event, session)


HANDLERS = [
    through_a_session,
    through_one_cursor_that_prepares,
    many_at_once,
    row_by_row,
    in_several_statements,
    behind_a_statement_that_fails,
    through_a_cursor,
    reading_back,
    in_lists,
    in_a_savepoint_of_the_driver,
    in_a_pipeline_of_the_driver,
]


def claims(heard: list[signals.Signal]) -> list[int]:
    return [signal.new for signal in heard if isinstance(signal, signals.BatchClaimed)]


def failures(heard: list[signals.Signal]) -> list[signals.Signal]:
    unwanted = (signals.BatchRolledBack, signals.EventFailed)
    return [signal for signal in heard if isinstance(signal, unwanted)]


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_batch_of_new_events_is_handled_once(
    bench: Workbench, handler: Callable[..., None], heard: list[signals.Signal]
) -> None:
    run_until_idle(bench.consumer(handler))
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3]
    assert claims(heard) == [3]
    assert failures(heard) == []


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_batch_with_a_settled_event_is_run_again_without_it(
    bench: Workbench, handler: Callable[..., None], heard: list[signals.Signal]
) -> None:
    bench.connection.execute(SETTLE)
    run_until_idle(bench.consumer(handler))
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 3]
    assert bench.settled() == [(1, "handled"), (2, "dead"), (3, "handled")]
    assert bench.checkpoint() == 3
    assert claims(heard) == [3, 2]
    assert failures(heard) == []


@pytest.mark.parametrize("handler", HANDLERS)
def test_a_handler_that_stumbles_over_the_effect_of_a_settled_event_has_not_failed(
    bench: Workbench, handler: Callable[..., None], heard: list[signals.Signal]
) -> None:
    bench.connection.execute(SETTLE)
    bench.connection.execute(INSERT, (2,))
    run_until_idle(bench.consumer(handler))
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3]
    assert failures(heard) == []


def test_a_handler_that_fails_by_itself_is_not_excused(
    bench: Workbench, heard: list[signals.Signal]
) -> None:
    bench.connection.execute(INSERT, (2,))
    consumer = bench.consumer(through_a_session)
    while not any(isinstance(signal, signals.EventFailed) for signal in heard):
        consumer.step()
    assert bench.settled() == [(1, "handled"), (2, "parked")]


@pytest.fixture
def rival(bench: Workbench) -> Iterator[psycopg.Connection[Any]]:
    """Whoever waits for the claim waits for this transaction, until somebody ends it."""
    name = sql.Identifier(bench.connection.info.dbname)
    bench.connection.execute(sql.SQL("ALTER DATABASE {} SET lock_timeout = '5s'").format(name))
    with psycopg.connect(bench.settings.database_url) as rival:
        rival.execute(SETTLE)
        yield rival


def test_the_handler_is_called_before_the_claim_is_answered(
    bench: Workbench, rival: psycopg.Connection[Any], heard: list[signals.Signal]
) -> None:
    def end_the_rival(event: Placed) -> None:
        rival.rollback()

    bench.consumer(end_the_rival).step()
    assert failures(heard) == []
    assert bench.checkpoint() == 3


def test_a_claim_that_is_refused_is_what_has_failed(
    bench: Workbench, rival: psycopg.Connection[Any], heard: list[signals.Signal]
) -> None:
    name = sql.Identifier(bench.connection.info.dbname)
    bench.connection.execute(sql.SQL("ALTER DATABASE {} SET lock_timeout = '10ms'").format(name))
    consumer = bench.consumer(through_a_session)
    consumer.step()
    (rolled_back,) = failures(heard)
    assert isinstance(rolled_back, signals.BatchRolledBack)
    assert "lock timeout" in rolled_back.reason
    rival.rollback()
    run_until_idle(consumer)
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3]
    assert failures(heard) == [rolled_back]


def test_a_list_is_decoded_before_the_claim_is_answered(
    bench: Workbench,
    rival: psycopg.Connection[Any],
    heard: list[signals.Signal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = HandlerPlan.decode

    def end_the_rival(plan: HandlerPlan, entry: Entry) -> Any:
        rival.rollback()
        return decode(plan, entry)

    monkeypatch.setattr(HandlerPlan, "decode", end_the_rival)
    bench.consumer(in_lists).step()
    assert failures(heard) == []
    assert bench.checkpoint() == 3


def test_no_settled_event_is_shown_where_earlier_lanes_have_been(bench: Workbench) -> None:
    bench.connection.execute(REGISTER)
    bench.connection.execute(SETTLE)
    seen: list[int] = []

    def see(event: Placed) -> None:
        seen.append(event.n)

    run_until_idle(bench.consumer(see))
    assert seen == [1, 3]


def test_no_settled_event_is_shown_to_a_consumer_that_takes_them_singly(
    bench: Workbench, heard: list[signals.Signal]
) -> None:
    bench.connection.execute(SETTLE)
    seen: list[int] = []

    def see(event: Placed) -> None:
        seen.append(event.n)

    run_until_idle(bench.consumer(see, batch_size=1))
    assert seen == [1, 3]
    assert claims(heard) == [1, 0, 1]


@pytest.mark.parametrize("handler", HANDLERS)
def test_between_batches_the_connection_is_idle_and_closes_without_a_word(
    bench: Workbench, handler: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    consumer = bench.consumer(handler)
    run_until_idle(consumer)
    assert bench.rows(STATES) == ["idle"]
    consumer.close()
    assert [record for record in caplog.records if record.name.startswith("psycopg")] == []


@pytest.mark.parametrize("handler", HANDLERS)
def test_batches_share_a_connection(bench: Workbench, handler: Callable[..., None]) -> None:
    consumer = bench.consumer(handler, batch_size=2)
    before = bench.rows(WORKERS)
    run_until_idle(consumer)
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3]
    assert bench.rows(WORKERS) == before


@pytest.mark.parametrize("handler", [through_a_session, through_a_cursor, in_lists])
def test_the_next_batch_is_read_while_the_server_is_at_work_on_a_full_one(
    bench: Workbench, heard: list[signals.Signal], handler: Callable[..., None]
) -> None:
    consumer = bench.consumer(handler, batch_size=2)
    assert consumer.step().moved == 2
    kinds = [type(signal) for signal in heard]
    before = kinds[: kinds.index(signals.BatchCommitted)]
    assert before.count(signals.HotTierRead) == 2
    run_until_idle(consumer)
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3]
