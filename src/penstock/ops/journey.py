"""Tells everything that is known about an event, wherever it is now."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import psycopg

from penstock.core.archive_lines import body_of_line
from penstock.core.journey import Facts, Journey, Sent, tell
from penstock.core.settings import Settings
from penstock.core.wire import Entry, decode_record
from penstock.errors import (
    ArchiveDamaged,
    ContractError,
    MalformedEntry,
    OperationRefused,
    ServerUnavailable,
    UsageError,
)
from penstock.ops.archive import read_lines
from penstock.stores.journeys import Journeys

_PLACE = re.compile(r"(?P<stream>.+)/(?P<position>[1-9]\d{0,17})")


def parse_event(text: str) -> UUID | tuple[str, int]:
    """An event's id, or its place. Raises UsageError."""
    try:
        return UUID(text)
    except ValueError:
        place = _PLACE.fullmatch(text)
    if place is None:
        raise UsageError(
            f"{text!r} names no event: write its UUID, or its place as STREAM/POSITION."
        )
    return place["stream"], int(place["position"])


def read_journey(
    connection: psycopg.Connection[Any], settings: Settings, event: UUID | tuple[str, int]
) -> Journey:
    """An event's journey, by its id or its place."""
    journeys = Journeys(connection, settings.schema)
    facts = journeys.by_uuid(str(event)) if isinstance(event, UUID) else journeys.by_place(*event)
    note = None
    if facts.sent is None and facts.way is not None and facts.way.archived_in is not None:
        facts, note = _from_archive(connection, settings, journeys, facts)
    journey = tell(_as_far_as_numbered(facts), settings.settled_retention_days, datetime.now(UTC))
    return journey if note is None else replace(journey, unseen=(*journey.unseen, note))


def _as_far_as_numbered(facts: Facts) -> Facts:
    """Without those who have nothing to do with a place that was not given out yet."""
    if facts.way is None or facts.position is None or facts.position <= facts.way.head:
        return facts
    return replace(facts, books=[one for one in facts.books if one.outcome], remotes=())


def _from_archive(
    connection: psycopg.Connection[Any], settings: Settings, journeys: Journeys, facts: Facts
) -> tuple[Facts, str | None]:
    """The same with the event itself, which only the archive has any more."""
    assert facts.stream_name is not None
    assert facts.position is not None
    if settings.archive_url is None:
        return facts, "The event itself: it is archived, and no archive_url is set here."
    position = facts.position
    try:
        lines = list(read_lines(connection, settings, facts.stream_name, position, position))
        bodies = [body_of_line(line).encode() for line in lines]
        records = [decode_record(facts.stream_name, position, body) for body in bodies]
    except (ServerUnavailable, ArchiveDamaged, MalformedEntry, OperationRefused) as error:
        return facts, f"The event itself, which is archived: {error}"
    events = [record for record in records if isinstance(record, Entry)]
    if not events:
        return facts, None
    sent = _sent_of(events[0])
    if facts.event_uuid is None:
        facts = journeys.known(sent.event_uuid, sent.stream_name, position)
    return replace(facts, sent=sent, found_in="archive"), None


def _sent_of(entry: Entry) -> Sent:
    try:
        metadata = entry.metadata()
    except ContractError:
        # PostgreSQL stores numbers and depths that nothing else can read.
        metadata = {}
    return Sent(
        stream_name=entry.stream_name,
        position=entry.position,
        event_uuid=entry.event_uuid,
        event_type=entry.event_type,
        version=entry.version,
        key=entry.key,
        is_sealed=bool(entry.key_id),
        timer_id=_text(metadata.get("__timer_id__")),
        causation_id=_text(metadata.get("causation_id")),
        created_at=datetime.fromtimestamp(int(entry.fields[3]) / 1_000_000, UTC),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
