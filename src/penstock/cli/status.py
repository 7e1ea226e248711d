"""`penstock status`: whether all is well, and if not where; how far everybody is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, Final, TypeVar

import psycopg
import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import console, duration, lines, plain, print_json, span, table
from penstock.core.top import by_trouble, share
from penstock.errors import PenstockError, UsageError
from penstock.ops.check import LAG_SECONDS_MAX, Problem, find_problems, things_to_look_at
from penstock.ops.status import (
    ConsumerStatus,
    LeaseStatus,
    Status,
    StreamStatus,
    read_status,
    trouble_with,
)
from penstock.ops.timer_status import TimerStatus

REFRESH_SECONDS = 1.0
TABLE_LINES: Final = 5
"""What a table has besides its rows."""
LEAST_ROWS: Final = (4, 3, 2)
"""What consumers, streams and leases have on a screen before one of them has more."""
WAITING_MS: Final = 1000
FOLDED_ROWS_MAX: Final = 100
"""Longer tables are written in plain lines: fitting a thousand rows to a width takes a second."""
STREAM_HEADINGS = ("Stream", ">Head", ">Published", ">Unnumbered", ">Oldest waits")
CONSUMER_HEADINGS = (
    *("Consumer", "Stream", "State", ">Checkpoint", ">Lag, events", ">Lag, time"),
    *(">Parked", ">Dead letters"),
)
LEASE_HEADINGS = ("Stream", "Role", "Owner", ">Term", ">Expires in", ">Checkpoint")

Item = TypeVar("Item")


def status(
    context: typer.Context,
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Say only what is wrong; exit 1 if anything is.")
    ] = False,
    lag_seconds: Annotated[
        float, typer.Option(min=0, help="A consumer may be so late before it is a problem.")
    ] = LAG_SECONDS_MAX,
    everything: Annotated[
        bool, typer.Option("--all", help="Every row, also those that the screen has no room for.")
    ] = False,
) -> None:
    """Say whether all is well, and if not where; then streams, consumers with their lag, leases."""
    invocation = invocation_of(context)
    if watch and (json_output or check):
        raise UsageError("--watch stands alone: call --json or --check as often as you like.")
    if watch and not console.is_terminal:
        raise UsageError("--watch needs a terminal. Without one, call `penstock status` again.")
    if check:
        _check(invocation, lag_seconds, json_output=json_output)
        return
    schema = invocation.settings.schema
    with invocation.connect("status") as connection:
        if json_output:
            print_json(_as_json(read_status(connection, schema), lag_seconds))
        elif watch:
            try:
                with Live(console=console, auto_refresh=False) as live:
                    while True:
                        found = read_status(connection, schema)
                        shown = _shown(found, lag_seconds, everything=everything)
                        live.update(shown, refresh=True)
                        threading.Event().wait(REFRESH_SECONDS)
            except KeyboardInterrupt:
                return
        else:
            found = read_status(connection, schema)
            console.print(_shown(found, lag_seconds, everything=everything))


def _as_json(found: Status, lag_seconds: float) -> dict[str, Any]:
    problems = find_problems(found, lag_seconds)
    verdict = {"healthy": not problems, "problems": [asdict(problem) for problem in problems]}
    return {**verdict, **found.as_json()}


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
    except (PenstockError, psycopg.Error) as error:
        # A probe wants an answer in its own form, also from a database that gives none.
        return (Problem("database", settings.schema, str(error).strip()),)


def _shown(found: Status, lag_seconds: float, *, everything: bool) -> Group:
    problems = find_problems(found, lag_seconds)
    found = _worst_first(found)
    counts = [len(found.consumers), len(found.streams), len(found.leases)]
    if everything or not console.is_terminal:
        return _drawn(found, problems, len(problems), counts)
    told = _fitting(problems, console.height // 3)
    room = screen = console.height - 1
    while True:
        shown = _drawn(found, problems, told, share(room, counts, LEAST_ROWS, overhead=TABLE_LINES))
        excess = len(console.render_lines(shown, pad=False)) - screen
        if excess <= 0 or room <= 0:
            return shown
        # Half of it: cells that take several lines go along with their rows.
        room -= (excess + 1) // 2


def _worst_first(found: Status) -> Status:
    by_name = {consumer.name: consumer for consumer in found.consumers}
    names = by_trouble((trouble_with(each), name) for name, each in by_name.items())
    streams = sorted(
        found.streams, key=lambda each: (each.oldest_unnumbered_ms < WAITING_MS, each.name)
    )
    return replace(found, streams=tuple(streams), consumers=tuple(by_name[n] for n in names))


def _fitting(problems: Sequence[Problem], room: int) -> int:
    told = 0
    for problem in problems:
        room -= len(_line(problem).wrap(console, console.width))
        if room < 0:
            break
        told += 1
    return max(told, 1)


def _drawn(found: Status, problems: Sequence[Problem], told: int, counts: Sequence[int]) -> Group:
    consumers, streams, leases = counts
    return Group(
        *_verdict(found, problems, told),
        *_cut("Streams", STREAM_HEADINGS, found.streams, _stream, streams),
        *_cut("Consumers", CONSUMER_HEADINGS, found.consumers, _consumer, consumers),
        *_cut("Leases", LEASE_HEADINGS, found.leases, _lease, leases),
        Text(_timers(found.timers)),
    )


def _verdict(found: Status, problems: Sequence[Problem], told: int) -> list[Text]:
    if problems:
        noun = "problem" if len(problems) == 1 else "problems"
        said = [Text(f"{len(problems):,} {noun}", "bold red"), *map(_line, problems[:told])]
        if told < len(problems):
            rest = len(problems) - told
            said.append(Text(f"… and {rest:,} more: `penstock status --check`"))
    else:
        said = [Text("healthy", "bold green")]
    if things := things_to_look_at(found):
        said.append(Text(f"To look at: {', '.join(things)}."))
    return [*said, Text()]


def _line(problem: Problem) -> Text:
    return Text(f"! {plain(problem.message)}")


def _cut(
    title: str,
    headings: Sequence[str],
    items: Sequence[Item],
    row: Callable[[Item], Sequence[object]],
    count: int,
) -> list[RenderableType]:
    if items and not count:
        return []
    if count < len(items):
        title = f"{title} ({count:,} of {len(items):,}; --all shows the rest)"
    drawn = table if count <= FOLDED_ROWS_MAX else lines
    return [drawn(title, headings, map(row, items[:count]))]


def _stream(stream: StreamStatus) -> tuple[object, ...]:
    waits = duration(stream.oldest_unnumbered_ms)
    return (_title(stream), stream.head, stream.published, _unnumbered(stream), waits)


def _consumer(consumer: ConsumerStatus) -> tuple[object, ...]:
    return (
        consumer.name,
        consumer.stream_name,
        state_of(consumer),
        consumer.checkpoint,
        consumer.lag_events,
        duration(consumer.lag_ms),
        _parked(consumer),
        consumer.dead_letters,
    )


def _lease(lease: LeaseStatus) -> tuple[object, ...]:
    return (
        lease.stream_name,
        lease.role,
        lease.owner_id,
        lease.term,
        _expiry(lease),
        lease.checkpoint,
    )


def _timers(timers: TimerStatus) -> str:
    more = "+" if timers.is_capped else ""
    parts = f"timers: {timers.pending:,}{more} pending"
    if timers.late or timers.held:
        parts += f" ({timers.late:,} late, {timers.held:,} held)"
    if timers.next_due_ms is None:
        return parts
    next_due = span(abs(timers.next_due_ms))
    is_due = timers.next_due_ms < 0
    return f"{parts}, next due {f'{next_due} ago' if is_due else f'in {next_due}'}"


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


def state_of(consumer: ConsumerStatus) -> str:
    """The state in words, with who is behind it."""
    if consumer.paused_at is None:
        return consumer.state.value
    reason = f": {consumer.pause_reason}" if consumer.pause_reason else ""
    also = "quarantined; " if consumer.quarantined_at is not None else ""
    return (
        f"{also}paused by {consumer.paused_by} since {consumer.paused_at:%Y-%m-%d %H:%M %Z}{reason}"
    )
