"""What the database knows about one event, at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.journey import Books, Call, Facts, Remote, Sent, Touch, Trail, Way
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

KEY_WINDOW_POSITIONS = 100_000
"""A key's events are looked for among so many of the last ones of each stream."""

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class KeyedEvent:
    """One event of a key, in short."""

    event_uuid: str
    stream_name: str
    position: int | None
    event_type: str
    created_at: datetime


class Journeys:
    """Reads everything that is recorded of an event. Callers bring connections in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._sql = Queries("journey.sql", schema)

    def by_uuid(self, event_uuid: str) -> Facts:
        """What is known of an event by its id."""
        with self._moment():
            sent = self._sent("by_uuid", {"event_uuid": event_uuid})
            if sent is not None:
                return self._facts(event_uuid, sent.stream_name, sent.position, sent)
            row = self._row("place_of", {"event_uuid": event_uuid})
            if row is None:
                return Facts(event_uuid, None, None)
            return self._facts(event_uuid, row[0], row[1], None)

    def by_place(self, stream_name: str, position: int) -> Facts:
        """What is known of whatever stands, or stood, at a place."""
        place = {"stream_name": stream_name, "position": position}
        with self._moment():
            sent = self._sent("by_place", place)
            if sent is not None:
                return self._facts(sent.event_uuid, stream_name, position, sent)
            row = self._row("uuid_of", place)
            return self._facts(None if row is None else row[0], stream_name, position, None)

    def known(self, event_uuid: str, stream_name: str, position: int) -> Facts:
        """What is known of an event that was found elsewhere."""
        with self._moment():
            return self._facts(event_uuid, stream_name, position, None)

    def of_key(self, key: str, stream_name: str | None, limit: int) -> list[KeyedEvent]:
        """The latest events of a key, the newest first."""
        parameters = {
            "key": key,
            "stream_name": stream_name,
            "limit": limit,
            "window": KEY_WINDOW_POSITIONS,
        }
        with self._moment():
            return [KeyedEvent(*row) for row in self._rows("of_key", parameters)]

    @contextmanager
    def _moment(self) -> Iterator[None]:
        with self._connection.transaction():
            self._connection.execute(self._sql["begin"])
            self._connection.execute(self._sql["limit_time"])
            yield

    def _sent(self, name: str, parameters: dict[str, Any]) -> Sent | None:
        row = self._row(name, parameters)
        return None if row is None else Sent(*row)

    def _facts(
        self, event_uuid: str | None, stream_name: str, position: int | None, sent: Sent | None
    ) -> Facts:
        event = {"event_uuid": event_uuid, "stream_name": stream_name, "position": position}
        return Facts(
            event_uuid=event_uuid,
            stream_name=stream_name,
            position=position,
            sent=sent,
            found_in=None if sent is None else "outbox",
            way=self._way(event),
            books=[Books(*row) for row in self._rows("consumers", event)],
            trail=[Trail(*row) for row in self._rows("trail", event)],
            touches=[Touch(*row) for row in self._rows("operations", event)],
            calls=[Call(*row) for row in self._rows("effects", event)],
            remotes=[Remote(*row) for row in self._rows("remote", event)],
        )

    def _way(self, event: dict[str, Any]) -> Way | None:
        row = self._row("stream", event)
        if row is None:
            return None
        head, published, hole_first, hole_last, reason = row
        hole = None if hole_first is None else (hole_first, hole_last, reason)
        archived = None if event["position"] is None else self._row("archived", event)
        return Way(head, published, hole, archived)

    def _row(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._connection.execute(self._sql[name], parameters).fetchone()

    def _rows(self, name: str, parameters: dict[str, Any]) -> list[Any]:
        return self._connection.execute(self._sql[name], parameters).fetchall()
