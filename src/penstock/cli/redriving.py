"""`penstock dead-letters redrive`: one more attempt for dead letters, watched until it is over."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import psycopg
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.cli.dead_letters import (
    application,
    described,
    require_criterion,
    tell_of_choice,
)
from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.letter_options import (
    EXIT_INTERRUPTED,
    By,
    Json,
    References,
    Why,
    Yes,
    interruptible,
    with_criteria,
)
from penstock.cli.letter_output import one_line
from penstock.cli.output import (
    confirm,
    console,
    error_console,
    print_error,
    print_json,
    print_note,
    table,
)
from penstock.errors import UsageError
from penstock.ops.dead_letters import Request, choose, consumers_of
from penstock.ops.redriving import (
    REHEARSALS_MAX,
    STOP_AFTER,
    Plan,
    Redrive,
    Redriven,
    Rehearsed,
    Tally,
    movable,
    rehearse,
    require_redrivable,
    require_rehearsable,
)
from penstock.ops.replays import ReplayBooks
from penstock.stores.dead_letters import Criteria, DeadLetters, Group
from penstock.stores.identity import operator_id

EXIT_NO = 1
_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:/([smh]))?")
_RATE_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}


def redrive(
    context: typer.Context,
    references: References = None,
    *,
    request: Request,
    redrive_all: Annotated[bool, typer.Option("--all", help="Every letter there is.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Call the handlers and roll everything back.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many; a dry run, 100 by default.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="N/s", help="At most so many letters a second.")
    ] = None,
    stop_after: Annotated[
        int, typer.Option(metavar="N", min=1, help="Stop when so many fail in a row.")
    ] = STOP_AFTER,
    by: By = None,
    why: Why = "",
    force: Annotated[
        bool, typer.Option("--force", help="Also where events are handled at most once.")
    ] = False,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Give dead letters one more attempt by running workers.

    Exit 1: some failed again, or were discarded by somebody else before their attempt.
    """
    request = replace(request, references=tuple(references or ()))
    require_criterion(request, everything=redrive_all)
    invocation = invocation_of(context)
    if dry_run and invocation.app is None:
        raise UsageError("A dry run calls your handlers: say where they are with --app.")
    how = Plan(
        criteria=Criteria(),
        by=by or operator_id(),
        reason=why,
        stop_after=stop_after,
        per_second=parse_rate(rate),
        limit=limit,
    )
    asked = _Asked(request, how, is_dry=dry_run, force=force, yes=yes, json_output=json_output)
    with invocation.connect("redrive") as connection:
        _carry_out(invocation, connection, asked)


command = with_criteria(redrive)
application.command("redrive")(command)


def parse_rate(text: str | None) -> float | None:
    """Letters a second, from `100`, `100/s`, `30/m` or `5/h`. Raises UsageError."""
    if text is None:
        return None
    found = _RATE.fullmatch(text.strip().lower())
    per_second = float(found[1]) / _RATE_SECONDS[found[2]] if found else 0.0
    if per_second <= 0:
        raise UsageError(f"--rate {text!r} is no rate; write for example 100/s.")
    return per_second


def _announced(groups: Sequence[Group], limit: int | None) -> str:
    first = "" if limit is None else f", the first {limit:,} of them,"
    return f"{described(groups)}{first} get one more attempt each."


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Request
    plan: Plan
    is_dry: bool
    force: bool
    yes: bool
    json_output: bool


def _carry_out(invocation: Invocation, connection: psycopg.Connection[Any], asked: _Asked) -> None:
    schema = invocation.settings.schema
    letters = DeadLetters(connection, schema)
    chosen = choose(connection, asked.request, schema)
    plan = replace(asked.plan, criteria=movable(chosen.criteria))
    _, groups = letters.groups(plan.criteria)
    if not tell_of_choice(chosen, groups, "redrive"):
        if asked.json_output:
            print_json([] if asked.is_dry else {"moved": 0, "handled": 0, "failed": 0})
    elif asked.is_dry:
        require_rehearsable(letters, consumers_of(groups))
        _rehearse(invocation, letters, plan, groups, json_output=asked.json_output)
    else:
        require_redrivable(letters, consumers_of(groups), force=asked.force)
        confirm(_announced(groups, plan.limit), yes=asked.yes)
        _tell_of_replays(ReplayBooks(connection, schema), consumers_of(groups))
        _tell(_drive(connection, plan, schema, groups), json_output=asked.json_output)


