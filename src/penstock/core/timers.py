"""Timers: events that are sent when they are due, as they are asked for and as they wait."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid5

import orjson

from penstock.core.outgoing import OutgoingEvent, is_stream_name
from penstock.core.recurrence import Recurrence
from penstock.core.require import require
from penstock.core.wire import Entry
from penstock.errors import InvalidTimer

TIMER_ID_LENGTH_MAX: Final = 200
DELAY_MAX: Final = timedelta(days=36_525)
# Within what datetime and every driver can say in any time zone.
DUE_EARLIEST: Final = datetime(1900, 1, 1, tzinfo=UTC)
DUE_LATEST: Final = datetime(9000, 1, 1, tzinfo=UTC)
PENDING_LIMIT_MAX: Final = 100_000

_SEAL_NAMESPACE: Final = UUID("6d8f3e0a-52c7-5b0e-9c41-8d1f6f0b7a35")
# The same rule as the CHECK of events.timer, found out before anything is written.
_TIMER_ID: Final = re.compile(
    rf"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{{1,{TIMER_ID_LENGTH_MAX}}}"
)

OnConflict: TypeAlias = Literal["replace", "keep", "error"]
"""What becomes of a timer that has the id already: it goes, it stays, or TimerExists is raised."""
Due: TypeAlias = datetime | timedelta
"""A moment, or how long from now by the database's clock."""


@dataclass(frozen=True, slots=True)
class NewTimer:
    """A timer that somebody wants; everything of it was checked."""

    timer_id: str
    event: OutgoingEvent
    due: Due | None
    """None: whenever it recurs first."""
    recurrence: Recurrence | None
    on_conflict: OnConflict


@dataclass(frozen=True, slots=True)
class PendingTimer:
    """A timer that waits for its time."""

    timer_id: str
    stream_name: str
    event_type: str
    version: int
    key: str | None
    """None where there is none, and where it is sealed."""
    due_at: datetime
    recurrence: Recurrence | None
    """None: it is fired once."""
    is_sealed: bool
    held_reason: str | None
    """Why it was set aside instead of fired; None: it is fired when it is due."""
    created_at: datetime


@dataclass(frozen=True, slots=True)
class StoredTimer:
    """A pending timer with the event that it will send, as the table has it."""

    pending: PendingTimer
    held_at: datetime | None
    event: OutgoingEvent
    """Sealed where it is, under the identity of the seal and not of an event."""

    def entry(self) -> Entry:
        """The event as if it lay on a tier, for whoever shows entries."""
        event = self.event
        names = (orjson.dumps(event.key), event.metadata.encode())
        return Entry(
            event.stream_name,
            0,
            "",
            str(event.event_uuid),
            event.event_type,
            event.version,
            (b"0", b"0", (event.key_id or "").encode(), b"0", *names),
            event.payload.encode(),
        )


@dataclass(frozen=True, slots=True)
class PendingFilter:
    """Which pending timers are asked for: due before a moment, of a stream, at most so many."""

    before: datetime | None
    stream_name: str | None
    limit: int


def seal_uuid(timer_id: str) -> UUID:
    """What a sealed timer is bound to until it is fired, and its event has an identity."""
    return uuid5(_SEAL_NAMESPACE, timer_id)


def parse_timer_id(timer_id: object) -> str:
    """The id as text. Raises InvalidTimer for what the table could not hold."""
    if isinstance(timer_id, UUID):
        return str(timer_id)
    if isinstance(timer_id, str) and _TIMER_ID.fullmatch(timer_id):
        return str.__str__(timer_id)
    raise InvalidTimer(
        f"timer_id must be a UUID or a text of 1 to {TIMER_ID_LENGTH_MAX} characters without "
        "control characters. Nothing was changed; pass what names the timer, the same whenever "
        "you mean it."
    )


def parse_due(at: object, delay: object) -> Due | None:
    """When, in one value; None where neither is given. Raises InvalidTimer."""
    require(
        at is None or delay is None,
        "at and delay both say when, so nothing was changed. Pass one of them.",
        InvalidTimer,
    )
    if at is not None:
        return parse_moment("at", at)
    return None if delay is None else parse_delay(delay)


def parse_moment(name: str, moment: object) -> datetime:
    """A point in time, in UTC. Raises InvalidTimer for anything that leaves doubt."""
    if not isinstance(moment, datetime):
        raise InvalidTimer(
            f"{name} is a {type(moment).__name__}, so nothing was changed. Pass a datetime with a "
            "time zone."
        )
    if moment.utcoffset() is None:
        raise InvalidTimer(
            f"{name} has no time zone, so it could mean several moments. Nothing was changed; "
            "write datetime(…, tzinfo=UTC) or another zone."
        )
    if not DUE_EARLIEST <= moment < DUE_LATEST:
        raise InvalidTimer(
            f"{name} is in the year {moment.year}, so nothing was changed. Pass a time between "
            f"{DUE_EARLIEST.year} and {DUE_LATEST.year}."
        )
    return moment.astimezone(UTC)


def parse_delay(delay: object) -> timedelta:
    """How long from now; a negative delay is none. Raises InvalidTimer."""
    if not isinstance(delay, timedelta):
        raise InvalidTimer(
            f"delay is a {type(delay).__name__}, so nothing was changed. Pass a timedelta, which "
            "says its unit."
        )
    if delay > DELAY_MAX:
        raise InvalidTimer(
            f"delay is longer than {DELAY_MAX.days:,} days, so nothing was changed. Pass a "
            "shorter one, or a moment as at=…."
        )
    return max(delay, timedelta(0))


def parse_on_conflict(on_conflict: object) -> OnConflict:
    """What becomes of a timer of the same id. Raises InvalidTimer."""
    for choice in typing.get_args(OnConflict):
        if on_conflict == choice:
            return typing.cast("OnConflict", choice)
    raise InvalidTimer(
        'on_conflict must be "replace", "keep" or "error". Nothing was scheduled; leave it out to '
        "replace a timer that has the same id."
    )


def parse_filter(before: object, stream: object, limit: object) -> PendingFilter:
    """Which timers are asked for. Raises InvalidTimer."""
    if stream is not None and not is_stream_name(stream):
        raise InvalidTimer("stream must be the name of a stream, or None for all of them.")
    if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= PENDING_LIMIT_MAX:
        raise InvalidTimer(f"limit must be a number from 1 to {PENDING_LIMIT_MAX:,}.")
    moment = None if before is None else parse_moment("before", before)
    return PendingFilter(moment, typing.cast("str | None", stream), limit)
