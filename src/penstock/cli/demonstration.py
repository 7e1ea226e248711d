"""`penstock demo`: the whole line at work, on servers of its own."""

from __future__ import annotations

from typing import Annotated

import typer

EVENTS_DEFAULT = 20_000


def demo(
    events: Annotated[int, typer.Option(help="How many events to send.", min=1)] = EVENTS_DEFAULT,
    seed: Annotated[int | None, typer.Option(help="Repeat the same run.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Watch events flow through crashes, each handled exactly once."""
    from penstock.cli.demo import run_demo  # noqa: PLC0415 - no other command needs its displays

    raise typer.Exit(run_demo(events, seed, json_output))
