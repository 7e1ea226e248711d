"""`penstock consumers`: see them, hold them, move them, rename them, forget them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import psycopg
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.cli.invocation import invocation_of
from penstock.cli.output import (
    confirm,
    console,
    duration,
    error_console,
    print_json,
    print_note,
    table,
)
from penstock.cli.status import state_of
from penstock.errors import OperationRefused
from penstock.ops.consumers import Consumers, require_no_replay
from penstock.ops.seeking import Seeker, SeekPlan, parse_target
from penstock.ops.status import ConsumerStatus, read_status
from penstock.ops.streams import find_remote, forget_remote
from penstock.stores.identity import operator_id

LOOK_AGAIN_SECONDS = 0.2
NAME_HELP = "The full name, or the part after the pipeline's where only one has it."

application = typer.Typer(no_args_is_help=True, help="See, pause, move, rename, forget consumers.")

Name = Annotated[str, typer.Argument(metavar="NAME", help=NAME_HELP)]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", help=NAME_HELP)]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; kept for whoever looks later.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


@application.command("list")
def list_consumers(
    context: typer.Context,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every consumer: its state, lanes, workers, checkpoint and lag."""
    invocation = invocation_of(context)
    with invocation.connect("consumers") as connection:
        found = read_status(connection, invocation.settings.schema).consumers
    if json_output:
        print_json([consumer.as_json() for consumer in found])
        return
    headings = ("Consumer", "Stream", "State", ">Lanes held", ">Workers", ">Checkpoint")
    lag = (">Lag, events", ">Lag, time")
    console.print(table("Consumers", headings + lag, [_row(consumer) for consumer in found]))


def _row(consumer: ConsumerStatus) -> tuple[object, ...]:
    return (
        consumer.name,
        consumer.stream_name,
        state_of(consumer),
        f"{consumer.lanes_held} of {consumer.lanes}",
        consumer.workers,
        consumer.checkpoint,
        consumer.lag_events,
        duration(consumer.lag_ms),
    )


# ── pause and resume ───────────────────────────────────────────────────────────────────────────


@application.command("pause")
def pause(
    context: typer.Context,
    names: Names,
    reason: Reason = "",
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Wait so long until no lane is held.")
    ] = 0,
) -> None:
    """Let the workers of all hosts finish their batch and stop handling until `resume`."""
    with _consumers(context) as consumers:
        found = _find_all(consumers, names)
        paused = consumers.pause(found, by=operator_id(), reason=reason)
        for name in found:
            print(f"{name} is paused." if name in paused else f"{name} was paused already.")
        if wait:
            _wait_until_free(consumers, found, wait)


@application.command("resume")
def resume(context: typer.Context, names: Names) -> None:
    """Let paused consumers go on where they stopped."""
    with _consumers(context) as consumers:
        found = _find_all(consumers, names)
        resumed = consumers.resume(found)
        for name in found:
            print(f"{name} goes on." if name in resumed else f"{name} was not paused.")


def _find_all(consumers: Consumers, names: list[str]) -> list[str]:
    # All of them before the first change; a consumer that is named twice is meant once.
    return list(dict.fromkeys(consumers.find(name) for name in names))


def _wait_until_free(consumers: Consumers, names: list[str], wait_seconds: float) -> None:
    deadline = time.monotonic() + wait_seconds
    with error_console.status("") as shown:
        while held := consumers.lanes_held(names):
            if time.monotonic() >= deadline:
                raise OperationRefused(
                    f"After {wait_seconds:g} s workers still hold {held} lanes. The pause stands, "
                    "and they let go when their batch ends; wait again, or look at "
                    "`penstock status`."
                )
            shown.update(f"{held} lanes are still held")
            threading.Event().wait(LOOK_AGAIN_SECONDS)
    print("No lane is held any more.")


# ── seek ───────────────────────────────────────────────────────────────────────────────────────


