"""`penstock bench`: how fast the line is on these servers."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, print_json, table

EVENTS_DEFAULT = 20_000
SECONDS_DEFAULT = 5.0


def bench(
    context: typer.Context,
    events: Annotated[
        int, typer.Option(metavar="N", min=1000, max=1_000_000, help="Move so many for the rates.")
    ] = EVENTS_DEFAULT,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Send one at a time for so long, for latencies.")
    ] = SECONDS_DEFAULT,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the servers of the settings, or embedded ones, in a database that is dropped again.

    Each stage works alone for its rate. Latencies are from commit to commit, of one event at a
    time, with all stages in one process.
    """
    from penstock.cli.bench import SENT_AT_ONCE, run_bench  # noqa: PLC0415 - no other command needs its events

    figures = run_bench(invocation_of(context), events, seconds)
    if json_output:
        print_json(figures)
        return
    rows: list[tuple[object, ...]] = [
        (f"send, {SENT_AT_ONCE} a transaction", f"{figures['sent_per_second']:,.0f}", None, None),
        ("publish", f"{figures['published_per_second']:,.0f}", None, None),
    ]
    for name, rate in figures["handled_per_second"].items():
        latency = figures["commit_to_commit_ms"][name]
        rows.append(
            (f"handle: {name}", f"{rate:,.0f}", f"{latency['p50']:.2f}", f"{latency['p99']:.2f}")
        )
    headings = ("Stage", ">Events/s", ">p50 ms", ">p99 ms")
    console.print(table(f"{events:,} events", headings, rows))
