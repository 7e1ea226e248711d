"""Versioned, additive migrations of the schema, applied under a lock, all or nothing."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import psycopg

from penstock.errors import SchemaMismatch
from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries, with_schema


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
        Migration(int(path.name[:4]), path.name.removesuffix(".sql"), path.read_text())
        for path in found
    )


def migrate(url: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """Bring the schema up to date. Returns the migrations applied; safe to run twice at once."""
    queries = Queries("migration.sql", schema)
    with connect(url, "penstock migrate", autocommit=False) as connection:
        # Whoever comes second waits here, then finds nothing left to do.
        connection.execute(queries["lock"])
        applied = _applied(connection, schema)
        if applied is None:
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


def pending(url: str, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The migrations that `migrate` would apply."""
    with connect(url, "penstock migrate --check") as connection:
        applied = _applied(connection, schema) or {}
    _refuse_foreign_history(applied)
    return [m.name for m in migrations() if m.version not in applied]


def render_sql(schema: str = DEFAULT_SCHEMA) -> str:
    """Everything that `migrate` executes on an empty database, for a DBA to read or run."""
    queries = Queries("migration.sql", schema)
    parts = ["BEGIN;", queries["lock"] + ";", queries["create"]]
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
