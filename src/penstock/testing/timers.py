"""Timers in the tests of applications: time passes as a test likes, and nothing sleeps."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Final
from uuid import UUID

import orjson

from penstock.app import Pipeline
from penstock.core.outgoing import OutgoingEvent, batch_json
from penstock.core.timers import StoredTimer, parse_moment
from penstock.errors import UsageError
from penstock.stores.identity import new_event_uuid
from penstock.stores.questions import Questions
from penstock.stores.timers import cancelling, reading_due, rescheduling, sending

FIRINGS_MAX: Final = 10_000


def fire_timers(pipeline: Pipeline, session: Any, until: datetime | None = None) -> list[UUID]:
    """Send what is due by a moment (None: now), in the session's transaction.

    In due order, each run of a recurring timer once, as if workers had run all the time. Returns
    the event_uuids. Raises UsageError for timers of confidential streams, which take a worker.
    """
    moment = None if until is None else parse_moment("until", until)
    return pipeline.scheduler.ask(session, "fire", partial(_firing, moment))


def _firing(until: datetime | None, schema: str) -> Questions[list[UUID]]:
    until, due = yield from reading_due(schema, until)
    runs: list[tuple[datetime, str, OutgoingEvent]] = []
    for timer in due:
        timer_id, run, recurrence = timer.pending.timer_id, timer.pending.due_at, None
        while run <= until:
            runs.append((run, timer_id, _event(timer, run)))
            if len(runs) > FIRINGS_MAX:
                raise UsageError(
                    f"More than {FIRINGS_MAX:,} runs are due. Pass an earlier `until`."
                )
            recurrence = timer.pending.recurrence
            if recurrence is None:
                break
            run = recurrence.first_after(run)
        if recurrence is None:
            yield from cancelling(schema, timer_id)
        else:
            yield from rescheduling(schema, timer_id, run)
    events = [event for _, _, event in sorted(runs, key=lambda each: each[:2])]
    if events:
        yield from sending(schema, batch_json(events))
    return [event.event_uuid for event in events]


def _event(timer: StoredTimer, run: datetime) -> OutgoingEvent:
    timer_id = timer.pending.timer_id
    if timer.event.key_id is not None:
        raise UsageError(
            f"The timer {timer_id!r} is sealed, and only a worker can fire it. Nothing was sent; "
            "test with a stream that is not confidential."
        )
    said = {"__timer_id__": timer_id, "__timer_due_ms__": int(run.timestamp() * 1000)}
    metadata = orjson.dumps({**orjson.loads(timer.event.metadata), **said}).decode()
    return replace(timer.event, event_uuid=new_event_uuid(), metadata=metadata)
