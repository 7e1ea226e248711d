"""Word of new positions where there is no hot log: heard once, for all readers of a process."""

from __future__ import annotations

import threading

import psycopg

from penstock.errors import PenstockError
from penstock.stores.postgres import connect
from penstock.stores.queries import Queries

# How soon the listener notices that it is to end, and how long it leaves an absent server alone.
TURN_SECONDS = 0.25
END_SECONDS = 5.0


class Announcements:
    """Listens on one connection, in a thread of its own, from the first reader on."""

    def __init__(self, database_url: str) -> None:
        self._database_url = database_url
        self._changed = threading.Condition()
        self._count = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def wait(self, after: int, seconds: float) -> int:
        """Wait until more was announced than `after`; returns how much has been by then.

        A caller passes what it got last, so that nothing between two calls goes unheard.
        """
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._listen, name="penstock-announcements", daemon=True
                )
                self._thread.start()
            self._changed.wait_for(lambda: self._count > after, seconds)
            return self._count

    def close(self) -> None:
        """Listen no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)

    def _listen(self) -> None:
        listen = Queries("wakeup.sql")["listen_for_numbers"]
        while not self._stop.is_set():
            try:
                with connect(self._database_url, "penstock reader") as connection:
                    connection.execute(listen)
                    # Whatever was numbered before this moment was not heard: let all look.
                    self._announce()
                    while not self._stop.is_set():
                        for _ in connection.notifies(timeout=TURN_SECONDS, stop_after=1):
                            self._announce()
            except (psycopg.Error, PenstockError):
                # Readers look by themselves after a while; they will say that the server is away.
                self._stop.wait(TURN_SECONDS)

    def _announce(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()
