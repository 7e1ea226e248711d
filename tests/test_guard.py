"""The transaction belongs to the worker: no handler ends it, by whatever road it tries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.sql import SQL
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock.core.transaction_control import Control, find_control
from penstock.errors import CommitInTransactionError, ServerUnavailable
from penstock.telemetry import signals
from penstock.telemetry.bus import subscribe, unsubscribe
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Iterator[Workbench]:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute("CREATE TABLE effect (n bigint); CREATE TABLE stray (n bigint)")
    yield bench
    bench.close()


STRAY = "INSERT INTO stray VALUES (1)"


def commits_session(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    session.commit()


def commits_in_a_helper(event: Placed, session: Session) -> None:
    def helper(session: Session) -> None:
        with session.begin():
            session.execute(text(STRAY))

    helper(session)


def commits_the_session_transaction(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def commits_sqlalchemy_connection(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    session.connection().commit()


def commits_raw_connection(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    driver: Any = session.connection().connection.driver_connection
    driver.commit()


def commits_by_text(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    session.execute(text("/* it's */ commit -- now"))


def commits_by_text_on_psycopg(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute(STRAY)
    connection.execute("COMMIT")


def commits_by_composed_text_on_psycopg(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute(STRAY)
    connection.execute(SQL("{}").format(SQL("COMMIT")))


def commits_among_statements(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO stray VALUES (1); COMMIT; INSERT INTO stray VALUES (2)")


def commits_psycopg(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute(STRAY)
    connection.commit()


def commits_through_a_cursor(event: Placed, cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute(STRAY)
    cursor.execute(b"END")


def swallows_the_refusal(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    try:
        session.commit()
    except CommitInTransactionError:
        session.execute(text(STRAY))


def swallows_the_refusal_in_a_list(events: list[Placed], session: Session) -> None:
    swallows_the_refusal(events[0], session)


def fires_the_seal_early(event: Placed, session: Session) -> None:
    session.execute(text(STRAY))
    session.execute(text("SET CONSTRAINTS ALL IMMEDIATE"))


async def commits_async_session(event: Placed, session: AsyncSession) -> None:
    await session.execute(text(STRAY))
    await session.commit()


async def commits_async_text(event: Placed, session: AsyncSession) -> None:
    await session.execute(text(STRAY))
    await session.execute(text("COMMIT"))


async def commits_async_psycopg(event: Placed, connection: psycopg.AsyncConnection[Any]) -> None:
    await connection.execute(STRAY)
    await connection.commit()


def rolls_back_session(event: Placed, session: Session) -> None:
    session.rollback()


def closes_session(event: Placed, session: Session) -> None:
    session.close()


def rolls_back_sqlalchemy_connection(event: Placed, session: Session) -> None:
    session.connection().rollback()


def rolls_back_psycopg(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.rollback()


def rolls_back_by_text(event: Placed, session: Session) -> None:
    session.execute(text("ROLLBACK"))


def rolls_back_writes_and_commits(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute("ROLLBACK; INSERT INTO stray VALUES (1); COMMIT")


async def rolls_back_async(event: Placed, session: AsyncSession) -> None:
    await session.rollback()


def failures_of(bench: Workbench, handler: Callable[..., Any]) -> list[Any]:
    bench.send(3)
    bench.publish()
    found: list[Any] = []
    subscribe(signals.EventFailed, found.append)
    consumer = bench.consumer(handler)
    try:
        for _ in range(20):
            consumer.step()
            if found:
                break
    finally:
        unsubscribe(found.append)
    return found


@pytest.mark.parametrize(
    "handler",
    [
        commits_session,
        commits_in_a_helper,
        commits_the_session_transaction,
        commits_sqlalchemy_connection,
        commits_raw_connection,
        commits_by_text,
        commits_by_text_on_psycopg,
        commits_by_composed_text_on_psycopg,
        commits_among_statements,
        commits_psycopg,
        commits_through_a_cursor,
        swallows_the_refusal,
        swallows_the_refusal_in_a_list,
        fires_the_seal_early,
        commits_async_session,
        commits_async_text,
        commits_async_psycopg,
    ],
)
def test_no_commit_gets_through_and_each_is_named(bench: Workbench, handler: Any) -> None:
    (failure, *_) = failures_of(bench, handler)
    assert failure.error.startswith("CommitInTransactionError")
    assert bench.rows("SELECT n FROM stray") == []
    assert bench.settled() == [(1, "parked")]


@pytest.mark.parametrize(
    "handler",
    [
        rolls_back_session,
        closes_session,
        rolls_back_sqlalchemy_connection,
        rolls_back_psycopg,
        rolls_back_by_text,
        rolls_back_async,
    ],
)
def test_no_rollback_gets_through_and_each_is_named(bench: Workbench, handler: Any) -> None:
    (failure, *_) = failures_of(bench, handler)
    assert failure.error.startswith("RollbackInTransactionError")
    assert bench.settled() == [(1, "parked")]


def test_a_rollback_followed_by_writes_and_a_commit_leaves_nothing(bench: Workbench) -> None:
    (failure, *_) = failures_of(bench, rolls_back_writes_and_commits)
    assert "InTransactionError" in failure.error
    assert bench.rows("SELECT n FROM stray") == []


# ── what fails by itself ───────────────────────────────────────────────────────────────────────


class Base(DeclarativeBase): ...


class Invoice(Base):
    __tablename__ = "invoice"
    number: Mapped[int] = mapped_column(primary_key=True)


def adds_what_is_there(event: Placed, session: Session) -> None:
    session.add(Invoice(number=1))


def flushes_what_is_there(event: Placed, session: Session) -> None:
    session.add(Invoice(number=1))
    session.flush()


def swallows_what_the_flush_says(event: Placed, session: Session) -> None:
    with suppress(IntegrityError):
        flushes_what_is_there(event, session)


def swallows_what_the_flush_says_in_a_list(events: list[Placed], session: Session) -> None:
    swallows_what_the_flush_says(events[0], session)


def meets_it_in_a_query(event: Placed, session: Session) -> None:
    session.add(Invoice(number=1))
    session.execute(select(Invoice)).all()


async def adds_what_is_there_async(event: Placed, session: AsyncSession) -> None:
    session.add(Invoice(number=1))
    await session.flush()


@pytest.mark.parametrize(
    "handler",
    [
        adds_what_is_there,
        flushes_what_is_there,
        swallows_what_the_flush_says,
        swallows_what_the_flush_says_in_a_list,
        meets_it_in_a_query,
        adds_what_is_there_async,
    ],
)
def test_a_flush_that_fails_says_why(bench: Workbench, handler: Any) -> None:
    """SQLAlchemy rolls back after it, which is nobody's misdeed."""
    bench.connection.execute("CREATE TABLE invoice (number integer PRIMARY KEY)")
    bench.connection.execute("INSERT INTO invoice VALUES (1)")
    (failure, *_) = failures_of(bench, handler)
    assert failure.error.startswith("IntegrityError")
    assert "invoice_pkey" in failure.error
    assert bench.settled() == [(1, "parked")]