@application.command("seek")
def seek(
    context: typer.Context,
    name: Name,
    *,
    to: Annotated[
        str,
        typer.Option(metavar="POSITION|earliest|latest|TIME", help="The next event to handle."),
    ],
    again: Annotated[
        bool, typer.Option("--again", help="Handle settled events from there once more.")
    ] = False,
    reason: Reason = "",
    yes: Yes = False,
) -> None:
    """Move a consumer, also while it runs; who did it is kept."""
    target = parse_target(to)
    schema = invocation_of(context).settings.schema
    with invocation_of(context).connect("consumers") as connection:
        full_name = Consumers(connection, schema).find(name)
        seeker = Seeker(connection, schema)
        plan = seeker.plan(full_name, target)
        if plan.new_checkpoint == plan.old_checkpoint and not again:
            print(f"{full_name} stands there already: {plan.position} comes next.")
            return
        if plan.passed_over:
            confirm(_warning(plan), yes=yes)
        done = seeker.seek(plan, again=again, by=operator_id(), reason=reason)
    print(
        f"{full_name} handles {plan.position} next; its checkpoint was {done.plan.old_checkpoint}."
    )
    if done.plan.passed_over:
        print(f"{done.plan.passed_over:,} positions were passed over unhandled.")
    if done.unsettled:
        print(f"{done.unsettled:,} settled events will be handled again.")


def _warning(plan: SeekPlan) -> str:
    return (
        f"{plan.consumer} has finished everything up to {plan.old_checkpoint}. Moved to "
        f"{plan.position}, it passes over {plan.passed_over:,} positions and never handles them."
    )


# ── rename and forget ──────────────────────────────────────────────────────────────────────────


@application.command("rename")
def rename(
    context: typer.Context,
    old: Annotated[str, typer.Argument(metavar="OLD", help=NAME_HELP)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="The new full name.")],
) -> None:
    """Give a stopped consumer another name; it keeps its checkpoint and all its rows."""
    with _consumers(context) as consumers:
        full_name = consumers.find(old)
        consumers.rename(full_name, new)
    print(f"{full_name} is now {new}.")
    print_note(
        "Deploy code that uses the new name before workers start again: code with the old one "
        "would register a new consumer, which handles everything from its start. Idempotency keys "
        "are made of the name: an event that was tried before has others when it is tried again."
    )


@application.command("forget")
def forget(
    context: typer.Context,
    name: Name,
    *,
    with_dead_letters: Annotated[
        bool, typer.Option("--with-dead-letters", help="Delete parked and dead events too.")
    ] = False,
    remote: Annotated[
        bool, typer.Option("--remote", help="A consumer of another service, which is gone.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Delete a stopped consumer and everything that is known of it."""
    if remote:
        _forget_remote(context, name, yes=yes)
        return
    with _consumers(context) as consumers:
        full_name = consumers.find(name)
        require_no_replay(full_name, "forgotten")
        rows = consumers.count_leftovers(full_name)
        confirm(
            f"{full_name} and its {rows.settled:,} settled rows, {rows.parked:,} parked events and "
            f"{rows.dead:,} dead letters are deleted for good.",
            yes=yes,
        )
        with _deletion_bar(rows.settled) as (bar, task):
            consumers.forget(
                full_name,
                with_dead_letters=with_dead_letters,
                on_progress=lambda deleted: bar.update(task, completed=deleted),
            )
    print(f"{full_name} is forgotten.")


def _forget_remote(context: typer.Context, name: str, *, yes: bool) -> None:
    schema = invocation_of(context).settings.schema
    with invocation_of(context).connect("consumers") as connection:
        places = ", ".join(
            f"{found.stream_name} up to {found.checkpoint} (last report "
            f"{found.seen_at:%Y-%m-%d %H:%M %Z})"
            for found in find_remote(connection, name, schema)
        )
        confirm(
            f"{name}, of another service, has read {places}. What it has not read is pruned when "
            "it is old enough, and is lost to it if it comes back.",
            yes=yes,
        )
        forget_remote(connection, name, schema)
    print(f"{name} is forgotten; nothing is kept for it any more.")


@contextmanager
def _deletion_bar(total: int) -> Iterator[tuple[Progress, Any]]:
    columns = (TextColumn("settled rows deleted"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=error_console, transient=True) as bar:
        yield bar, bar.add_task("deleting", total=total)


# ── the words used above ───────────────────────────────────────────────────────────────────────


@contextmanager
def _consumers(context: typer.Context) -> Iterator[Consumers]:
    invocation = invocation_of(context)
    connection: psycopg.Connection[Any]
    with invocation.connect("consumers") as connection:
        yield Consumers(connection, invocation.settings.schema)
