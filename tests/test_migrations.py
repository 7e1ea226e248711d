"""Migrations read alike everywhere, wait for whoever is in the way, and hold up nobody long."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from penstock.errors import (
    OperationRefused,
    ServerUnavailable,
    ServerUnsuitable,
    SettingsError,
)
from penstock.stores import migrations as module
from penstock.stores.migrations import Migration, migrate, migrations, pending, render_sql
from penstock.stores.postgres import trouble_in_words
from penstock.stores.queries import Queries
from penstock.stores.servers import Servers
from tests.waiting import SOON_SECONDS, wait_until

LATER = Migration(9999, "9999_later", "ALTER TABLE events.consumer ADD COLUMN later integer")
MIGRATE = "import sys; from penstock.stores.migrations import migrate; migrate(sys.argv[1])"
TABLE_SECONDS = 2.0
"""For so long a migration waits for a table at a time."""
READ = """
from pathlib import Path
from penstock.stores import queries
from penstock.stores.migrations import migrations
folder = Path(queries.__file__).parent
for path in sorted((folder / "sql").iterdir()):
    queries.Queries(path.name)
for path in sorted((folder / "lua").iterdir()):
    queries.lua(path.stem)
print(*(migration.checksum for migration in migrations()), sep="\\n")
"""


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Migration:
    """A release with one more migration than the database has."""
    released = (*migrations(), LATER)
    monkeypatch.setattr(module, "migrations", lambda: released)
    return LATER


@pytest.fixture
def reader(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A transaction that somebody has left open."""
    with psycopg.connect(database_url, application_name="forgotten") as connection:
        connection.execute("SELECT FROM events.consumer")
        yield connection


