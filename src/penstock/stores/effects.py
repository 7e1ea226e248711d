"""Calls to the outside, in PostgreSQL: begun, done with a result, or taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

import psycopg

from penstock.errors import ServerUnavailable
from penstock.stores.postgres import is_lost
from penstock.stores.queries import Queries

Control = Callable[[], psycopg.Connection[Any]]
"""Gives the process's shared connection, which commits every statement. Or ServerUnavailable."""


@dataclass(frozen=True, slots=True)
class EffectRecord:
    """What is known of one effect of one event."""

    is_done: bool
    result: str | None
    """JSON. None: there is no result yet, or it is done and its result could not be kept."""
    calls: int
    host: str
    """Where the latest call began."""
    started_at: datetime
    call_id: str | None
    """The call that is the latest to have begun, or whose result it is."""


class EffectTable:
    """The table `effect` for one consumer.

    Every method is one statement that may be said twice, and is, where its answer was lost. All
    raise ServerUnavailable.
    """

    def __init__(self, schema: str, control: Control, consumer: str, host: str) -> None:
        self._sql = Queries("effect.sql", schema)
        self._control = control
        self._consumer = consumer
        self._host = host

    def look(self, event_uuid: str, effect: str) -> EffectRecord | None:
        """What is recorded, if anything."""
        row = self._ask("look", event_uuid, effect)
        return None if row is None else EffectRecord(*row)

    def begin(self, event_uuid: str, effect: str, call_id: str) -> EffectRecord:
        """Record that a call begins, unless there is a record; returns the one that holds."""
        return self._record("begin", event_uuid, effect, call_id=call_id)

    def begin_again(self, event_uuid: str, effect: str, call_id: str) -> EffectRecord:
        """Record one more call beside one of unknown outcome, unless it is done meanwhile."""
        return self._record("begin_again", event_uuid, effect, call_id=call_id)

    def record(
        self, event_uuid: str, effect: str, call_id: str, result: str | None
    ) -> EffectRecord:
        """Record that it is done, unless somebody has; returns the record that holds."""
        return self._record("record", event_uuid, effect, call_id=call_id, result=result)

    def forget(self, event_uuid: str, effect: str, call_id: str) -> None:
        """Take back one's own call, which did nothing."""
        self._ask("forget", event_uuid, effect, call_id=call_id)

    def _record(self, query: str, event_uuid: str, effect: str, **more: Any) -> EffectRecord:
        row = self._ask(query, event_uuid, effect, **more)
        assert row is not None
        return EffectRecord(*row)

    def _ask(self, query: str, event_uuid: str, effect: str, **more: Any) -> tuple[Any, ...] | None:
        parameters = {
            "consumer": self._consumer,
            "event_uuid": event_uuid,
            "effect": effect,
            "host": self._host,
            **more,
        }
        try:
            return self._execute(query, parameters)
        except psycopg.Error as error:
            if not is_lost(error):
                _raise_told(effect, error)
        # A connection that was lost says nothing of the server: the next one is new.
        try:
            return self._execute(query, parameters)
        except psycopg.Error as error:
            _raise_told(effect, error)

    def _execute(self, query: str, parameters: dict[str, Any]) -> tuple[Any, ...] | None:
        cursor = self._control().execute(self._sql[query], parameters)
        return cursor.fetchone() if cursor.description is not None else None


def _raise_told(effect: str, error: psycopg.Error) -> NoReturn:
    """What a caller gets to see. Of a statement that is wrong, the error: no waiting cures that."""
    if not (is_lost(error) or isinstance(error, psycopg.OperationalError)):
        raise error
    raise ServerUnavailable(
        f"PostgreSQL did not answer about the effect {effect!r}: {str(error).strip()} What this "
        "process knows of the call is kept here until the event is tried again."
    ) from error
