"""`penstock quarantine`: who crashed too often, and letting them try again."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, print_json, table
from penstock.errors import OperationRefused, UsageError
from penstock.ops.quarantine import QuarantinedConsumer, read_all
from penstock.ops.quarantine import release as release_from_quarantine

NAME_HELP = "The full name, or the part after the pipeline's where only one has it."

application = typer.Typer(
    help="Consumers that crashed too often and are not started again.",
    no_args_is_help=True,
)


@application.command("list")
def list_quarantined(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who is quarantined, why, and how they crashed."""
    invocation = invocation_of(context)
    with invocation.connect("quarantine") as connection:
        found = read_all(connection, invocation.settings.schema)
    if json_output:
        print_json([consumer.as_json() for consumer in found])
        return
    rows = [
        (c.name, c.stream_name, c.reason, _exit_codes(c), c.host, f"{c.quarantined_at:%F %T%z}")
        for c in found
    ]
    headings = ("Consumer", "Stream", "Reason", "Exit codes", "Host", "Since")
    console.print(table("Quarantine", headings, rows))


@application.command("release")
def release(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=NAME_HELP)] = None,
    release_all: Annotated[bool, typer.Option("--all", help="Release everybody.")] = False,
) -> None:
    """Let running supervisors start a consumer again, within seconds."""
    if (name is None) != release_all:
        raise UsageError("Name one consumer, or say --all.")
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("quarantine") as connection:
        if name is not None:
            name = _full_name(name, [found.name for found in read_all(connection, schema)])
        released = release_from_quarantine(connection, name, schema)
    for released_name in released:
        console.print(f"{released_name} is released; supervisors start it within seconds.")
    if not released:
        console.print("Nobody is quarantined.")


def _exit_codes(consumer: QuarantinedConsumer) -> str:
    return " ".join(
        "silent" if crash["was_silent"] else str(crash["exit_code"]) for crash in consumer.crashes
    )


def _full_name(given: str, names: list[str]) -> str:
    """The one that is meant. Raises OperationRefused where there is none."""
    meant = [given] if given in names else [n for n in names if n.endswith(f".{given}")]
    if len(meant) == 1:
        return meant[0]
    close = meant or difflib.get_close_matches(given, names, n=1)
    there_are = f"quarantined are: {', '.join(names) or 'none'}."
    advice = f"did you mean {' or '.join(close)}?" if close else there_are
    raise OperationRefused(f"{given!r} is not quarantined; {advice} Nothing was changed.")
