"""`penstock journey`: everything known about an event, or about the events of a key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.letter_output import moment, print_facts
from penstock.cli.output import (
    LIST_LIMIT_MAX,
    console,
    duration,
    plain,
    print_json,
    print_note,
    table,
)
from penstock.core.journey import Journey, Step
from penstock.errors import UsageError
from penstock.ops.journey import parse_event, read_journey
from penstock.stores.journeys import KEY_WINDOW_POSITIONS, Journeys, KeyedEvent

EXIT_NO = 1
LIST_LIMIT = 50


def journey(
    context: typer.Context,
    event: Annotated[
        str | None, typer.Argument(metavar="[UUID | STREAM/POSITION]", help="Which event.")
    ] = None,
    *,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="List the latest events of a key.")
    ] = None,
    stream: Annotated[
        str | None, typer.Option("--stream", metavar="STREAM", help="With --key: only this one.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=LIST_LIMIT_MAX, help="With --key: so many.")
    ] = LIST_LIMIT,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell what happened to an event, from its sending to every consumer; 1 if none is known."""
    if (event is None) == (key is None):
        raise UsageError("Name one event by UUID or STREAM/POSITION, or a key with --key.")
    invocation = invocation_of(context)
    with invocation.connect("journey") as connection:
        if key is not None:
            found = Journeys(connection, invocation.settings.schema).of_key(key, stream, limit)
            _print_key(key, found, json_output=json_output)
            raise typer.Exit(0 if found else EXIT_NO)
        assert event is not None
        told = read_journey(connection, invocation.settings, parse_event(event))
    if json_output:
        print_json(journey_json(told))
    else:
        _print(told)
    if told.found_in is None and not told.consumers:
        raise typer.Exit(EXIT_NO)


def journey_json(told: Journey) -> dict[str, Any]:
    """The same as plain values; each step with the milliseconds since the one before."""
    return {
        **asdict(told),
        "steps": _steps_json(told.steps),
        "consumers": [
            {**asdict(chapter), "steps": _steps_json(chapter.steps)} for chapter in told.consumers
        ],
    }


def _steps_json(steps: Iterable[Step]) -> list[dict[str, Any]]:
    return [{**asdict(step), "after_ms": after} for step, after in _timed(steps)]


def _timed(steps: Iterable[Step]) -> Iterable[tuple[Step, int | None]]:
    before: datetime | None = None
    for step in steps:
        after = None
        if step.at is not None:
            after = None if before is None else round((step.at - before).total_seconds() * 1000)
            before = step.at
        yield step, after


def _print(told: Journey) -> None:
    place = None if told.stream_name is None else f"{told.stream_name}/{told.position or '?'}"
    print_facts(
        {
            "event": told.event_uuid,
            "place": place,
            "type": told.event_type and f"{told.event_type} v{told.version}",
            "key": told.key,
            "read from": told.found_in,
        }
    )
    console.print(plain(told.summary))
    if told.steps:
        console.print(_table("The event", told.steps))
    for chapter in told.consumers:
        title = f"{chapter.consumer}: {chapter.state}"
        if chapter.steps:
            console.print(_table(title, chapter.steps))
        else:
            console.print(f"\n{title}")
    if told.unseen:
        console.print("\nWhat cannot be seen from here:")
        for line in told.unseen:
            console.print(f"- {line}")


def _table(title: str, steps: Iterable[Step]) -> Any:
    rows = [
        (
            None if step.at is None else f"{step.at:%Y-%m-%d %H:%M:%S.%f}"[:-3],
            None if after is None else f"+{duration(after)}",
            step.what,
            plain(step.detail),
        )
        for step, after in _timed(steps)
    ]
    return table(title, ("When", ">After", "What", ""), rows)


def _print_key(key: str, found: list[KeyedEvent], *, json_output: bool) -> None:
    if json_output:
        print_json({"key": key, "events": [asdict(event) for event in found]})
        return
    rows = [
        (
            event.event_uuid,
            f"{event.stream_name}/{event.position or '?'}",
            event.event_type,
            moment(event.created_at),
        )
        for event in found
    ]
    if found:
        console.print(table("Latest first", ("Event", "Place", "Type", "Sent"), rows))
    else:
        print_note("No event of this key was found.")
    print_note(
        f"Looked at the last {KEY_WINDOW_POSITIONS:,} positions of each stream. Keys of "
        "confidential streams are stored hashed and are not found like this."
    )
