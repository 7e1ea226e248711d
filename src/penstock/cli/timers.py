"""`penstock timers`: what is going to be sent later; taken back, or moved to another time."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

import typer

from penstock.cli import timers_redis
from penstock.cli.invocation import invocation_of
from penstock.cli.letter_options import By, Json, Reveal, Why
from penstock.cli.letter_output import moment, one_line, print_event, print_facts, shown_payload
from penstock.cli.output import console, print_json, print_note, span, table
from penstock.core.timers import PENDING_LIMIT_MAX, PendingTimer
from penstock.errors import UsageError
from penstock.ops.timers import Timers, parse_span, parse_time, revealed_timer, timer_json
from penstock.stores.identity import operator_id

LIST_LIMIT = 50
TIME = "TIME|2h|7d"

application = typer.Typer(
    no_args_is_help=True, help="Events that are sent later: list, show, cancel, reschedule."
)

TimerId = Annotated[str, typer.Argument(metavar="ID", help="The timer's id.")]
Topic = Annotated[
    str | None, typer.Option(metavar="TOPIC", help="Timers in Redis, of this topic, instead.")
]
Dead = Annotated[
    bool, typer.Option("--dead", help="With --topic: those whose attempts are exhausted.")
]


@application.command("list")
def list_timers(
    context: typer.Context,
    *,
    stream: Annotated[str | None, typer.Option(metavar="STREAM", help="Of this stream.")] = None,
    before: Annotated[
        str | None, typer.Option(metavar=TIME, help="Due before this time, or within this span.")
    ] = None,
    held: Annotated[bool, typer.Option("--held", help="Only those that were set aside.")] = False,
    limit: Annotated[
        int, typer.Option(min=1, max=PENDING_LIMIT_MAX, help="Show so many, the next ones.")
    ] = LIST_LIMIT,
    topic: Topic = None,
    dead: Dead = False,
    json_output: Json = False,
) -> None:
    """Show the timers that wait, the next one first."""
    invocation = invocation_of(context)
    if topic is not None:
        if stream is not None or held:
            raise UsageError("--stream and --held are for timers in PostgreSQL, --topic for Redis.")
        timers_redis.list_timers(
            invocation, topic, before=before, dead=dead, limit=limit, json_output=json_output
        )
        return
    _refuse_dead(dead)
    with invocation.connect("timers") as connection:
        timers = Timers(connection, invocation.settings.schema)
        now = timers.clock()
        # One more than is shown, to know whether there are more.
        found = timers.list(
            stream=stream,
            before=None if before is None else parse_time("--before", before, now),
            held_only=held,
            limit=min(limit + 1, PENDING_LIMIT_MAX),
        )
    shown = found[:limit]
    if json_output:
        has_more = len(found) > limit
        print_json({"timers": [timer_json(timer) for timer in shown], "has_more": has_more})
        return
    headings = ("Timer", "Stream", "Type", "Key", "Due", ">In", "Recurs", "Held because")
    console.print(table("Timers", headings, [_row(timer, now) for timer in shown]))
    if len(found) > limit:
        print_note("There are more; raise --limit to see them.")


def _row(timer: PendingTimer, now: datetime) -> tuple[object, ...]:
    return (
        one_line(timer.timer_id),
        timer.stream_name,
        f"{one_line(timer.event_type)} v{timer.version}",
        "sealed" if timer.is_sealed else one_line(timer.key),
        moment(timer.due_at),
        due_in(timer.due_at, now),
        timer.recurrence,
        one_line(timer.held_reason),
    )


def due_in(due_at: datetime, now: datetime) -> str:
    """How long until a timer is due, in words."""
    milliseconds = int((due_at - now).total_seconds() * 1000)
    return span(milliseconds) if milliseconds >= 0 else f"{span(-milliseconds)} ago"


@application.command("show")
def show(
    context: typer.Context,
    timer_id: TimerId,
    *,
    topic: Topic = None,
    dead: Dead = False,
    reveal: Reveal = False,
    json_output: Json = False,
) -> None:
    """Show one timer and the event that it will send."""
    invocation = invocation_of(context)
    if topic is not None:
        timers_redis.show_timer(invocation, topic, timer_id, dead=dead, json_output=json_output)
        return
    _refuse_dead(dead)
    with invocation.connect("timers") as connection:
        timers = Timers(connection, invocation.settings.schema)
        now = timers.clock()
        timer = timers.find(timer_id)
        if reveal:
            stream_name = timer.pending.stream_name
            keys = invocation.pipeline.stream_keys(stream_name, lambda: connection)
            timer = revealed_timer(timer, keys)
    pending = timer.pending
    if json_output:
        shown: dict[str, Any] = {"held_at": timer.held_at, **shown_payload(timer.entry)}
        print_json({**timer_json(pending), **shown})
        return
    print_facts(
        {
            "timer": pending.timer_id,
            "stream": pending.stream_name,
            "event": f"{pending.event_type} v{pending.version}",
            "key": pending.key,
            "due": f"{moment(pending.due_at)} ({due_in(pending.due_at, now)})",
            "recurs": pending.recurrence,
            "scheduled": moment(pending.created_at),
            "held": timer.held_at and f"{moment(timer.held_at)}: {pending.held_reason}",
        }
    )
    print_event(timer.entry)


@application.command("cancel")
def cancel(
    context: typer.Context,
    timer_id: TimerId,
    *,
    topic: Topic = None,
    by: By = None,
    why: Why = "",
    json_output: Json = False,
) -> None:
    """Take a timer back; exit 1 where there is none."""
    invocation = invocation_of(context)
    if topic is not None:
        if by is not None or why:
            raise UsageError(
                "--by and --reason are kept for timers in PostgreSQL; --topic is about Redis. "
                "Nothing was changed; leave them out."
            )
        timers_redis.cancel_timer(invocation, topic, timer_id, json_output=json_output)
        return
    with invocation.connect("timers") as connection:
        timers = Timers(connection, invocation.settings.schema)
        timers.cancel(timer_id, by=by or operator_id(), reason=why)
    if json_output:
        print_json({"timer_id": timer_id, "cancelled": True})
    else:
        print(f"Timer {timer_id} is cancelled.")


@application.command("reschedule")
def reschedule(
    context: typer.Context,
    timer_id: TimerId,
    *,
    at: Annotated[str | None, typer.Option(metavar="TIME", help="When, with a time zone.")] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="2h|7d", help="How long from now; 0s is at once.")
    ] = None,
    by: By = None,
    why: Why = "",
    json_output: Json = False,
) -> None:
    """Move a timer's next firing; a held one is tried again then."""
    if (at is None) == (delay is None):
        raise UsageError("Say either --at or --delay. Nothing was changed.")
    invocation = invocation_of(context)
    with invocation.connect("timers") as connection:
        timers = Timers(connection, invocation.settings.schema)
        due: datetime | timedelta
        if at is not None:
            due = parse_time("--at", at, timers.clock())
        else:
            assert delay is not None
            due = parse_span("--delay", delay)
        due_at = timers.reschedule(timer_id, due, by=by or operator_id(), reason=why)
    if json_output:
        print_json({"timer_id": timer_id, "due_at": due_at})
    else:
        print(f"Timer {timer_id} is due {moment(due_at)}.")


application.command("redrive")(timers_redis.redrive)
application.command("discard")(timers_redis.discard)


def _refuse_dead(dead: bool) -> None:
    if dead:
        raise UsageError(
            "--dead is for timers in Redis; add --topic. Those in PostgreSQL that could not be "
            "fired are shown by --held, and failed events by `penstock dead-letters`."
        )
