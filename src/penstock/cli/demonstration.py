"""`penstock demo`: the whole line at work, on servers of its own."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

EVENTS_DEFAULT = 1000


def demo(
    events: Annotated[int, typer.Option(help="How many events to send.", min=1)] = EVENTS_DEFAULT,
    seed: Annotated[int | None, typer.Option(help="Repeat the same run.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Watch events flow through crashes, each handled exactly once."""
    run_demo = importlib.import_module("penstock.cli.demo").run_demo
    raise typer.Exit(run_demo(events, seed, json_output))
