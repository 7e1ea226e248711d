"""The one connection on which a process asks everything that is not handling."""

from __future__ import annotations

import threading
from typing import Any

import psycopg

from penstock.stores.postgres import connect, limit

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
                # Leases are renewed on it: nobody's lock and no slow answer may hold that up.
                limit(
                    connection,
                    lock_seconds=LOCK_SECONDS,
                    statement_seconds=self._statement_seconds,
                )
                self._connection = connection
            return self._connection

    def close(self) -> None:
        """Give the connection up; the next use opens a new one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
