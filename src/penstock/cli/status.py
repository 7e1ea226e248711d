"""`penstock status`: how far streams and consumers are, and who works on them."""

from __future__ import annotations

import threading
from typing import Annotated

import typer
from rich.console import Group
from rich.live import Live

from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, print_json, table
from penstock.errors import UsageError
from penstock.ops.status import LeaseStatus, Status, StreamStatus, read_status

REFRESH_SECONDS = 1.0


def status(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
) -> None:
    """Show streams, consumers with their lag, and leases."""
    invocation = invocation_of(context)
    if watch and json_output:
        raise UsageError("--watch and --json exclude each other: call --json as often as you like.")
    schema = invocation.settings.schema
    with invocation.connect("status") as connection:
        if json_output:
            print_json(read_status(connection, schema).as_json())
        elif watch:
            try:
                with Live(console=console, auto_refresh=False) as live:
                    while True:
                        live.update(_shown(read_status(connection, schema)), refresh=True)
                        threading.Event().wait(REFRESH_SECONDS)
            except KeyboardInterrupt:
                return
        else:
            console.print(_shown(read_status(connection, schema)))


def _shown(found: Status) -> Group:
    return Group(
        table(
            "Streams",
            ("Stream", ">Head", ">Published", ">Unnumbered", ">Oldest waits"),
            [
                (s.name, s.head, s.published, _unnumbered(s), _duration(s.oldest_unnumbered_ms))
                for s in found.streams
            ],
        ),
        table(
            "Consumers",
            ("Consumer", "Stream", ">Checkpoint", ">Lag, events", ">Lag, time"),
            [
                (c.name, c.stream_name, c.checkpoint, c.lag_events, _duration(c.lag_ms))
                for c in found.consumers
            ],
        ),
        table(
            "Leases",
            ("Stream", "Role", "Owner", ">Term", ">Expires in", ">Checkpoint"),
            [
                (x.stream_name, x.role, x.owner_id, x.term, _expiry(x), x.checkpoint)
                for x in found.leases
            ],
        ),
    )


def _unnumbered(stream: StreamStatus) -> str:
    return f"{stream.unnumbered}+" if stream.unnumbered_is_capped else str(stream.unnumbered)


def _expiry(lease: LeaseStatus) -> str:
    if lease.expires_in_seconds is None:
        return "free"
    return f"{lease.expires_in_seconds:.0f} s" if lease.is_held else "ran out"


def _duration(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    return f"{milliseconds / 1000:,.1f} s"
