"""Schedule: an event that is sent when it is due, if the transaction that made it commits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session

from penstock.core.events import Event, RawEvent
from penstock.core.outgoing import UNSET, Key, Unset
from penstock.core.recurrence import parse_recurrence
from penstock.core.require import require
from penstock.core.timers import (
    Due,
    NewTimer,
    PendingTimer,
    parse_due,
    parse_filter,
    parse_on_conflict,
    parse_timer_id,
    seal_uuid,
)
from penstock.errors import InvalidTimer, UsageError
from penstock.pipeline.sending import Sender
from penstock.stores import timer_transactions as transactions
from penstock.stores import timers
from penstock.stores.identity import new_event_uuid
from penstock.stores.questions import Questions

T = TypeVar("T")


class Scheduler:
    """Checks and encodes what is to be sent later, and says how that is stored."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def new_timer(
        self,
        stream: str,
        event: Event | RawEvent,
        *,
        at: datetime | None = None,
        delay: timedelta | None = None,
        every: timedelta | None = None,
        cron: str | None = None,
        zone: str | None = None,
        catch_up: str = "one",
        timer_id: str | UUID | None = None,
        key: Key | Unset = UNSET,
        metadata: Mapping[str, Any] | None = None,
        on_conflict: str = "replace",
    ) -> NewTimer:
        """The timer, if it can be kept. Raises InvalidTimer or InvalidEvent; writes nothing."""
        due = parse_due(at, delay)
        recurrence = parse_recurrence(every=every, cron=cron, zone=zone, catch_up=catch_up)
        require(
            due is not None or recurrence is not None,
            "It is not said when the event is to be sent, so nothing was scheduled. Pass at=, "
            "delay=, every= or cron=.",
            InvalidTimer,
        )
        if recurrence is not None and due is None and recurrence.every_seconds is not None:
            due = timedelta(seconds=recurrence.every_seconds)
        identity = str(new_event_uuid()) if timer_id is None else parse_timer_id(timer_id)
        [outgoing] = self._sender.encode(stream, [event], key, metadata, [seal_uuid(identity)])
        return NewTimer(identity, outgoing, due, recurrence, parse_on_conflict(on_conflict))

    def schedule(self, target: Any, timer: NewTimer) -> str:
        """Store it in the target's transaction; returns its id."""
        self._ask(target, "schedule", lambda place: self._scheduling(place, timer))
        return timer.timer_id

    async def schedule_async(self, target: Any, timer: NewTimer) -> str:
        """The same for asynchronous sessions and connections."""
        await self._ask_async(target, "schedule", lambda place: self._scheduling(place, timer))
        return timer.timer_id

    def cancel(self, target: Any, timer_id: str | UUID) -> bool:
        """Take a timer back; False: there is none, or its event was sent already."""
        return self._ask(target, "cancel", self._cancelling(timer_id))

    async def cancel_async(self, target: Any, timer_id: str | UUID) -> bool:
        """The same for asynchronous sessions and connections."""
        return await self._ask_async(target, "cancel", self._cancelling(timer_id))

    def reschedule(
        self, target: Any, timer_id: str | UUID, at: datetime | None, delay: timedelta | None
    ) -> bool:
        """Move a timer's next firing; False: there is none, or its event was sent already."""
        return self._ask(target, "reschedule", self._rescheduling(timer_id, at, delay))

    async def reschedule_async(
        self, target: Any, timer_id: str | UUID, at: datetime | None, delay: timedelta | None
    ) -> bool:
        """The same for asynchronous sessions and connections."""
        asking = self._rescheduling(timer_id, at, delay)
        return await self._ask_async(target, "reschedule", asking)

    def pending(
        self, target: Any, before: datetime | None, stream: str | None, limit: int
    ) -> list[PendingTimer]:
        """The timers that the target's transaction sees, the next one first."""
        return self._ask(target, "pending", self._listing(before, stream, limit))

    async def pending_async(
        self, target: Any, before: datetime | None, stream: str | None, limit: int
    ) -> list[PendingTimer]:
        """The same for asynchronous sessions and connections."""
        return await self._ask_async(target, "pending", self._listing(before, stream, limit))

    def ask(self, target: Any, verb: str, asking: Callable[[str], Questions[T]]) -> T:
        """Ask something else about timers in the target's transaction; `asking` gets the schema."""
        return self._ask(target, verb, lambda _place: asking(self._sender.schema))

    # ── what is asked ─────────────────────────────────────────────────────────────────────────

    def _scheduling(self, place: object, timer: NewTimer) -> Questions[str]:
        return timers.scheduling(place, self._sender.schema, timer)

    def _cancelling(self, timer_id: str | UUID) -> Callable[[object], Questions[bool]]:
        identity = parse_timer_id(timer_id)
        return lambda _place: timers.cancelling(self._sender.schema, identity)

    def _rescheduling(
        self, timer_id: str | UUID, at: datetime | None, delay: timedelta | None
    ) -> Callable[[object], Questions[bool]]:
        identity, due = parse_timer_id(timer_id), required_due(at, delay)
        return lambda _place: timers.rescheduling(self._sender.schema, identity, due)

    def _listing(
        self, before: datetime | None, stream: str | None, limit: int
    ) -> Callable[[object], Questions[list[PendingTimer]]]:
        wanted = parse_filter(before, stream, limit)
        return lambda _place: timers.listing(self._sender.schema, wanted)

    # ── through what ──────────────────────────────────────────────────────────────────────────

    def _ask(self, target: Any, verb: str, asking: Callable[[object], Questions[T]]) -> T:
        schema = self._sender.schema
        plain = target() if isinstance(target, scoped_session) else target
        match plain:
            case Session():
                return transactions.ask_in_session(plain, schema, asking)
            case Connection():
                return transactions.ask_in_connection(plain, schema, asking)
            case psycopg.Connection():
                return transactions.ask_in_psycopg(plain, schema, asking)
            case AsyncSession() | AsyncConnection() | psycopg.AsyncConnection():
                raise _refused(plain, verb, f"write `await {verb}_async(...)`")
            case async_scoped_session():
                raise _refused(plain, verb, f"write `await {verb}_async(...)`")
            case _:
                raise _refused(plain, verb, _ADVICE)

    async def _ask_async(
        self, target: Any, verb: str, asking: Callable[[object], Questions[T]]
    ) -> T:
        schema = self._sender.schema
        plain = target() if isinstance(target, async_scoped_session) else target
        match plain:
            case AsyncSession():
                in_session = partial(transactions.ask_in_session, schema=schema, asking=asking)
                return await plain.run_sync(in_session)
            case AsyncConnection() if plain.sync_connection is None:
                raise _refused(plain, verb, "enter it first, with `async with`")
            case AsyncConnection():
                in_it = partial(transactions.ask_in_connection, schema=schema, asking=asking)
                return await plain.run_sync(in_it)
            case psycopg.AsyncConnection():
                return await transactions.ask_in_psycopg_async(plain, schema, asking)
            case Session() | Connection() | psycopg.Connection() | scoped_session():
                raise _refused(plain, verb, f"write `{verb}(...)`, in a thread of its own")
            case _:
                raise _refused(plain, verb, _ADVICE)


_ADVICE = "pass the SQLAlchemy or psycopg one that writes your data"


def required_due(at: datetime | None, delay: timedelta | None) -> Due:
    """When, for a timer that is moved. Raises InvalidTimer where that is not said."""
    due = parse_due(at, delay)
    if due is None:
        raise InvalidTimer(
            "It is not said when the timer is to be fired, so nothing was changed. Pass at= or "
            "delay=."
        )
    return due


def _refused(target: object, verb: str, advice: str) -> UsageError:
    kind = f"{type(target).__module__.partition('.')[0]} {type(target).__name__}"
    return UsageError(
        f"Cannot {verb} like this through a {kind}: a timer belongs to a transaction, and is "
        f"stored at once. Nothing was changed; {advice}."
    )