@pytest.fixture
def beside(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Everybody else, who does not wait for ever."""
    limit = f"-c statement_timeout={int(SOON_SECONDS)}s"
    with psycopg.connect(database_url, autocommit=True, options=limit) as connection:
        yield connection


@pytest.mark.slow
def test_a_migration_that_waits_for_a_reader_lets_everybody_else_go_on(
    later: Migration,
    database_url: str,
    reader: psycopg.Connection[Any],
    beside: psycopg.Connection[Any],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        try:
            migrating = pool.submit(migrate, database_url)
            wait_until(lambda: waiting_seconds(beside) is not None, what="it waits for the table")
            beside.execute("SELECT FROM events.consumer")
            assert not migrating.done()
        finally:
            reader.rollback()
        assert migrating.result(SOON_SECONDS) == [later.name]


@pytest.mark.slow
def test_who_is_in_the_way_is_named_and_nothing_was_changed(
    later: Migration,
    database_url: str,
    reader: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "ATTEMPTS_MAX", 3)
    monkeypatch.setattr(module, "PAUSE_SECONDS", 1.0)
    with (
        caplog.at_level(logging.WARNING, "penstock"),
        pytest.raises(OperationRefused, match="Nothing was changed") as refused,
    ):
        migrate(database_url)
    blocker = f"pid {reader.info.backend_pid} (forgotten, role {reader.info.user})"
    assert blocker in str(refused.value)
    assert blocker in caplog.text
    first, second = [record.created for record in caplog.records]
    assert second - first > TABLE_SECONDS + module.PAUSE_SECONDS, "others had no turn"
    reader.rollback()
    assert migrate(database_url) == [later.name]


@pytest.mark.slow
def test_a_migration_gives_way_in_a_circle_and_begins_again(
    database_url: str,
    reader: psycopg.Connection[Any],
    beside: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    greedy = f"SELECT pg_advisory_xact_lock(4711); {LATER.sql}"
    released = (*migrations(), replace(LATER, sql=greedy))
    monkeypatch.setattr(module, "migrations", lambda: released)
    # Whoever looks for circles first has to give way: the migration, after one second.
    reader.execute("SET LOCAL deadlock_timeout = '1h'")
    with ThreadPoolExecutor(1) as pool:
        migrating = pool.submit(migrate, database_url)
        wait_until(lambda: waiting_seconds(beside) is not None, what="it waits for the table")
        reader.execute("SELECT pg_advisory_xact_lock(4711)")
        reader.rollback()
        assert migrating.result(SOON_SECONDS) == [LATER.name]


def test_who_migrates_second_waits_whatever_its_role_is_set_to(
    later: Migration, database_url: str, beside: psycopg.Connection[Any]
) -> None:
    impatient = f"{database_url}?options=-c%20lock_timeout%3D50ms"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(database_url) as first:
        first.execute(Queries("migration.sql")["lock"])
        migrating = pool.submit(migrate, impatient)
        wait_until(
            lambda: migrating.done() or (waiting_seconds(beside) or 0) > 0.2,
            what="it waits for longer than its role would",
        )
        first.rollback()
        assert migrating.result(SOON_SECONDS) == [later.name]


@pytest.mark.skipif(sys.platform != "linux", reason="the server cannot see that a client is gone")
def test_a_migration_that_was_killed_waits_no_longer(
    database_url: str, beside: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(database_url) as first:
        first.execute(Queries("migration.sql")["lock"])
        with subprocess.Popen([sys.executable, "-c", MIGRATE, database_url]) as process:
            wait_until(lambda: waiting_seconds(beside) is not None, what="it waits for the first")
            process.kill()
        wait_until(lambda: waiting_seconds(beside) is None, what="its session has gone")


def test_the_printed_sql_holds_up_nobody_for_long() -> None:
    lines = render_sql().splitlines()
    assert lines.index("SET LOCAL lock_timeout = '2s';") < lines.index("CREATE SCHEMA events;")


def test_a_schema_cannot_have_a_name_that_postgresql_keeps_for_itself(database_url: str) -> None:
    with psycopg.connect(database_url) as connection:
        keywords = connection.execute(
            "SELECT word FROM pg_get_keywords() WHERE catcode IN ('R', 'T')"
        ).fetchall()
    for name in ("pg_bank", *(word for (word,) in keywords)):
        with pytest.raises(SettingsError, match="keeps for itself"):
            render_sql(name)
    assert "CREATE SCHEMA timer;" in render_sql("timer"), "as a schema, this is a name like others"


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_does_not_hold_every_letter_is_refused(
    servers: Servers, encoding: str
) -> None:
    name = f"penstock_test_{encoding.lower()}"
    url = urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
    create = "CREATE DATABASE {} ENCODING {} TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    with psycopg.connect(servers.database_url, autocommit=True) as administration:
        if administration.info.server_version >= 150000:
            create += " LOCALE_PROVIDER libc"
        names = sql.Identifier(name), sql.Literal(encoding)
        administration.execute(sql.SQL(create).format(*names))
        try:
            with pytest.raises(ServerUnsuitable, match=f"is encoded as {encoding}"):
                migrate(url)
            assert len(pending(url)) == len(migrations()), "nothing was touched"
        finally:
            drop = "DROP DATABASE {} WITH (FORCE)"
            administration.execute(sql.SQL(drop).format(names[0]))


def test_locks_and_limits_that_end_a_command_are_told_in_words(database_url: str) -> None:
    lock = "SELECT pg_advisory_xact_lock(1)"
    with psycopg.connect(database_url) as first, psycopg.connect(database_url) as second:
        first.execute(lock)
        for limit in ("lock_timeout", "statement_timeout"):
            second.execute(f"SET LOCAL {limit} = '10ms'")
            with pytest.raises(psycopg.OperationalError) as raised:
                second.execute(lock)
            second.rollback()
            told = trouble_in_words(raised.value)
            assert isinstance(told, ServerUnavailable)
            assert str(raised.value) in str(told)


@pytest.mark.parametrize("state", ["25P03", "25P04", "57P05"])
def test_a_time_limit_that_ends_the_connection_is_told_in_words(state: str) -> None:
    told = trouble_in_words(psycopg.errors.lookup(state)("terminating connection due to a timeout"))
    assert isinstance(told, ServerUnavailable)
    assert "broke: terminating connection" in str(told)


def test_a_deadlock_is_told_in_words(database_url: str) -> None:
    with psycopg.connect(database_url) as first, psycopg.connect(database_url) as second:
        for number, connection in enumerate((first, second)):
            connection.execute("SET LOCAL deadlock_timeout = '10ms'")
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [number])
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(end_in_a_circle, first, 1)
            errors = [end_in_a_circle(second, 0), other.result(SOON_SECONDS)]
    (error,) = (error for error in errors if error is not None)
    assert "give the command again" in str(trouble_in_words(error))


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_what_a_release_brings_reads_alike_under_every_locale(locale: str) -> None:
    world = {**os.environ, "LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", READ],
        env=world,
        capture_output=True,
        text=True,
        timeout=2 * SOON_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [migration.checksum for migration in migrations()]


# ── the words used above ───────────────────────────────────────────────────────────────────────


def waiting_seconds(connection: psycopg.Connection[Any]) -> float | None:
    """How long a migration has waited for a lock; None where none does."""
    row = connection.execute(
        "SELECT extract(epoch FROM clock_timestamp() - query_start)::float FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'penstock migrate' "
        "AND wait_event_type = 'Lock'"
    ).fetchone()
    return None if row is None else float(row[0])


def end_in_a_circle(connection: psycopg.Connection[Any], number: int) -> psycopg.Error | None:
    try:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", [number])
    except psycopg.errors.DeadlockDetected as error:
        return error
    finally:
        connection.rollback()
    return None