def test_a_flush_that_fails_in_a_savepoint_harms_nobody(bench: Workbench) -> None:
    bench.connection.execute("CREATE TABLE invoice (number integer PRIMARY KEY)")
    bench.connection.execute("INSERT INTO invoice VALUES (1)")

    def handler(event: Placed, session: Session) -> None:
        with suppress(IntegrityError), session.begin_nested():
            session.add(Invoice(number=1))
        session.execute(text("INSERT INTO effect VALUES (1)"))

    bench.send(3)
    bench.publish()
    run_until_idle(bench.consumer(handler))
    assert bench.settled() == [(1, "handled"), (2, "handled"), (3, "handled")]
    assert bench.rows("SELECT count(*) FROM effect") == [3]


# ── the server's own refusal, with the client's guard out of the way ───────────────────────────


def below_the_guard(sql: bytes) -> Callable[[Placed, psycopg.Connection[Any]], None]:
    """A handler that talks to the server below psycopg, where the guard does not look."""

    def handler(event: Placed, connection: psycopg.Connection[Any]) -> None:
        connection.execute(STRAY)
        if event.n == 2:
            for statement in sql.split(b";"):
                connection.pgconn.exec_(statement)

    return handler


@pytest.mark.parametrize(
    "sql",
    [
        b"COMMIT",
        b"COMMIT;INSERT INTO stray VALUES (2);COMMIT",
        b"SET CONSTRAINTS ALL IMMEDIATE",
        b"ROLLBACK",
        b"ROLLBACK;BEGIN",
    ],
)
def test_the_server_refuses_what_the_guard_cannot_see(bench: Workbench, sql: bytes) -> None:
    bench.send(3)
    bench.publish()
    bench.connection.execute("DELETE FROM stray")
    consumer = bench.consumer(below_the_guard(sql))
    # In a pipeline libpq refuses plain calls; the careful batch is the one that gets there.
    for _ in range(3):
        try:
            consumer.step()
        except ServerUnavailable:
            break
    assert bench.checkpoint() <= 1
    assert len(bench.rows("SELECT n FROM stray")) == bench.checkpoint()


