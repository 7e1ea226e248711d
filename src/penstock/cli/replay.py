"""`penstock replay`: deliver a range again to one consumer only, and see to those under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.letter_options import TIME, By, Json, Why, Yes
from penstock.cli.letter_output import moment
from penstock.cli.output import confirm, console, error_console, print_json, table
from penstock.cli.replay_run import run_replay
from penstock.cli.running import LogChoice, LogFormat, LogLevel
from penstock.core.replays import CANCELLED, Replay, ReplayProgress, is_replay_name
from penstock.errors import OperationRefused, UsageError
from penstock.ops.consumers import Consumers
from penstock.ops.dead_letters import parse_moment
from penstock.ops.replay_planning import ReplayPlan, ReplayPlanner, ReplayRequest
from penstock.ops.replays import ReplayBooks
from penstock.stores.identity import operator_id
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

LOOK_AGAIN_SECONDS = 0.2
CONSUMER_HELP = "Whose handler is called: the full name, or the part after the pipeline's."
NAME_HELP = "The replay: its full name, or the part behind the @."

application = typer.Typer(
    invoke_without_command=True, help="Deliver a range again, to one consumer only."
)

Name = Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP)]
Consumer = Annotated[str | None, typer.Option(metavar="NAME", help=CONSUMER_HELP)]
Stream = Annotated[str | None, typer.Option(metavar="STREAM", help="Its stream, to be sure.")]
First = Annotated[
    int | None, typer.Option("--from", metavar="POSITION", min=1, help="The first event.")
]
Last = Annotated[
    int | None,
    typer.Option("--to", metavar="POSITION", min=1, help="The last one; else all handled so far."),
]
Since = Annotated[str | None, typer.Option(metavar=TIME, help="Events sent at or after this time.")]
Until = Annotated[str | None, typer.Option(metavar=TIME, help="Events sent before this time.")]
Label = Annotated[
    str | None, typer.Option("--name", metavar="REPLAY", help="Else the date and a number.")
]
Resume = Annotated[str | None, typer.Option("--resume", metavar="NAME", help="Continue a replay.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only say how many events, from which tiers.")
]


@application.callback()
def replay(
    context: typer.Context,
    *,
    consumer: Consumer = None,
    stream: Stream = None,
    first: First = None,
    last: Last = None,
    since: Since = None,
    until: Until = None,
    label: Label = None,
    resume: Resume = None,
    dry_run: DryRun = False,
    by: By = None,
    why: Why = "",
    log_level: LogLevel = "warning",
    log_format: LogFormat = None,
    json_output: Json = False,
) -> None:
    """Deliver a range of a stream again to one consumer. Exit 1: some events are dead letters.

    It runs in this process until everything is settled. The live consumer goes on meanwhile,
    untouched, and no order is kept between the two. Ctrl-C pauses it.
    """
    if context.invoked_subcommand is not None:
        return
    invocation = invocation_of(context)
    LogChoice.of(log_level, log_format).apply()
    if resume is not None:
        _resume(invocation, resume, json_output=json_output)
        return
    if consumer is None:
        raise UsageError("Write --consumer NAME with --from or --since; or --resume NAME.")
    now = datetime.now(UTC)
    request = ReplayRequest(
        original=consumer,
        stream_name=stream,
        first=first,
        last=last,
        since=parse_moment("--since", since, now),
        until=parse_moment("--until", until, now),
        label=label,
    )
    if dry_run:
        with _planning(invocation, request) as (planner, found):
            _tell_plan(planner.plan(found), json_output=json_output)
        return
    begun = _begin(invocation, request, by=by or operator_id(), reason=why)
    run_replay(invocation, begun, json_output=json_output)


def _begin(invocation: Invocation, request: ReplayRequest, *, by: str, reason: str) -> Replay:
    _require_application(invocation)
    with _planning(invocation, request) as (planner, found):
        begun = planner.begin(found, by=by, reason=reason).replay
    emit(signals.ReplayBegan(begun.name, begun.stream_name, begun.first, begun.last))
    return begun


@contextmanager
def _planning(
    invocation: Invocation, request: ReplayRequest
) -> Iterator[tuple[ReplayPlanner, ReplayRequest]]:
    """Who plans it, and what was asked for with the consumer's full name."""
    settings, pipeline = invocation.settings, invocation.pipeline
    with invocation.connect("replay") as connection:
        original = Consumers(connection, settings.schema).find(request.original)
        if is_replay_name(original):
            raise UsageError(f"{original} is a replay itself; name the consumer that it is for.")
        sources = [
            pipeline.sources.get(each.options.stream_name)
            for each in pipeline.consumers.values()
            if each.name == original
        ]
        source = sources[0] if sources else None
        yield ReplayPlanner(connection, settings, source), replace(request, original=original)


