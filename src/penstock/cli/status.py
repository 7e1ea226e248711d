"""`penstock status`: how far streams and consumers are, who works on them, what is wrong."""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Annotated

import psycopg
import typer
from rich.console import Group
from rich.live import Live

from penstock.cli.consumers import state_of
from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import console, duration, print_json, table
from penstock.errors import PenstockError, UsageError
from penstock.ops.check import LAG_SECONDS_MAX, Problem, find_problems
from penstock.ops.status import ConsumerStatus, LeaseStatus, Status, StreamStatus, read_status

REFRESH_SECONDS = 1.0
CONSUMER_HEADINGS = (
    *("Consumer", "Stream", "State", ">Checkpoint", ">Lag, events", ">Lag, time"),
    *(">Parked", ">Dead letters"),
)


def status(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say only what is wrong; exit 1 if anything is.")
    ] = False,
    lag_seconds: Annotated[
        float, typer.Option(min=0, help="With --check: a consumer may be so late.")
    ] = LAG_SECONDS_MAX,
) -> None:
    """Show streams, consumers with their lag, and leases."""
    invocation = invocation_of(context)
    if watch and (json_output or check):
        raise UsageError("--watch stands alone: call --json or --check as often as you like.")
    if check:
        _check(invocation, lag_seconds, json_output=json_output)
        return
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


def _check(invocation: Invocation, lag_seconds: float, *, json_output: bool) -> None:
    problems = _problems(invocation, lag_seconds)
    if json_output:
        print_json({"healthy": not problems, "problems": [asdict(found) for found in problems]})
    else:
        for problem in problems:
            print(problem.message)
        if not problems:
            print("Healthy.")
    if problems:
        raise typer.Exit(1)


def _problems(invocation: Invocation, lag_seconds: float) -> tuple[Problem, ...]:
    settings = invocation.settings
    try:
        with invocation.connect("status") as connection:
            return find_problems(read_status(connection, settings.schema), lag_seconds)
    except (PenstockError, psycopg.OperationalError) as error:
        # A probe wants an answer in its own form, also from a database that gives none.
        return (Problem("database", settings.schema, str(error).strip()),)


def _shown(found: Status) -> Group:
    return Group(
        table(
            "Streams",
            ("Stream", ">Head", ">Published", ">Unnumbered", ">Oldest waits"),
            [
                (_title(s), s.head, s.published, _unnumbered(s), duration(s.oldest_unnumbered_ms))
                for s in found.streams
            ],
        ),
        table(
            "Consumers",
            CONSUMER_HEADINGS,
            [
                (
                    c.name,
                    c.stream_name,
                    state_of(c),
                    c.checkpoint,
                    c.lag_events,
                    duration(c.lag_ms),
                    _parked(c),
                    c.dead_letters,
                )
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


def _parked(consumer: ConsumerStatus) -> str:
    if not consumer.parked_events:
        return "0"
    held = f", {consumer.held_keys} held" if consumer.held_keys else ""
    return f"{consumer.parked_events} in {consumer.parked_keys} keys{held}"


def _title(stream: StreamStatus) -> str:
    return f"{stream.name} (of another service)" if stream.is_source else stream.name


def _unnumbered(stream: StreamStatus) -> str:
    return f"{stream.unnumbered}+" if stream.unnumbered_is_capped else str(stream.unnumbered)


def _expiry(lease: LeaseStatus) -> str:
    if lease.expires_in_seconds is None:
        return "free"
    return f"{lease.expires_in_seconds:.0f} s" if lease.is_held else "ran out"
