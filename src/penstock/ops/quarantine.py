"""Quarantine as the database keeps it: what supervisors set aside and operators release."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Protocol

import psycopg

from penstock.core.crash_budget import Crash
from penstock.core.settings import Settings
from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class QuarantinedConsumer:
    """A consumer that no supervisor starts, why, and who found it."""

    name: str
    stream_name: str | None
    reason: str
    crashes: list[dict[str, Any]]
    """Oldest first: died_at, exit_code, ran_seconds, was_silent, worker_id."""
    host: str | None
    quarantined_at: datetime

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


class Entry(Protocol):
    """What a supervisor knows of one that crashed too often."""

    @property
    def name(self) -> str:
        """The consumer's full name."""

    @property
    def reason(self) -> str:
        """Which budget was exhausted."""

    @property
    def crashes(self) -> tuple[Crash, ...]:
        """Those that count."""


def quarantine(connection: Connection, entry: Entry, schema: str = DEFAULT_SCHEMA) -> None:
    """Set a consumer aside; one that is set aside already keeps its history."""
    connection.execute(
        Queries("quarantine.sql", schema)["quarantine"],
        {
            "name": entry.name,
            "reason": entry.reason,
            "crashes": json.dumps([_described(crash) for crash in entry.crashes]),
            "host": socket.gethostname(),
        },
    )


def release(connection: Connection, name: str | None, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """Release one, or all with None; returns who was released."""
    rows = connection.execute(
        Queries("quarantine.sql", schema)["release"], {"name": name}
    ).fetchall()
    return sorted(row[0] for row in rows)


def read_all(connection: Connection, schema: str = DEFAULT_SCHEMA) -> list[QuarantinedConsumer]:
    """Everybody who is set aside, the longest first."""
    rows = connection.execute(Queries("quarantine.sql", schema)["read_all"]).fetchall()
    return [QuarantinedConsumer(*row) for row in rows]


class QuarantineTable:
    """The same for a supervisor, which asks every few seconds on one connection."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._connection: Connection | None = None

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep these. Raises what a server that is away raises."""
        connection = self._connected()
        for entry in entries:
            quarantine(connection, entry, self._settings.schema)

    def read(self) -> frozenset[str]:
        """The names of all. Raises what a server that is away raises."""
        query = Queries("quarantine.sql", self._settings.schema)["read_names"]
        return frozenset(row[0] for row in self._connected().execute(query))

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._settings.database_url, "penstock supervisor")
        return self._connection


def _described(crash: Crash) -> dict[str, Any]:
    return {
        "died_at": crash.died_at.isoformat(),
        "exit_code": crash.exit_code,
        "ran_seconds": crash.ran_seconds,
        "was_silent": crash.was_silent,
        "worker_id": crash.worker_id,
    }
