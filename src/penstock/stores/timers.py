"""The table `timer`, as those use it who make timers: questions that any connection can carry.

Nothing is remembered for later. A timer is a row of the caller's transaction from the moment it is
asked for, so savepoints, rollbacks and a cancel in the same transaction need no help.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from penstock.core.outgoing import OutgoingEvent
from penstock.core.recurrence import Recurrence
from penstock.core.timers import (
    Due,
    NewTimer,
    PendingFilter,
    PendingTimer,
    StoredTimer,
    seal_uuid,
)
from penstock.errors import InvalidTimer, TimerExists
from penstock.stores.contracts import keeping, promises_of
from penstock.stores.queries import Queries
from penstock.stores.questions import Questions, Statement
from penstock.stores.sealing import sealing

SQL_FILE = "timer.sql"


def scheduling(place: object, schema: str, timer: NewTimer) -> Questions[str]:
    """Make a timer; says what was done: `scheduled`, `replaced` or `kept`.

    Contracts are kept and confidential events sealed here already: what waits may wait for long.
    Raises TimerExists where the id is taken and that is an error, and whatever sealing raises.
    """
    yield from keeping(place, schema, promises_of([timer.event]))
    [event] = yield from sealing(place, schema, [timer.event])
    due = timer.due
    if due is None:
        due = yield from _first_run(schema, timer.recurrence)
    query = Queries(SQL_FILE, schema)["schedule"]
    rows = yield Statement(query, {**_row(timer, event), **_when(due)})
    done: str = rows[0][0]
    if done == "kept" and timer.on_conflict == "error":
        # Found out without an error on the server, so the transaction is still good.
        raise TimerExists(
            f"There is already a timer {timer.timer_id!r}, and it stays as it is. Nothing was "
            'scheduled and the transaction can go on; use on_conflict="replace" or "keep", or '
            "another timer_id."
        )
    return done


def rescheduling(schema: str, timer_id: str, due: Due) -> Questions[bool]:
    """Move a timer's next firing, and let go of it where it was held; False: there is none."""
    query = Queries(SQL_FILE, schema)["reschedule"]
    rows = yield Statement(query, {"timer_id": timer_id, **_when(due)})
    return bool(rows[0][0])


def cancelling(schema: str, timer_id: str) -> Questions[bool]:
    """Take a timer back; False: there is none, or its event was sent already."""
    rows = yield Statement(Queries(SQL_FILE, schema)["cancel"], {"timer_id": timer_id})
    return bool(rows[0][0])


def listing(
    schema: str, wanted: PendingFilter, *, held_only: bool = False
) -> Questions[list[PendingTimer]]:
    """The timers that wait, the next one first."""
    parameters = {
        "before": None if wanted.before is None else wanted.before.isoformat(),
        "stream_name": wanted.stream_name,
        "limit": wanted.limit,
        "held_only": held_only,
    }
    rows = yield Statement(Queries(SQL_FILE, schema)["pending"], parameters)
    return [pending_timer(row) for row in rows]


def reading(schema: str, timer_id: str) -> Questions[StoredTimer | None]:
    """One timer with its event; None: there is none."""
    rows = yield Statement(Queries(SQL_FILE, schema)["read"], {"timer_id": timer_id})
    return _stored(rows[0]) if rows else None


def reading_due(
    schema: str, until: datetime | None
) -> Questions[tuple[datetime, list[StoredTimer]]]:
    """What is due by a moment (None: now), in order, and that moment."""
    queries = Queries(SQL_FILE, schema)
    if until is None:
        rows = yield Statement(queries["clock"], {})
        until = rows[0][0].astimezone(UTC)
    assert until is not None
    rows = yield Statement(queries["due_by"], {"until": until.isoformat()})
    return until, [_stored(row) for row in rows]


def sending(schema: str, batch: str) -> Questions[None]:
    """Put events into the outbox in the caller's transaction."""
    yield Statement(Queries(SQL_FILE, schema)["send"], {"batch": batch})


def pending_timer(row: Sequence[Any]) -> PendingTimer:
    """The timer in a row that begins like those of `pending`."""
    timer_id, stream_name, event_type, version, key, key_id, due_at, *rest = row
    stored, held_reason, created_at = rest[:3]
    recurrence, trouble = _recurrence(stored)
    return PendingTimer(
        timer_id=timer_id,
        stream_name=stream_name,
        event_type=event_type,
        version=version,
        key=key if key_id is None else None,
        due_at=due_at.astimezone(UTC),
        recurrence=recurrence,
        is_sealed=key_id is not None,
        held_reason=trouble if held_reason is None else held_reason,
        created_at=created_at.astimezone(UTC),
    )


def _stored(row: Sequence[Any]) -> StoredTimer:
    timer_id, stream_name, event_type, version, key, key_id, *_ = row
    held_at, payload, metadata = row[10:]
    event = OutgoingEvent(
        seal_uuid(timer_id),
        stream_name,
        event_type,
        version,
        key,
        payload,
        metadata,
        key_id=key_id,
    )
    return StoredTimer(pending_timer(row), held_at, event)


def _recurrence(stored: str | None) -> tuple[Recurrence | None, str | None]:
    """How it recurs, and what is wrong with that: anybody may have written it, in SQL."""
    if stored is None:
        return None, None
    try:
        return Recurrence.from_text(stored), None
    except InvalidTimer as error:
        return None, f"It cannot be fired: {error}"


def _first_run(schema: str, recurrence: Recurrence | None) -> Questions[datetime]:
    assert recurrence is not None, "a timer without a time recurs"
    rows = yield Statement(Queries(SQL_FILE, schema)["clock"], {})
    now: datetime = rows[0][0]
    return recurrence.first_after(now)


def _row(timer: NewTimer, event: OutgoingEvent) -> dict[str, Any]:
    recurrence = timer.recurrence
    return {
        "timer_id": timer.timer_id,
        "stream_name": event.stream_name,
        "event_type": event.event_type,
        "version": event.version,
        "key": event.key,
        "key_id": event.key_id,
        "payload": event.payload,
        "metadata": event.metadata,
        "recurrence": None if recurrence is None else orjson.dumps(recurrence.to_json()).decode(),
        "on_conflict": "keep" if timer.on_conflict == "error" else timer.on_conflict,
    }


def _when(due: Due) -> dict[str, Any]:
    if isinstance(due, datetime):
        return {"due_at": due.isoformat(), "delay": None}
    return {"due_at": None, "delay": _interval(due)}


def _interval(delay: timedelta) -> str:
    """In hours and seconds, because a day of PostgreSQL's has 23 or 25 hours now and then."""
    hours, rest = divmod(delay, timedelta(hours=1))
    return f"{hours} hours {rest.seconds}.{rest.microseconds:06} seconds"
