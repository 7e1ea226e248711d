"""What people do to a running line: pause and resume, redrive, release; and what they saw."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.ops import quarantine
from penstock.ops.consumers import Consumers
from penstock.ops.redriving import Plan, Redrive
from penstock.ops.verify import Verify
from penstock.stores.dead_letters import Criteria

NAME = "chaos"
GO_ON = 1_000_000
"""A redrive that fails stops by itself after so many failures; here it may go on."""
LETTERS = """
SELECT d.id, d.consumer, d.event_uuid::text, d.reason, jsonb_array_length(d.attempts),
       concat_ws(' ', d.error_type, d.error_message, d.attempts::text),
       o.payload ->> 'trouble'
  FROM events.dead_letter d JOIN events.outbox_event o USING (event_uuid)
"""


@dataclass(frozen=True, slots=True)
class Buried:
    """A dead letter as it was when somebody looked."""

    consumer: str
    event_uuid: str
    reason: str
    attempts: int
    errors: str
    trouble: str | None


class Operator:
    """Works on the database itself, past all proxies. Raises what a server that is away raises."""

    def __init__(self, database_url: Callable[[], str]) -> None:
        self._database_url = database_url
        self.buried: set[Buried] = set()
        """Every letter that was ever there: none goes before somebody has looked at it."""
        self.quarantined = 0
        self.verified = 0

    def pause(self, consumer: str) -> None:
        with self._connect() as connection:
            Consumers(connection).pause([consumer], by=NAME)

    def resume(self, consumer: str) -> None:
        with self._connect() as connection:
            Consumers(connection).resume([consumer])

    def redrive(self, seconds: float) -> int:
        """One more attempt for every letter there is now; after a while, be interrupted.

        Returns how many were moved.
        """
        deadline = time.monotonic() + seconds
        with self._connect() as connection:
            if not (ids := self._look(connection)):
                return 0
            plan = Plan(criteria=Criteria(ids=ids), by=NAME, stop_after=GO_ON)
            done = Redrive(connection, plan).run(lambda: time.monotonic() > deadline)
        return done.tally.moved

    def look_at_letters(self) -> int:
        """Remember the letters of this moment; returns how many there are."""
        with self._connect() as connection:
            return len(self._look(connection))

    def verify(self) -> list[str]:
        """What `penstock verify` finds wrong, whatever is going on meanwhile."""
        url = self._database_url()
        with self._connect() as connection:
            report = Verify(connection, Settings(database_url=url)).run()
        self.verified += 1
        return [f"penstock verify: {finding}" for finding in report.findings]

    def release_quarantined(self) -> list[str]:
        """Have that started again which was killed so often that nobody would."""
        with self._connect() as connection:
            released = quarantine.release(connection, None)
        self.quarantined += len(released)
        return released

    def _look(self, connection: psycopg.Connection[Any]) -> tuple[int, ...]:
        rows = connection.execute(LETTERS).fetchall()
        self.buried |= {Buried(*row[1:]) for row in rows}
        return tuple(row[0] for row in rows)

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._database_url(), autocommit=True, connect_timeout=3)
