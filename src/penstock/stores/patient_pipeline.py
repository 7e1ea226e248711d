"""A psycopg pipeline that talks to the server once per many statements.

psycopg's own sends every statement as it comes, which costs two system calls each. This one lets
them gather, up to a limit, until somebody asks for a result or for a sync. It leans on psycopg's
internals, all named here, and steps aside where they are not what it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg.abc import PQGen

from penstock.stores.direct import Answer, Direct, Statement

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

    def put(self, direct: Direct, *statements: Statement) -> Answer:
        """Send what has gathered and then these, and wait for nothing: the server works meanwhile.

        Returns where the answer to the last one will be.
        """
        with self._lock:
            while self.command_queue:
                self.command_queue.popleft()()
            answers = direct.put(*statements)
            self.result_queue.extend((cast("Any", answer), None) for answer in answers)
            direct.flush()
        return answers[-1]

    def catch_up(self) -> None:
        """Wait for the answers to everything that was sent."""
        with self._lock:
            self._conn.wait(self._fetch_gen(flush=True))

    def finish(self) -> None:
        """Wait for everything. Leaving then needs no round trip; nothing may be sent any more."""
        with self._lock:
            self._conn.wait(self._sync_gen())
        self._is_finished = True


@contextmanager
def patient_pipeline(connection: psycopg.Connection[Any]) -> Iterator[PatientPipeline | None]:
    """The connection in pipeline mode; None, and as it is, where that cannot be had.

    It is left without an error: psycopg would log what else comes out of it then, which may quote
    what a handler wrote.
    """
    if not IS_SUPPORTED or getattr(connection, "_pipeline", "unknown") is not None:
        yield None
        return
    # The connection enters whatever pipeline it finds here, and forgets it afterwards.
    connection._pipeline = pipeline = PatientPipeline(connection)  # noqa: SLF001
    failure: BaseException | None = None
    try:
        with connection.pipeline():
            try:
                yield pipeline
            except BaseException as error:  # noqa: BLE001 - raised again below
                failure = error
    except psycopg.Error:
        if failure is None:
            raise
    if failure is not None:
        raise failure
