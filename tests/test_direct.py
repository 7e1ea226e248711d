"""Statements given to libpq directly: answers and errors are what they always are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from penstock.stores.direct import BEGIN, COMMIT, Direct, Row, Value
from penstock.stores.patient_pipeline import patient_pipeline
from penstock.stores.postgres import is_lost
from penstock.stores.worker_connection import cut

MANY_BYTES = 20_000_000
"""More than a socket takes before the other end reads."""


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        yield connection


@pytest.fixture
def direct(connection: psycopg.Connection[Any]) -> Direct:
    return Direct(connection)


def effects(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT count(*) FROM effect").fetchone()
    assert row is not None
    return int(row[0])


def test_values_arrive_as_what_the_statement_makes_of_them(direct: Direct) -> None:
    text = (
        "SELECT %(a)s::bigint + %(a)s::bigint, %(b)s::text, %(c)s::bool, %(d)s::int[], %(e)s::text"
    )
    values: dict[str, Value] = {"a": 2**61, "b": "☃ 'quoted' %", "c": True, "d": "{1,2}", "e": None}
    assert direct.ask(text, values) == [(2**62, "☃ 'quoted' %", True, [1, 2], None)]
    assert direct.ask("SELECT n FROM effect WHERE n = %(n)s", {"n": 1}) == []


def test_a_group_commits_as_a_whole(connection: psycopg.Connection[Any], direct: Direct) -> None:
    direct.send(BEGIN, ("INSERT INTO effect VALUES (%(n)s)", {"n": 1}), COMMIT)
    direct.collect()
    assert effects(connection) == 1


def test_an_error_prevents_the_commit_and_leaves_the_connection_usable(
    connection: psycopg.Connection[Any], direct: Direct
) -> None:
    direct.send(
        BEGIN,
        ("INSERT INTO effect VALUES (%(n)s)", {"n": 1}),
        ("SELECT 1 / %(n)s::int", {"n": 0}),
        COMMIT,
    )
    with pytest.raises(psycopg.errors.DivisionByZero):
        direct.collect()
    connection.rollback()
    assert effects(connection) == 0
    assert direct.ask("SELECT %(n)s::int", {"n": 5}) == [(5,)]


def test_groups_may_follow_each_other_before_anything_is_awaited(
    connection: psycopg.Connection[Any], direct: Direct
) -> None:
    first = direct.send(BEGIN, ("INSERT INTO effect VALUES (%(n)s) RETURNING n", {"n": 1}))
    direct.send(COMMIT)
    direct.collect()
    assert direct.rows(first) == [(1,)]
    assert effects(connection) == 1


def test_a_group_behind_one_that_failed_commits_nothing(
    connection: psycopg.Connection[Any], direct: Direct
) -> None:
    direct.send(
        BEGIN,
        ("INSERT INTO effect VALUES (%(n)s)", {"n": 1}),
        ("SELECT 1 / %(n)s::int", {"n": 0}),
    )
    direct.send(("INSERT INTO effect VALUES (%(n)s)", {"n": 2}), COMMIT)
    with pytest.raises(psycopg.errors.DivisionByZero):
        direct.collect()
    connection.rollback()
    assert effects(connection) == 0


def test_a_statement_may_be_longer_than_a_socket_takes(direct: Direct) -> None:
    text = "x" * MANY_BYTES
    assert direct.ask("SELECT length(%(t)s), %(t)s", {"t": text}) == [(MANY_BYTES, text)]


def test_a_connection_that_ends_meanwhile_is_an_error_and_not_a_wait(
    connection: psycopg.Connection[Any], direct: Direct, database_url: str
) -> None:
    pid = connection.info.backend_pid
    direct.send(("SELECT pg_sleep(%(seconds)s)", {"seconds": 600}))
    with psycopg.connect(database_url) as other:
        other.execute("SELECT pg_terminate_backend(%s)", (pid,))
    with pytest.raises(psycopg.OperationalError):
        direct.collect()
    assert connection.closed
    with pytest.raises(psycopg.OperationalError):
        direct.send("SELECT 1")


@pytest.mark.parametrize("meanwhile", [None, lambda _rows: None])
def test_a_connection_that_ends_with_a_question_is_an_error_too(
    connection: psycopg.Connection[Any],
    direct: Direct,
    meanwhile: Callable[[list[Row]], Any] | None,
) -> None:
    end = "SELECT pg_terminate_backend(%(pid)s)"
    with pytest.raises(psycopg.OperationalError):
        direct.ask(end, {"pid": connection.info.backend_pid}, meanwhile)
    assert connection.closed


def test_in_a_pipeline_of_psycopgs_everything_stays_in_order(
    connection: psycopg.Connection[Any], direct: Direct
) -> None:
    insert = "INSERT INTO effect VALUES (%(n)s) RETURNING (SELECT count(*) FROM effect)"
    with patient_pipeline(connection) as pipeline:
        assert pipeline is not None
        first = pipeline.put(direct, BEGIN, (insert, {"n": 1}))
        cursor = connection.execute(insert, {"n": 2})
        last = pipeline.put(direct, (insert, {"n": 3}))
        pipeline.put(direct, COMMIT)
        pipeline.finish()
        assert direct.rows(first) == [(0,)]
        assert cursor.fetchall() == [(1,)]
        assert direct.rows(last) == [(2,)]
    assert effects(connection) == 3


def test_in_a_pipeline_of_psycopgs_the_first_error_is_told(
    connection: psycopg.Connection[Any], direct: Direct
) -> None:
    def fail() -> None:
        with patient_pipeline(connection) as pipeline:
            assert pipeline is not None
            pipeline.put(direct, BEGIN, ("SELECT 1 / %(n)s::int", {"n": 0}))
            connection.execute("INSERT INTO effect VALUES (1)")
            pipeline.put(direct, COMMIT)
            pipeline.finish()

    with pytest.raises(psycopg.errors.DivisionByZero):
        fail()
    connection.rollback()
    assert effects(connection) == 0


@pytest.mark.parametrize("meanwhile", [None, lambda _rows: None])
def test_an_error_of_the_statement_leaves_the_connection_usable(
    direct: Direct, meanwhile: Callable[[list[Row]], Any] | None
) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        direct.ask("SELECT 1 / %(n)s::int", {"n": 0}, meanwhile)
    assert direct.ask("SELECT %(n)s::int", {"n": 5}, meanwhile) == [(5,)]


@pytest.mark.parametrize("meanwhile", [None, lambda _rows: None])
def test_a_connection_that_is_found_dead_is_taken_for_lost(
    connection: psycopg.Connection[Any],
    direct: Direct,
    meanwhile: Callable[[list[Row]], Any] | None,
) -> None:
    cut(connection)
    with pytest.raises(psycopg.Error) as raised:
        direct.ask("SELECT %(n)s::int", {"n": 5}, meanwhile)
    assert is_lost(raised.value), "a worker would end for it"


@pytest.mark.parametrize("meanwhile", [None, lambda _rows: None])
def test_an_error_at_the_commit_is_told(
    connection: psycopg.Connection[Any],
    direct: Direct,
    meanwhile: Callable[[list[Row]], Any] | None,
) -> None:
    connection.execute("ALTER TABLE effect ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    insert = "INSERT INTO effect VALUES (%(n)s), (%(n)s) RETURNING n"
    with pytest.raises(psycopg.errors.UniqueViolation):
        direct.ask(insert, {"n": 1}, meanwhile)
    assert effects(connection) == 0
    assert direct.ask("SELECT %(n)s::int", {"n": 5}, meanwhile) == [(5,)]


def test_rows_may_be_looked_at_before_they_are_committed(
    connection: psycopg.Connection[Any], direct: Direct, database_url: str
) -> None:
    seen: list[tuple[list[Row], int]] = []
    with psycopg.connect(database_url, autocommit=True) as other:
        # Its COMMIT waits for this lock, which is given back when the rows have been seen.
        connection.execute(
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " PERFORM pg_advisory_xact_lock(1); RETURN NULL; END $$;"
            "CREATE CONSTRAINT TRIGGER late AFTER INSERT ON effect"
            " DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()"
        )
        other.execute("SELECT pg_advisory_lock(1)")

        def look(rows: list[Row]) -> None:
            seen.append((rows, effects(other)))
            other.execute("SELECT pg_advisory_unlock(1)")

        insert = "INSERT INTO effect VALUES (%(n)s) RETURNING n"
        assert direct.ask(insert, {"n": 1}, look) == [(1,)]
        assert seen == [([(1,)], 0)]
        assert effects(other) == 1