# ── what stays welcome ─────────────────────────────────────────────────────────────────────────


def uses_savepoints(event: Placed, session: Session) -> None:
    session.execute(text("INSERT INTO effect VALUES (:n)"), {"n": event.n})
    nested = session.begin_nested()
    session.execute(text(STRAY))
    nested.rollback()
    with session.begin_nested():
        session.execute(text("UPDATE effect SET n = n WHERE n = :n"), {"n": event.n})


def uses_psycopg_savepoints(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute("INSERT INTO effect VALUES (%s)", (event.n,))
    with connection.transaction(force_rollback=True):
        connection.execute(STRAY)


def writes_about_commits(event: Placed, connection: psycopg.Connection[Any]) -> None:
    connection.execute("CREATE TEMP TABLE IF NOT EXISTS note (t text)")
    connection.execute("INSERT INTO note VALUES ('a; commit; b'), ($$; ROLLBACK;$$)")
    connection.execute("INSERT INTO effect VALUES (%s)", (event.n,))


@pytest.mark.parametrize(
    "handler", [uses_savepoints, uses_psycopg_savepoints, writes_about_commits]
)
def test_savepoints_and_harmless_text_stay_welcome(bench: Workbench, handler: Any) -> None:
    bench.send(4)
    bench.publish()
    run_until_idle(bench.consumer(handler))
    assert bench.rows("SELECT n FROM effect ORDER BY n") == [1, 2, 3, 4]
    assert bench.rows("SELECT n FROM stray") == []


@pytest.mark.parametrize(
    ("sql", "control"),
    [
        ("SELECT 1", None),
        ("commit", Control.COMMIT),
        ("  COMMIT AND CHAIN", Control.COMMIT),
        ("END", Control.COMMIT),
        ("select 1; end", Control.COMMIT),
        ("BEGIN", Control.COMMIT),
        ("start  transaction read only", Control.COMMIT),
        ("PREPARE TRANSACTION 'x'", Control.COMMIT),
        ("PREPARE q AS SELECT 1", None),
        ("SET CONSTRAINTS a, b IMMEDIATE", Control.COMMIT),
        ("SET CONSTRAINTS ALL DEFERRED", None),
        ("ROLLBACK", Control.ROLLBACK),
        ("ABORT", Control.ROLLBACK),
        ("ROLLBACK TO SAVEPOINT a", None),
        ("rollback work to a", None),
        ("RELEASE SAVEPOINT a", None),
        ("SAVEPOINT commit_1", None),
        ("SELECT 'x''; commit; '", None),
        ('SELECT ";commit;"', None),
        ("SELECT $a$; commit; $a$", None),
        ("-- commit\nSELECT 1", None),
        ("/* ; */ COMMIT", Control.COMMIT),
        ("SELECT CASE WHEN true THEN 1 END", None),
        ("UPDATE t SET commit = 1", None),
    ],
)
def test_transaction_control_is_found_in_text(sql: str, control: Control | None) -> None:
    assert find_control(sql) is control


@given(st.text(alphabet=" ;'\"$-/*acmot\n"), st.sampled_from(["commit", "ROLLBACK", "end"]))
def test_a_quoted_word_is_never_taken_for_a_statement(noise: str, word: str) -> None:
    quoted = (noise + ";" + word).replace("'", "''")
    assert find_control(f"SELECT '{quoted}'") is None


@pytest.mark.parametrize(
    ("seal_id", "xid", "says"),
    [
        (7, "1", "transaction was ended inside a handler"),
        (8, None, "seal is missing"),
    ],
)
def test_the_fence_demands_both_the_transaction_and_the_seal_of_the_batch(
    bench: Workbench, seal_id: int, xid: str | None, says: str
) -> None:
    # Each alone would do after a ROLLBACK; each is asked without the other here.
    fence = "SELECT events.fence(%s, 1, 'orders', 'r', 'o', 1, 0, 1)"
    with bench.connection.transaction(force_rollback=True):
        bench.connection.execute(
            "INSERT INTO events.seal (id, xid, fresh)"
            " VALUES (7, coalesce(%s::xid8, pg_current_xact_id()), 1)",
            (xid,),
        )
        with pytest.raises(psycopg.Error, match=says) as refusal:
            bench.connection.execute(fence, (seal_id,))
    assert refusal.value.sqlstate == "PS002"
