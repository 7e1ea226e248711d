"""`penstock migrate`: the schema, brought up to date, checked, or printed."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import console
from penstock.errors import UsageError
from penstock.stores import migrations
from penstock.stores.configuration import default_of, gather


def migrate(
    context: typer.Context,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if something is pending.")
    ] = False,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print what an empty database would be given.")
    ] = False,
) -> None:
    """Create Penstock's schema or bring it up to date; safe to repeat, and to run twice at once."""
    invocation = invocation_of(context)
    if check and sql:
        raise UsageError("--check and --sql exclude each other: choose one.")
    if sql:
        print(migrations.render_sql(_schema_of(invocation)), end="")
        return
    settings = invocation.settings
    if check:
        missing = migrations.pending(settings.database_url, settings.schema)
        _report(missing, f"Pending in schema {settings.schema}:")
        raise typer.Exit(1 if missing else 0)
    applied = migrations.migrate(settings.database_url, settings.schema)
    _report(applied, f"Applied to schema {settings.schema}:")


def _report(names: list[str], heading: str) -> None:
    if not names:
        console.print("The schema is up to date.")
        return
    console.print(heading)
    for name in names:
        console.print(f"  {name}")


def _schema_of(invocation: Invocation) -> str:
    """Printing needs no database, so it must not ask for one."""
    if invocation.app is not None:
        return invocation.settings.schema
    given = gather({})
    return str(given["schema"].value if "schema" in given else default_of("schema"))
