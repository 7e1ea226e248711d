"""Hears senders, so that a consumer with nothing to do can begin before the publisher is done."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg

from penstock.errors import PenstockError
from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

RETRY_SECONDS = 5.0


class EagerEar:
    """Hears the senders of one stream.

    Whatever goes wrong here costs the head start and nothing else; it is tried again after a
    while. One thread waits and looks, and is kept waiting by nothing; another one tends it.
    """

    def __init__(self, database_url: str, stream_name: str, schema: str = DEFAULT_SCHEMA) -> None:
        self._database_url = database_url
        self._stream_name = stream_name
        self._sql = Queries("early.sql", schema)
        self._lock = threading.Lock()
        self._connection: psycopg.Connection[Any] | None = None
        self._open_at = 0.0

    def descriptor(self) -> int | None:
        """What becomes readable when somebody has sent; None where that cannot be heard."""
        with self._kept():
            if self._connection is not None:
                return self._connection.pgconn.socket
        return None

    def is_heard(self) -> bool:
        """Whether somebody has sent since this was asked last. Waits for nothing."""
        with self._kept():
            if self._connection is not None:
                return _heard(self._connection)
        return False

    def tend(self) -> None:
        """Open it, if need be, and take in what nobody waits for."""
        if self._connection is None and time.monotonic() >= self._open_at:
            # A server may take its time over this, so nobody else may have to wait for it.
            opened: psycopg.Connection[Any] | None = None
            self._open_at = time.monotonic() + RETRY_SECONDS
            with suppress(psycopg.Error, PenstockError):
                opened = self._listening()
            with self._lock:
                self._connection = opened
        self.drain()

    def drain(self) -> None:
        """Take in what nobody waits for: a server keeps it for all, until the last has it."""
        with self._kept():
            if self._connection is not None:
                _heard(self._connection)

    def close(self) -> None:
        """Listen no more, whoever still waits."""
        with self._lock:
            self._close()

    def _listening(self) -> psycopg.Connection[Any] | None:
        connection = connect(self._database_url, "penstock early")
        try:
            connection.prepare_threshold = None
            row = connection.execute(
                self._sql["slot"], {"stream_name": self._stream_name}
            ).fetchone()
            if row is not None:
                connection.execute(f"LISTEN events_sent_{row[0]:d}".encode())
                return connection
        except BaseException:
            connection.close()
            raise
        # It may not wait for a numbering: that stays so.
        self._open_at = math.inf
        connection.close()
        return None

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """The connection for one thread; a broken one is given up, and nobody is troubled."""
        with self._lock:
            try:
                yield
            except (psycopg.Error, PenstockError):
                self._close()
                self._open_at = time.monotonic() + RETRY_SECONDS

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _heard(connection: psycopg.Connection[Any]) -> bool:
    """Whether anybody has sent since it was asked last. Waits for nothing."""
    connection.pgconn.consume_input()
    is_heard = False
    while connection.pgconn.notifies() is not None:
        is_heard = True
    return is_heard
