"""`penstock timers --topic`: the same commands for timers that are kept in Redis."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import Annotated

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.letter_options import Json
from penstock.cli.letter_output import moment, one_line, print_facts
from penstock.cli.output import console, duration, plain, print_json, print_note, table
from penstock.core.timer_envelope import CORRELATION_ID, REPLY_TO
from penstock.errors import OperationRefused
from penstock.ops.redis_timers import Content, TopicTimers, dead_json, queued_json
from penstock.ops.timers import parse_time
from penstock.stores.timer_queue import DeadTimer, QueuedTimer
from penstock.stores.timer_values import moment_of

TimerIds = Annotated[list[str], typer.Argument(metavar="ID…", help="Dead timers of the topic.")]
Topic = Annotated[str, typer.Option(metavar="TOPIC", help="The topic, in Redis.")]


def list_timers(
    invocation: Invocation,
    topic: str,
    *,
    before: str | None,
    dead: bool,
    limit: int,
    json_output: bool,
) -> None:
    """Show the timers of a topic, or its dead letters."""
    with _timers(invocation, topic) as timers:
        _tell_apart(invocation, timers)
        if dead:
            _list_dead(timers, limit, json_output=json_output)
            return
        now = timers.clock()
        moment_before = None if before is None else parse_time("--before", before, now)
        # One more than is shown, to know whether there are more.
        found = timers.pending(before=moment_before, limit=limit + 1)
    shown, has_more = found[:limit], len(found) > limit
    if json_output:
        print_json({"timers": [queued_json(timer) for timer in shown], "has_more": has_more})
        return
    headings = ("Timer", "State", "Due", "Next", ">In", ">Attempts")
    rows = [_row(timer, now) for timer in shown]
    console.print(table(f"Timers of {plain(topic)}", headings, rows))
    _tell_more(has_more)


def _tell_apart(invocation: Invocation, timers: TopicTimers) -> None:
    """Redis knows a topic by its timers alone, an application by its handlers too.

    Raises OperationRefused for one that neither of them knows.
    """
    if timers.counts() != (0, 0):
        return
    handled = invocation.pipeline.timer_handlers
    if invocation.app is None:
        print_note(f"Redis has no timers of {plain(timers.topic)}, neither pending nor dead.")
    elif timers.topic not in handled:
        there = f"handlers: {', '.join(sorted(handled))}" if handled else "handlers of none"
        raise OperationRefused(
            f"There is no topic {timers.topic!r}: Redis has no timers of it, and {invocation.app} "
            f"has {there}."
        )


def _list_dead(timers: TopicTimers, limit: int, *, json_output: bool) -> None:
    found = timers.list_dead(limit=limit + 1)
    shown, has_more = found[:limit], len(found) > limit
    if json_output:
        print_json({"dead": [dead_json(dead) for dead in shown], "has_more": has_more})
        return
    headings = ("Timer", "Buried", "Due", ">Attempts", "Error")
    rows = [
        (
            one_line(dead.timer_id),
            moment(moment_of(dead.buried_score)),
            moment(moment_of(dead.due_score)),
            dead.attempts,
            _error(dead),
        )
        for dead in shown
    ]
    console.print(table(f"Dead timers of {plain(timers.topic)}", headings, rows))
    _tell_more(has_more)


def show_timer(
    invocation: Invocation, topic: str, timer_id: str, *, dead: bool, json_output: bool
) -> None:
    """Show one timer of a topic, or one of its dead letters."""
    with _timers(invocation, topic) as timers:
        if dead:
            buried, content = timers.find_dead(timer_id)
            if json_output:
                print_json({**dead_json(buried), **content.as_json()})
                return
            facts = {
                "due": moment(moment_of(buried.due_score)),
                "buried": moment(moment_of(buried.buried_score)),
                "attempts": str(buried.attempts),
                "error": _error(buried),
            }
        else:
            now = timers.clock()
            timer, content = timers.find(timer_id)
            if json_output:
                print_json({**queued_json(timer), **content.as_json()})
                return
            next_at = moment_of(timer.score)
            facts = {
                "state": timer.state,
                "due": moment(moment_of(timer.due_score)),
                "next": f"{moment(next_at)} ({_due_in(next_at, now)})",
                "attempts": str(timer.attempts),
            }
    print_facts({"timer": plain(timer_id), "topic": plain(topic), **facts, **_described(content)})
    print(plain(content.body))


def cancel_timer(invocation: Invocation, topic: str, timer_id: str, *, json_output: bool) -> None:
    """Take a timer of a topic back; exit 1 where there is none."""
    with _timers(invocation, topic) as timers:
        timers.cancel(timer_id)
    if json_output:
        print_json({"timer_id": timer_id, "topic": topic, "cancelled": True})
    else:
        print(f"Timer {plain(timer_id)} of {plain(topic)} is cancelled.")


def redrive(
    context: typer.Context, timer_ids: TimerIds, *, topic: Topic, json_output: Json = False
) -> None:
    """Arm dead timers of a topic in Redis again, due at once; exit 1 where there is none."""
    _each(context, topic, timer_ids, TopicTimers.redrive, "redriven", json_output=json_output)


def discard(
    context: typer.Context, timer_ids: TimerIds, *, topic: Topic, json_output: Json = False
) -> None:
    """Give up dead timers of a topic in Redis for good; exit 1 where there is none."""
    _each(context, topic, timer_ids, TopicTimers.discard, "discarded", json_output=json_output)


def _each(
    context: typer.Context,
    topic: str,
    timer_ids: list[str],
    act: Callable[[TopicTimers, str], None],
    done: str,
    *,
    json_output: bool,
) -> None:
    with _timers(invocation_of(context), topic) as timers:
        for timer_id in timer_ids:
            act(timers, timer_id)
            if not json_output:
                print(f"Timer {plain(timer_id)} of {plain(topic)} is {done}.")
    if json_output:
        print_json({"topic": topic, done: timer_ids})


@contextmanager
def _timers(invocation: Invocation, topic: str) -> Iterator[TopicTimers]:
    with closing(invocation.pipeline.timers.store) as store:
        yield TopicTimers(store, topic)


def _row(timer: QueuedTimer, now: datetime) -> tuple[object, ...]:
    next_at = moment_of(timer.score)
    return (
        one_line(timer.timer_id),
        timer.state,
        moment(moment_of(timer.due_score)),
        moment(next_at),
        _due_in(next_at, now),
        timer.attempts,
    )


def _described(content: Content) -> dict[str, str | None]:
    return {
        "correlation id": one_line(content.headers.get(CORRELATION_ID)),
        "reply to": one_line(content.headers.get(REPLY_TO)),
        "size": f"{content.size_bytes} bytes",
        "problem": content.problem,
    }


def _error(dead: DeadTimer) -> str | None:
    return one_line(f"{dead.error_type}: {dead.error_message}")


def _due_in(at: datetime, now: datetime) -> str | None:
    milliseconds = int((at - now).total_seconds() * 1000)
    return duration(milliseconds) if milliseconds >= 0 else f"{duration(-milliseconds)} ago"


def _tell_more(has_more: bool) -> None:
    if has_more:
        print_note("There are more; raise --limit to see them.")
