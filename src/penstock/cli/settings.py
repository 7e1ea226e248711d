"""`penstock config`: every setting and who decided it."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, print_json, table


def config(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print each setting with its value and its origin; passwords are masked."""
    resolved = invocation_of(context).resolved
    shown = resolved.shown()
    if json_output:
        print_json(
            {
                name: {"value": value, "origin": resolved.origins[name]}
                for name, value in shown.items()
            }
        )
        return
    rows = [
        (name, "none" if value is None else value, resolved.origins[name])
        for name, value in shown.items()
    ]
    console.print(table("Settings", ("Setting", "Value", "Origin"), rows))
