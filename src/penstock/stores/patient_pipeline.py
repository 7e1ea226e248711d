"""A psycopg pipeline that talks to the server once per many statements.

psycopg's own sends every statement as it comes, which costs two system calls each. This one lets
them gather, up to a limit, until somebody asks for a result or for a sync. It leans on psycopg's
internals, all named here, and steps aside where they are not what it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.abc import PQGen

STATEMENTS_MAX = 64
_NEEDED = ("_communicate_gen", "_enqueue_sync", "_exit_gen", "_fetch_gen", "_sync_gen")
IS_SUPPORTED = all(hasattr(psycopg.Pipeline, name) for name in _NEEDED)


class PatientPipeline(psycopg.Pipeline):
    """Sends statements in groups; results, errors and syncs are what they always are."""

    _is_finished = False

    def _communicate_gen(self) -> PQGen[None]:
        # A None at the end is a sync or a command such as COMMIT: that has to go out at once.
        is_statement = bool(self.result_queue) and self.result_queue[-1] is not None
        if not is_statement or len(self.command_queue) >= STATEMENTS_MAX:
            yield from super()._communicate_gen()

    def _fetch_gen(self, *, flush: bool) -> PQGen[None]:
        if self.command_queue:
            yield from super()._communicate_gen()
        yield from super()._fetch_gen(flush=flush)

    def _exit_gen(self) -> PQGen[None]:
        if not self._is_finished:
            yield from super()._exit_gen()

    def send(self, *, sync: bool) -> None:
        """Send what has gathered, and wait for nothing: the server works meanwhile."""
        with self._lock:
            if sync:
                self._enqueue_sync()
            self._conn.wait(super()._communicate_gen())

    def finish(self, *, sync: bool) -> None:
        """Wait for everything up to the last sync. Leaving then needs no round trip of its own.

        Nothing may be sent afterwards. Without `sync`, the last `send` has made that sync.
        """
        with self._lock:
            self._conn.wait(self._sync_gen() if sync else super()._fetch_gen(flush=False))
        self._is_finished = True


@contextmanager
def patient_pipeline(connection: psycopg.Connection[Any]) -> Iterator[psycopg.Pipeline]:
    """The connection in pipeline mode."""
    if IS_SUPPORTED and getattr(connection, "_pipeline", "unknown") is None:
        # The connection enters whatever pipeline it finds here, and forgets it afterwards.
        connection._pipeline = PatientPipeline(connection)  # noqa: SLF001
    with connection.pipeline() as pipeline:
        yield pipeline