def _require_application(invocation: Invocation) -> None:
    if invocation.app is None:
        raise UsageError("A replay calls your handler: say where it is with --app.")


def _tell_plan(plan: ReplayPlan, *, json_output: bool) -> None:
    if json_output:
        print_json(plan.as_json())
        return
    replay = plan.replay
    print(
        f"{plan.events:,} events of {replay.stream_name}, {replay.first}..{replay.last}, would be "
        f"delivered again to {replay.original}. Nothing was changed."
    )
    for share in plan.shares:
        print(f"  {share.first}..{share.last} from the {share.tier}")


# ── those under way ────────────────────────────────────────────────────────────────────────────


@application.command("list")
def list_replays(context: typer.Context, json_output: Json = False) -> None:
    """Show the replays that are not over, and those that have left dead letters."""
    with _books(context) as books:
        found = books.all()
    if json_output:
        print_json([progress.as_json() for progress in found])
        return
    headings = ("Replay", "Stream", "Range", "State", ">Passed", ">Parked", ">Dead", "Begun by")
    console.print(table("Replays", headings, map(_row, found)))


def _row(progress: ReplayProgress) -> tuple[object, ...]:
    replay = progress.replay
    return (
        replay.name,
        replay.stream_name,
        f"{replay.first}..{replay.last}",
        progress.state.value,
        f"{progress.passed:,} of {progress.total:,}",
        progress.parked,
        progress.dead,
        f"{progress.requested_by} at {moment(progress.started_at)}",
    )


@application.command("pause")
def pause(context: typer.Context, name: Name, why: Why = "") -> None:
    """Let whoever works on a replay finish its batch and stop; `resume` continues it."""
    with _books(context) as books:
        full_name = books.find(name).replay.name
        paused = books.pause(full_name, by=operator_id(), reason=why)
    print(f"{full_name} is paused." if paused else f"{full_name} was paused already.")


@application.command("resume")
def resume_replay(
    context: typer.Context,
    name: Name,
    *,
    log_level: LogLevel = "warning",
    log_format: LogFormat = None,
    json_output: Json = False,
) -> None:
    """Continue a replay in this process, exactly where it stopped."""
    LogChoice.of(log_level, log_format).apply()
    _resume(invocation_of(context), name, json_output=json_output)


def _resume(invocation: Invocation, name: str, *, json_output: bool) -> None:
    _require_application(invocation)
    with invocation.connect("replay") as connection:
        books = ReplayBooks(connection, invocation.settings.schema)
        progress = books.find(name)
        books.resume(progress.replay.name)
    run_replay(invocation, progress.replay, json_output=json_output)


@application.command("cancel")
def cancel(
    context: typer.Context,
    name: Name,
    *,
    wait: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Wait so long until nobody works on it."),
    ] = 60.0,
    yes: Yes = False,
) -> None:
    """Give up a replay and delete its rows; what it has handled stays."""
    with _books(context) as books:
        progress = books.find(name)
        full_name = progress.replay.name
        if progress.parked or progress.dead:
            confirm(
                f"{progress.parked:,} parked events and {progress.dead:,} dead letters of "
                f"{full_name} would be deleted.",
                yes=yes,
            )
        books.pause(full_name, by=operator_id(), reason=CANCELLED)
        _wait_until_idle(books, full_name, wait)
        books.cancel(full_name)
    print(f"{full_name} is cancelled. What it has handled stays.")


def _wait_until_idle(books: ReplayBooks, name: str, wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    with error_console.status("") as shown:
        while workers := books.look(name).workers:
            if time.monotonic() >= deadline:
                raise OperationRefused(
                    f"After {wait_seconds:g} s {workers} processes still work on {name}. It is "
                    "paused and not cancelled; they let go when their batch ends. Try again."
                )
            shown.update(f"{workers} processes still work on {name}")
            threading.Event().wait(LOOK_AGAIN_SECONDS)


@contextmanager
def _books(context: typer.Context) -> Iterator[ReplayBooks]:
    invocation = invocation_of(context)
    with invocation.connect("replay") as connection:
        yield ReplayBooks(connection, invocation.settings.schema)
