"""Versioned, additive migrations of the schema, applied under a lock, all or nothing."""

from __future__ import annotations

import hashlib
import logging
import threading
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg

from penstock.errors import OperationRefused, SchemaMismatch, ServerUnsuitable
from penstock.stores.migrations.onlooker import looking_on
from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries, with_schema

ATTEMPTS_MAX = 12
"""About a minute; waiting for another migration takes none of them."""
PAUSE_SECONDS = 3.0
"""Longer than a table is waited for, so that others do more work than they wait."""
IN_THE_WAY = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)

_logger = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of this folder."""

    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        """Tells an applied file from a changed one."""
        return hashlib.sha256(self.sql.encode()).hexdigest()


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations of this release, in order."""
    found = sorted(
        (path for path in files(__package__).iterdir() if path.name.endswith(".sql")),
        key=lambda path: path.name,
    )
    return tuple(
        Migration(
            int(path.name[:4]), path.name.removesuffix(".sql"), path.read_text(encoding="utf-8")
        )
        for path in found
    )


def migrate(url: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """Bring the schema up to date. Returns the migrations applied; safe to run twice at once.

    A table that another transaction keeps is waited for a moment at a time, since everybody else
    waits meanwhile. Raises OperationRefused where that lasts.
    """
    told = ""
    with connect(url, "penstock migrate") as connection:
        for attempt in range(ATTEMPTS_MAX):
            if attempt:
                _logger.warning("The migration waits for %s, holding nothing meanwhile.", told)
                threading.Event().wait(PAUSE_SECONDS)
            blockers: list[str] = []
            try:
                return _migrate_at_once(connection, url, schema, blockers)
            except IN_THE_WAY:
                told = ", ".join(blockers) or "a session that is gone or cannot be seen"
    raise OperationRefused(
        f"A table of the schema was in use at each of {ATTEMPTS_MAX} attempts, at last by {told}. "
        "Nothing was changed. Let that transaction end, or end it with pg_terminate_backend(pid), "
        "then give the command again."
    )


def _migrate_at_once(
    connection: psycopg.Connection[Any], url: str, schema: str, blockers: list[str]
) -> list[str]:
    """One attempt, in one transaction. Raises one of IN_THE_WAY where a table is not to be had."""
    queries = Queries("migration.sql", schema)
    with connection.transaction():
        connection.execute(queries["prepare"])
        # Whoever comes second waits here, then finds nothing left to do.
        connection.execute(queries["lock"])
        connection.execute(queries["limit_waiting"])
        row = connection.execute(queries["own_pid"]).fetchone()
        assert row is not None
        with looking_on(url, row[0], blockers):
            return _apply(connection, schema)


def _apply(connection: psycopg.Connection[Any], schema: str) -> list[str]:
    queries = Queries("migration.sql", schema)
    applied = _applied(connection, schema)
    if applied is None:
        _require_every_letter(connection)
        connection.execute(queries["create"])
        applied = {}
    _refuse_foreign_history(applied)
    todo = [m for m in migrations() if m.version not in applied]
    for migration in todo:
        connection.execute(with_schema(migration.sql, schema))
        connection.execute(
            queries["record"],
            {
                "version": migration.version,
                "name": migration.name,
                "checksum": migration.checksum,
            },
        )
    return [migration.name for migration in todo]


def _require_every_letter(connection: psycopg.Connection[Any]) -> None:
    """Raise ServerUnsuitable where an event could not be stored, or come back as no text at all."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise ServerUnsuitable(
            f"The database {connection.info.dbname!r} is encoded as {encoding}, which cannot hold "
            "every event. Nothing was touched; use one that was made with CREATE DATABASE … "
            "ENCODING 'UTF8' TEMPLATE template0."
        )


def pending(url: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The migrations that `migrate` would apply."""
    with connect(url, "penstock migrate --check") as connection:
        applied = _applied(connection, schema) or {}
    _refuse_foreign_history(applied)
    return [m.name for m in migrations() if m.version not in applied]


def render_sql(schema: str = DEFAULT_SCHEMA) -> str:
    """Everything that `migrate` executes on an empty database, for a DBA to read or run."""
    queries = Queries("migration.sql", schema)
    parts = ["BEGIN;", f"{queries['lock']};", f"{queries['limit_waiting']};", queries["create"]]
    for migration in migrations():
        parts += [with_schema(migration.sql, schema), _record_literal(migration, schema)]
    return "\n\n".join([*parts, "COMMIT;", ""])


def require_current(connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> None:
    """Raise SchemaMismatch, saying what to do, unless the schema is this release's."""
    applied = _applied(connection, schema)
    if applied is None:
        raise SchemaMismatch(
            f"The database has no schema {schema!r} yet. Nothing was touched; "
            "run `penstock migrate` and start again."
        )
    _refuse_foreign_history(applied)
    missing = [m.name for m in migrations() if m.version not in applied]
    if missing:
        raise SchemaMismatch(
            f"The schema {schema!r} is older than this release: it lacks {', '.join(missing)}. "
            "Nothing was touched; run `penstock migrate` and start again."
        )


def _record_literal(migration: Migration, schema: str) -> str:
    literal = Queries("migration.sql", schema)["record_literal"]
    return literal.format(
        version=migration.version, name=migration.name, checksum=migration.checksum
    )


def _applied(connection: psycopg.Connection[Any], schema: str) -> dict[int, str] | None:
    """Checksums by version; None where the schema does not exist."""
    queries = Queries("migration.sql", schema)
    row = connection.execute(queries["inspect"], {"schema": schema}).fetchone()
    assert row is not None
    has_schema, has_history = row
    if not has_schema:
        return None
    if not has_history:
        raise SchemaMismatch(
            f"A schema {schema!r} exists that Penstock did not create. Nothing was touched; "
            "set PENSTOCK_SCHEMA to another name."
        )
    return dict(connection.execute(queries["history"]).fetchall())


def _refuse_foreign_history(applied: dict[int, str]) -> None:
    known = {migration.version: migration for migration in migrations()}
    for version, checksum in applied.items():
        if version not in known:
            raise SchemaMismatch(
                f"The schema is newer than this release (it has migration {version}). "
                "Nothing was touched; install the release that made it, or a newer one."
            )
        if checksum != known[version].checksum:
            raise SchemaMismatch(
                f"Migration {known[version].name} was applied with other content than this "
                "release has. Nothing was touched; restore the released file."
            )
