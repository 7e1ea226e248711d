"""The one connection on which a process asks everything that is not handling."""

from __future__ import annotations

import threading
from typing import Any

import psycopg

from penstock.stores.postgres import connect
from penstock.stores.queries import Queries

LOCK_SECONDS = 2.0


class ControlConnection:
    """Shared by the threads of a process; opened at first use, and again when it was lost.

    Each use is one statement that commits by itself. Nothing may be waited for on it for long:
    the leases are renewed here.
    """

    def __init__(self, url: str, application_name: str, *, statement_seconds: float) -> None:
        self._url = url
        self._application_name = application_name
        self._statement_seconds = statement_seconds
        self._connection: psycopg.Connection[Any] | None = None
        self._lock = threading.Lock()

    def get(self) -> psycopg.Connection[Any]:
        """A connection that was alive a moment ago. Raises ServerUnavailable."""
        with self._lock:
            if self._connection is None or self._connection.closed:
                connection = connect(self._url, self._application_name)
                # Poolers in transaction mode lose prepared statements.
                connection.prepare_threshold = None
                connection.execute(
                    Queries("lease.sql")["limit_waiting"],
                    {
                        "lock_milliseconds": str(int(LOCK_SECONDS * 1000)),
                        "statement_milliseconds": str(int(self._statement_seconds * 1000)),
                    },
                )
                self._connection = connection
            return self._connection

    def close(self) -> None:
        """Give the connection up; the next use opens a new one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