def _tell_of_replays(books: ReplayBooks, consumers: Sequence[str]) -> None:
    """No worker of `penstock run` serves a replay."""
    for progress in books.all():
        name = progress.replay.name
        if name in consumers and not progress.workers:
            print_note(
                f"{name} is a replay: run `penstock replay --resume {name}` beside this, in "
                "another terminal. It handles the letters, and ends when this has ended."
            )


# ── for real ───────────────────────────────────────────────────────────────────────────────────


def _drive(
    connection: psycopg.Connection[Any], plan: Plan, schema: str, groups: Sequence[Group]
) -> Redriven:
    total = sum(group.count for group in groups)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        interruptible() as is_interrupted,
        Progress(*columns, console=error_console, transient=True) as bar,
    ):
        task = bar.add_task("", total=total if plan.limit is None else min(total, plan.limit))

        def show(tally: Tally) -> None:
            over = tally.moved - tally.in_flight
            bar.update(task, completed=over, description=_described(tally))

        return Redrive(connection, plan, schema, on_look=show, on_stall=print_note).run(
            is_interrupted
        )


def _described(tally: Tally) -> str:
    discarded = f", {tally.discarded:,} discarded by others" if tally.discarded else ""
    skipped = f", {tally.skipped:,} skipped" if tally.skipped else ""
    return (
        f"{tally.handled:,} handled, {tally.failed:,} failed{discarded}{skipped}, "
        f"{tally.in_flight:,} in flight"
    )


def _tell(done: Redriven, *, json_output: bool) -> None:
    if json_output:
        print_json(done.as_json())
    else:
        print(f"{_described(done.tally)} (operation {done.operation_id}).")
    if done.left_alone:
        print_note(
            f"{done.left_alone:,} letters were on their way already, in other hands, or gone; "
            "they were left alone."
        )
    match done.ended_as:
        case "interrupted":
            print_note(
                f"Interrupted. {done.tally.in_flight:,} letters are in flight, and workers finish "
                "those; the same command continues with the rest."
            )
            raise typer.Exit(EXIT_INTERRUPTED)
        case "stopped":
            print_error(
                f"Stopped, because letters failed again one after another. {done.taken_back:,} "
                f"were taken back before their attempt, {done.tally.in_flight:,} are in workers' "
                "hands. Mend the handler, then run the same command."
            )
    if not done.is_clean:
        raise typer.Exit(EXIT_NO)


# ── dry run ────────────────────────────────────────────────────────────────────────────────────


def _rehearse(
    invocation: Invocation,
    letters: DeadLetters,
    plan: Plan,
    groups: Sequence[Group],
    *,
    json_output: bool,
) -> None:
    count = min(plan.limit or REHEARSALS_MAX, sum(group.count for group in groups))
    found: list[Rehearsed] = []
    columns = (TextColumn("letters rehearsed"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=error_console, transient=True) as bar:
        task = bar.add_task("rehearsing", total=count)
        for rehearsed in rehearse(invocation.pipeline, letters, plan.criteria, count):
            found.append(rehearsed)
            bar.advance(task)
    if json_output:
        print_json([rehearsed.as_json() for rehearsed in found])
    else:
        headings = (">Id", "Consumer", "Place", "Type", "Outcome", "Detail")
        console.print(table("Dry run", headings, map(_row, found)))
        outcomes = Counter(rehearsed.outcome for rehearsed in found)
        print(", ".join(f"{n:,} {outcome}" for outcome, n in outcomes.items()) + ".")
    if any(rehearsed.outcome == "would fail" for rehearsed in found):
        raise typer.Exit(EXIT_NO)


def _row(rehearsed: Rehearsed) -> tuple[object, ...]:
    letter = rehearsed.letter
    return (
        letter.id,
        letter.consumer,
        f"{letter.stream_name}/{letter.position}",
        f"{letter.event_type} v{letter.version}",
        rehearsed.outcome,
        one_line(rehearsed.detail),
    )
