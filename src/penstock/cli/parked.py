"""`penstock parked`: which keys wait for another attempt, and letting them go at once."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.letter_options import By, Consumer, Json, Reveal, Why, Yes
from penstock.cli.letter_output import (
    moment,
    one_line,
    print_attempts,
    print_event,
    print_facts,
    shown_payload,
)
from penstock.cli.output import (
    LIST_LIMIT_MAX,
    confirm,
    console,
    duration,
    print_json,
    print_note,
    table,
)
from penstock.errors import UsageError
from penstock.ops.consumers import Consumers
from penstock.ops.parked import Released, find_parked
from penstock.ops.parked import release as release_parked
from penstock.ops.revealing import revealed_parked
from penstock.stores.identity import operator_id
from penstock.stores.parked_keys import FullParkedEvent, ParkedEvent, ParkedKeys

LIST_LIMIT = 50

application = typer.Typer(
    no_args_is_help=True, help="Keys that wait behind a failed event: list, show, release."
)


@application.command("list")
def list_parked(
    context: typer.Context,
    *,
    consumer: Consumer = None,
    limit: Annotated[
        int, typer.Option(min=1, max=LIST_LIMIT_MAX, help="Show so many keys.")
    ] = LIST_LIMIT,
    json_output: Json = False,
) -> None:
    """Show every parked key: its first event, how many wait, and when it is tried again."""
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("parked") as connection:
        name = None if consumer is None else Consumers(connection, schema).find(consumer)
        total, found = ParkedKeys(connection, schema).list(name, limit)
    if json_output:
        print_json({"total": total, "keys": [event.as_json() for event in found]})
        return
    headings = ("Consumer", "Stream", ">First", "Key", ">Waiting", ">Attempts", "Next attempt")
    rows = [_row(event) for event in found]
    console.print(table("Parked keys", (*headings, "Last error"), rows))
    if total > len(found):
        print_note(f"{total - len(found):,} more keys are not shown; raise --limit to see them.")


def _row(event: ParkedEvent) -> tuple[object, ...]:
    return (
        event.consumer,
        event.stream_name,
        event.position,
        one_line(event.key),
        event.waiting,
        event.attempts,
        next_attempt(event),
        one_line(event.last_error),
    )


def next_attempt(event: ParkedEvent) -> str:
    """When it is tried again, in words."""
    if event.held:
        return "held"
    seconds = event.next_attempt_in_seconds
    if seconds is None:
        return "after another"
    return "now" if seconds <= 0 else f"in {duration(int(seconds * 1000))}"


# ── show ───────────────────────────────────────────────────────────────────────────────────────


@application.command("show")
def show(
    context: typer.Context,
    position: Annotated[int, typer.Argument(metavar="POSITION", help="Where it is parked.")],
    *,
    consumer: Consumer = None,
    reveal: Reveal = False,
    json_output: Json = False,
) -> None:
    """Show one parked event: its attempts, what it waits for, what waits for it."""
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("parked") as connection:
        name = None if consumer is None else Consumers(connection, schema).find(consumer)
        parked = find_parked(ParkedKeys(connection, schema), position, name)
        if reveal:
            stream_name = parked.event.stream_name
            keys = invocation.pipeline.stream_keys(stream_name, lambda: connection)
            parked = revealed_parked(parked, keys)
    if json_output:
        print_json(_full_json(parked))
        return
    event = parked.event
    print_facts(
        {
            "consumer": event.consumer,
            "place": f"{event.stream_name}/{event.position}",
            "event": event.event_uuid,
            "key": event.key,
            "parked": moment(event.parked_at),
            "next attempt": next_attempt(event),
            "behind": parked.behind,
            "waiting": event.waiting,
            "dead letter": parked.letter_id,
            "redriven by": event.operation_id and f"operation {event.operation_id}",
            "last error": event.last_error,
        }
    )
    print_attempts("Attempts", parked.history)
    print_event(parked.entry)


def _full_json(parked: FullParkedEvent) -> dict[str, Any]:
    return {
        **parked.event.as_json(),
        "behind": parked.behind,
        "letter_id": parked.letter_id,
        "history": [asdict(attempt) for attempt in parked.history],
        **shown_payload(parked.entry),
    }


# ── release ────────────────────────────────────────────────────────────────────────────────────


@application.command("release")
def release(
    context: typer.Context,
    position: Annotated[
        int | None, typer.Argument(metavar="[POSITION]", help="The first event of its key.")
    ] = None,
    *,
    consumer: Annotated[str, typer.Option(metavar="NAME", help="Whose events.")],
    key: Annotated[str | None, typer.Option(metavar="KEY", help="The key.")] = None,
    release_all: Annotated[bool, typer.Option("--all", help="All parked keys.")] = False,
    by: By = None,
    why: Why = "",
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Let parked events be tried now; held ones get one more attempt."""
    if (position is not None) + (key is not None) + release_all != 1:
        raise UsageError("Name one POSITION, or --key, or say --all. Nothing was changed.")
    invocation = invocation_of(context)
    schema = invocation.settings.schema
    with invocation.connect("parked") as connection:
        name = Consumers(connection, schema).find(consumer)
        if release_all:
            total, _ = ParkedKeys(connection, schema).list(name, 1)
            confirm(f"All {total:,} parked keys of {name} are tried at once.", yes=yes)
        done = release_parked(
            connection,
            name,
            position=position,
            key=key,
            by=by or operator_id(),
            reason=why,
            schema=schema,
        )
    if json_output:
        print_json(done.as_json())
    else:
        print(_told(done))


def _told(done: Released) -> str:
    parts = [f"{done.waiting:,} waiting events are due now"]
    if done.held:
        parts.append(f"{done.held:,} held ones get one more attempt")
    if done.in_hand:
        parts.append(f"{done.in_hand:,} are being tried already")
    return f"{', '.join(parts)} (operation {done.operation_id})."
