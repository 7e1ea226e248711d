"""What operators ask about timers, and do to them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg

from penstock.core.sealing import opened_event
from penstock.core.timers import (
    PendingTimer,
    StoredTimer,
    parse_delay,
    parse_filter,
    parse_moment,
    parse_timer_id,
)
from penstock.errors import InvalidTimer, OperationRefused, SealBroken, UsageError
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.questions import ask
from penstock.stores.stream_keys import StreamKeys
from penstock.stores.timers import SQL_FILE, cancelling, listing, reading, rescheduling

Connection = psycopg.Connection[Any]

_SPAN: Final = re.compile(r"(\d{1,9})\s*(s|m|h|d|w)")
_SPAN_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Timers:
    """The timers of a database, on a connection in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        assert connection.autocommit, "every action is a transaction of its own"
        self._connection = connection
        self._schema = schema

    def clock(self) -> datetime:
        """The database's time, which is what timers go by."""
        row = self._connection.execute(Queries(SQL_FILE, self._schema)["clock"]).fetchone()
        assert row is not None
        now: datetime = row[0]
        return now.astimezone(UTC)

    def list(
        self,
        *,
        stream: str | None = None,
        before: datetime | None = None,
        held_only: bool = False,
        limit: int,
    ) -> list[PendingTimer]:
        """Those that wait, the next one first. Raises InvalidTimer."""
        wanted = parse_filter(before, stream, limit)
        return ask(self._connection, listing(self._schema, wanted, held_only=held_only))

    def find(self, timer_id: str) -> StoredTimer:
        """One timer with its event. Raises OperationRefused where there is none."""
        found = ask(self._connection, reading(self._schema, parse_timer_id(timer_id)))
        if found is None:
            raise _missing(timer_id)
        return found

    def cancel(self, timer_id: str, *, by: str, reason: str) -> None:
        """Take a timer back, on record. Raises OperationRefused where there is none."""
        with self._connection.transaction():
            timer = self.find(timer_id).pending
            if not ask(self._connection, cancelling(self._schema, timer.timer_id)):
                raise _missing(timer_id)
            self._record("cancel timer", timer, by, reason)

    def reschedule(
        self, timer_id: str, due: datetime | timedelta, *, by: str, reason: str
    ) -> datetime:
        """Move its next firing, on record; lets go of a held one. Returns when it is due."""
        with self._connection.transaction():
            timer = self.find(timer_id).pending
            if not ask(self._connection, rescheduling(self._schema, timer.timer_id, due)):
                raise _missing(timer_id)
            # Within the transaction, in which nobody can have fired it yet.
            due_at = self.find(timer_id).pending.due_at
            self._record("reschedule timer", timer, by, reason, moved_to=due_at.isoformat())
        return due_at

    def _record(self, kind: str, timer: PendingTimer, by: str, reason: str, **more: str) -> None:
        criteria = {
            "timer_id": timer.timer_id,
            "stream_name": timer.stream_name,
            "event_type": timer.event_type,
            "due_at": timer.due_at.isoformat(),
            **more,
        }
        parameters = {"kind": kind, "criteria": json.dumps(criteria), "by": by, "reason": reason}
        self._connection.execute(Queries(SQL_FILE, self._schema)["record"], parameters)


def timer_json(timer: PendingTimer) -> dict[str, Any]:
    """A timer for programs."""
    recurrence = None if timer.recurrence is None else timer.recurrence.to_json()
    return {
        "timer_id": timer.timer_id,
        "stream_name": timer.stream_name,
        "event_type": timer.event_type,
        "version": timer.version,
        "key": timer.key,
        "due_at": timer.due_at,
        "recurrence": recurrence,
        "is_sealed": timer.is_sealed,
        "held_reason": timer.held_reason,
        "created_at": timer.created_at,
    }


def revealed_timer(timer: StoredTimer, keys: StreamKeys) -> StoredTimer:
    """The timer as if it had not been sealed; a plain one as it is.

    Raises KeyUnavailable, KeyRefused, KeyShredded or SealBroken.
    """
    event = timer.event
    if event.key_id is None:
        return timer
    wrapped = keys.find({event.key_id}).get(event.key_id)
    if wrapped is None:
        raise SealBroken(f"The stream {event.stream_name!r} has no data key {event.key_id}.")
    opened = opened_event(event, keys.unwrapped(wrapped).key)
    return replace(timer, pending=replace(timer.pending, key=opened.key), event=opened)


def parse_time(option: str, text: str, now: datetime) -> datetime:
    """A time with its zone, or a span from now like 2h. Raises UsageError."""
    if span := _span(text):
        return parse_moment(option, now.astimezone(UTC) + span)
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is neither a span like 30m, 2h or 7d, nor a time like "
            "2030-01-31T06:00:00+00:00."
        ) from None
    if moment.tzinfo is None:
        raise UsageError(
            f"{option} {text!r} has no time zone; write for example {moment.isoformat()}+00:00."
        )
    return parse_moment(option, moment)


def parse_span(option: str, text: str) -> timedelta:
    """A span like 90s, 30m, 2h, 7d. Raises UsageError."""
    span = _span(text)
    if span is None:
        raise UsageError(f"{option} {text!r} is no span; write for example 90s, 30m, 2h or 7d.")
    return parse_delay(span)


def _span(text: str) -> timedelta | None:
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None:
        return None
    try:
        return parse_delay(timedelta(seconds=int(found[1]) * _SPAN_SECONDS[found[2]]))
    except OverflowError:
        raise InvalidTimer(f"{text!r} is longer than all time.") from None


def _missing(timer_id: str) -> OperationRefused:
    return OperationRefused(
        f"There is no timer {timer_id!r}: it was never scheduled, was cancelled, or its event was "
        "sent already. Nothing was changed."
    )
