"""Pipelined statements gather until somebody needs an answer, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from penstock.stores import patient_pipeline as module
from penstock.stores.patient_pipeline import STATEMENTS_MAX, patient_pipeline


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url) as connection:
        connection.execute("CREATE TABLE effect (n bigint)")
        connection.commit()
        yield connection


def insert(connection: psycopg.Connection[Any], count: int) -> psycopg.Cursor[Any]:
    cursor = connection.cursor()
    for n in range(count):
        cursor.execute("INSERT INTO effect VALUES (%s) RETURNING n", (n,))
    return cursor


def test_statements_gather_up_to_a_limit(connection: psycopg.Connection[Any]) -> None:
    with patient_pipeline(connection) as pipeline:
        assert pipeline is not None
        insert(connection, 3)
        assert len(pipeline.command_queue) >= 3
        insert(connection, STATEMENTS_MAX)
        assert len(pipeline.command_queue) < STATEMENTS_MAX
    assert connection.execute("SELECT count(*) FROM effect").fetchone() == (3 + STATEMENTS_MAX,)


def test_a_fetch_sends_what_has_gathered(connection: psycopg.Connection[Any]) -> None:
    with patient_pipeline(connection):
        assert insert(connection, 3).fetchone() == (2,)


def test_an_error_comes_out_at_the_sync_at_the_latest(connection: psycopg.Connection[Any]) -> None:
    def divide_by_zero() -> None:
        with patient_pipeline(connection) as pipeline:
            assert pipeline is not None
            connection.execute("SELECT 1/0")
            insert(connection, 3)
            pipeline.sync()

    with pytest.raises(psycopg.errors.DivisionByZero):
        divide_by_zero()
    connection.rollback()
    assert connection.execute("SELECT count(*) FROM effect").fetchone() == (0,)


def test_who_fails_meanwhile_is_heard_and_nothing_else_is_told(
    connection: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail_behind_a_statement_that_fails() -> None:
        with patient_pipeline(connection):
            connection.execute("SELECT 'a secret'::int")
            raise LookupError

    with pytest.raises(LookupError) as caught:
        fail_behind_a_statement_that_fails()
    assert caught.value.__context__ is None
    assert caplog.records == []
    connection.rollback()
    assert connection.execute("SELECT 1").fetchone() == (1,)


def test_statements_go_one_by_one_where_psycopgs_internals_are_unknown(
    connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IS_SUPPORTED", False)
    with patient_pipeline(connection) as pipeline:
        assert pipeline is None
        insert(connection, 3)
    assert connection.execute("SELECT count(*) FROM effect").fetchone() == (3,)
