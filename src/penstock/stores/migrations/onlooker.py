"""Whom a migration waits for, as seen from beside it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg

from penstock.errors import PenstockError
from penstock.stores.postgres import connect
from penstock.stores.queries import Queries

LOOK_SECONDS = 0.5


@contextmanager
def looking_on(url: str, pid: int, blockers: list[str]) -> Iterator[None]:
    """Put whom the backend waits for into the list, as last seen; it may stay empty.

    Only whoever still waits can be asked for whom, so that a connection of its own has to do it.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_look, args=(url, pid, blockers, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _look(url: str, pid: int, blockers: list[str], is_over: threading.Event) -> None:
    if is_over.wait(LOOK_SECONDS):
        return
    query = Queries("migration.sql")["blockers"]
    # Without an answer the migration does as well.
    with (
        suppress(PenstockError, psycopg.Error),
        connect(url, "penstock migrate looking on") as connection,
    ):
        while True:
            if found := connection.execute(query, {"pid": pid}).fetchall():
                blockers[:] = [_described(*row) for row in found]
            if is_over.wait(LOOK_SECONDS):
                return


def _described(pid: int, application_name: str, role: str) -> str:
    if pid == 0:
        return "a prepared transaction (pg_prepared_xacts)"
    return f"pid {pid} ({application_name}, role {role})"
