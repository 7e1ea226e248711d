"""Effects on a real database, with an outside world that counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg

from penstock.errors import ServerUnavailable
from penstock.pipeline.effects import Effects
from penstock.stores.control_connection import ControlConnection
from penstock.telemetry.bus import subscribe_to_all, unsubscribe
from penstock.telemetry.signals import Signal


class Outside:
    """Something that is called, and what it does then."""

    def __init__(self, *answers: Any) -> None:
        self.calls = 0
        self._answers = answers

    def __call__(self) -> Any:
        """The next answer, or the last one again; exceptions are raised."""
        answer = self._answers[min(self.calls, len(self._answers) - 1)]
        self.calls += 1
        if isinstance(answer, BaseException):
            raise answer
        return answer


class EffectBench:
    """Processes, as far as effects are concerned: each has its own connection and memory."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._controls: list[ControlConnection] = []
        self._connection = psycopg.connect(database_url, autocommit=True)
        self.event = str(uuid4())
        self.is_server_away = False

    def process(self, consumer: str = "shop.mail", host: str = "web01") -> Effects:
        """The effects of one consumer in a process of its own."""
        control = ControlConnection(self._database_url, "test effects", statement_seconds=5.0)
        self._controls.append(control)

        def get() -> psycopg.Connection[Any]:
            if self.is_server_away:
                raise ServerUnavailable("PostgreSQL is away")
            return control.get()

        return Effects("events", get, consumer, host)

    def die_in_call(
        self, effect: str = "receipt", *, consumer: str = "shop.mail", host: str = "web01"
    ) -> None:
        """A process begins a call and is gone."""

        class Killed(BaseException): ...

        try:
            self.process(consumer, host).once(self.event, effect, Outside(Killed()))
        except Killed:
            return

    def rows(self) -> list[tuple[Any, ...]]:
        """(effect, is_done, calls) of all that is on record of the event."""
        return self.ask(
            "SELECT effect, is_done, calls FROM events.effect WHERE event_uuid = %s ORDER BY 1",
            self.event,
        )

    def ask(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(query.encode(), parameters)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        for control in self._controls:
            control.close()
        self._connection.close()


@contextmanager
def heard() -> Iterator[list[str]]:
    """The names of the signals of effects, in order."""
    names: list[str] = []

    def listen(signal: Signal) -> None:
        name = type(signal).__name__
        if name.startswith("Effect"):
            names.append(name.removeprefix("Effect"))

    subscribe_to_all(listen)
    try:
        yield names
    finally:
        unsubscribe(listen)
