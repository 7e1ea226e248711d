"""What the archive's tests are told in: an archiver that is stepped, and looking at its store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from penstock.core.archive import ArchivedObject
from penstock.core.settings import Settings
from penstock.pipeline.archiver import Archiver
from penstock.runtime.leases import LeaseKeeper
from penstock.stores.archive import ArchiveTable
from tests.publishing import ask, send, worker
from tests.waiting import wait_until

STREAM = "orders"


def settings_for(database_url: str, archive_url: str | Path, **more: Any) -> Settings:
    """Settings without a hot log, whose objects hold ten events unless told otherwise."""
    chosen: dict[str, Any] = {"archive_count_max": 10, **more}
    return Settings(database_url=database_url, archive_url=str(archive_url), **chosen)


def publish(settings: Settings, count: int, stream_name: str = STREAM, **fields: Any) -> None:
    """Send events and give them their positions."""
    send(settings.database_url, stream_name, count, **fields)
    with worker(settings) as publisher:
        publisher.publish_all()


class ArchiveWorker:
    """An archiver with its leases, as one process would have them."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keeper = LeaseKeeper(settings)
        self.archiver = Archiver(settings, self.keeper)

    def step(self) -> int:
        """One step that looks at everything; returns how many events were archived."""
        self.archiver._next_sweep_at = 0.0
        for refused in list(self.archiver._refusals):
            self.archiver._refusals[refused] = (self.archiver._refusals[refused][0], 0.0)
        return self.archiver.step().moved

    def archive_all(self) -> None:
        """Step until nothing is due any more."""
        wait_until(lambda: self.step() == 0, what="the archiver has caught up")

    def die(self) -> None:
        """End without giving anything back; its leases have run out by now."""
        self.keeper.close()
        self.archiver._connection.close()
        expire(self.settings.database_url)

    def close(self) -> None:
        """Stop cleanly."""
        self.archiver.close()
        self.keeper.close()


@contextmanager
def archiver(settings: Settings) -> Iterator[ArchiveWorker]:
    """An archiver that is stepped by the test."""
    stepped = ArchiveWorker(settings)
    try:
        yield stepped
    finally:
        stepped.close()


def expire(database_url: str) -> None:
    """Let every lease run out."""
    ask(database_url, "UPDATE events.stream_lease SET lease_until = '-infinity'")


def archived(settings: Settings, stream_name: str = STREAM) -> list[ArchivedObject]:
    """What the books say is archived."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:
        return ArchiveTable(settings.schema).objects(connection, stream_name)


def ranges(settings: Settings, stream_name: str = STREAM) -> list[tuple[int, int]]:
    """First and last of every object, in order."""
    return [(found.first, found.last) for found in archived(settings, stream_name)]


def checkpoint(database_url: str, stream_name: str = STREAM) -> int | None:
    """Up to where the archiver has archived; None: it has not met the stream."""
    rows = ask(
        database_url,
        "SELECT checkpoint FROM events.stream_lease WHERE stream_name = %s AND role = 'archiver'",
        stream_name,
    )
    return int(rows[0][0]) if rows else None


def warm_rows(database_url: str, stream_name: str = STREAM) -> list[tuple[int, str]]:
    """Positions and bodies as the warm tier gives them, holes among them."""
    return ask(
        database_url,
        "SELECT entry_position, body FROM events.read_entries(%s, 0, 1000000)",
        stream_name,
    )
