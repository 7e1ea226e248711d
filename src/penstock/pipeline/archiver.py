"""The archiver: cuts contiguous ranges of every stream into objects of a store.

Plan first: a range is fixed in PostgreSQL before its object is written, and the checkpoint moves
after that. Whoever dies when, a successor writes the same object or finds it there, so objects
neither overlap nor leave anything out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import psycopg

from penstock.core.archive import CutLimits
from penstock.core.leases import ARCHIVER
from penstock.core.progress import Progress
from penstock.core.settings import Settings
from penstock.errors import (
    ArchiveConflict,
    ArchiveDamaged,
    LeaseLost,
    PositionMissing,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.pipeline.cutting import Cutter
from penstock.pipeline.leasing import Leases
from penstock.pipeline.stream_archive import StreamArchive, Workbench
from penstock.stores.archive import ArchiveTable
from penstock.stores.identity import new_token
from penstock.stores.key_copies import ArchiveShelf, KeyCopies
from penstock.stores.migrations import require_current
from penstock.stores.objects import open_store
from penstock.stores.outage import Outage
from penstock.stores.postgres import connect_stage
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

# New streams, free leases, and whether enough waits for an object, are looked at this often.
LOOK_SECONDS = 1.0
# Copies of data keys are compared this often: one that was written late may hold a shredded key.
COPIES_SECONDS = 60.0
# What needs a person is tried again now and then, in case one has come.
REFUSED_RETRY_SECONDS = 10.0


class Archiver:
    """Archives every stream that it can lease, one object of each in a step.

    A store that is away delays it and costs nothing: the outbox is not pruned ahead of it. At most
    one object is in memory.
    """

    def __init__(
        self,
        settings: Settings,
        leases: Leases,
        *,
        stop_requested: Callable[[], bool] = lambda: False,
        excused: AbstractContextManager[Any] | None = None,
    ) -> None:
        assert settings.archive_url is not None, "whoever opens an archiver has looked"
        self._settings = settings
        self._leases = leases
        self._stop_requested = stop_requested
        self._excused = excused or nullcontext()
        self._table = ArchiveTable(settings.schema)
        self._outage = Outage("archiver", "the archive")
        self._archives: dict[str, StreamArchive] = {}
        self._refusals: dict[str, tuple[str, float]] = {}
        self._next_sweep_at = 0.0
        self._next_copying_at = 0.0
        self._is_probed = False
        self._was_probed = False
        self._store = open_store(settings.archive_url, create=True)
        self._connection = connect_stage(settings.database_url, "penstock archiver")
        try:
            require_current(self._connection, settings.schema)
        except BaseException:
            self._connection.close()
            raise
        # Poolers in transaction mode lose prepared statements.
        self._connection.prepare_threshold = None
        limits = CutLimits(
            settings.archive_count_max, settings.archive_bytes_max, settings.archive_age_seconds
        )
        cutter = Cutter(self._table, limits)
        keys = KeyCopies(settings, ArchiveShelf(self._store), "archiver")
        self._bench = Workbench(self._connection, self._table, self._store, cutter, limits, keys)

    def step(self) -> Progress:
        """Archive at most one object of every leased stream.

        Raises ServerUnsuitable where the store cannot be used from the start.
        """
        if not self._outage.is_worth_trying or not self._probe():
            return Progress(0, pause_seconds=self._outage.pause_seconds)
        if time.monotonic() >= self._next_sweep_at:
            self._sweep()
            self._next_sweep_at = time.monotonic() + LOOK_SECONDS
        self._copy_keys()
        moved = 0
        for archive in list(self._archives.values()):
            if self._stop_requested() or not self._outage.is_worth_trying:
                break
            moved += self._advance(archive)
        return Progress(moved, pause_seconds=self._outage.pause_seconds)

    def wait(self, stop: threading.Event) -> None:
        """Sleep until it is time to look again, or until `stop`."""
        stop.wait(LOOK_SECONDS)

    def close(self) -> None:
        """Give back leases and the connection. What cannot be given back runs out by itself."""
        if self._connection.closed and self._archives:
            with suppress(ServerUnavailable):
                self._connection = connect_stage(self._settings.database_url, "penstock archiver")
        for archive in self._archives.values():
            if archive.is_manifest_due:
                # Not given back cleanly: whoever comes next lists what this one could not.
                self._leases.abandon(archive.lease, "its manifest could not be written")
                continue
            try:
                self._leases.release(self._connection, archive.lease)
            except psycopg.Error as error:
                self._leases.abandon(archive.lease, str(error).strip())
        self._archives.clear()
        self._connection.close()

    def _probe(self) -> bool:
        """Whether the store answers; once, whether it refuses to overwrite."""
        if self._is_probed:
            return True
        try:
            with self._excused:
                self._table.require_in(self._store, self._connection)
                self._store.require_put_if_absent(new_token())
        except ServerUnavailable as error:
            self._outage.begin(error)
            return False
        except ServerUnsuitable as error:
            # At the start somebody looks whether it works; rights that were taken come back.
            if not self._was_probed:
                raise
            self._outage.begin(error)
            return False
        self._is_probed = self._was_probed = True
        self._outage.end()
        return True

    def _sweep(self) -> None:
        """Take up every stream with something to archive that nobody else has."""
        for stream_name in self._table.unleased(self._connection, self._leases.worker_id):
            if stream_name in self._archives:
                continue
            self._table.ensure(self._connection, stream_name)
            lease = self._leases.acquire(self._connection, stream_name, ARCHIVER)
            if lease is None:
                continue
            if lease.term == 1:
                emit(signals.ArchiveBegun(stream_name, lease.checkpoint + 1))
            self._archives[stream_name] = StreamArchive(self._bench, lease, self._leases.is_held)

    def _advance(self, archive: StreamArchive) -> int:
        """One object at most. Trouble with one stream leaves the others alone."""
        refusal = self._refusals.get(archive.stream_name)
        if refusal is not None and time.monotonic() < refusal[1]:
            return 0
        if not self._leases.is_held(archive.lease):
            self._leases.forget(archive.lease, "it ended before it was renewed")
            del self._archives[archive.stream_name]
            return 0
        try:
            with self._excused:
                moved = self._archive(archive)
        except LeaseLost as error:
            self._leases.forget(archive.lease, str(error))
            del self._archives[archive.stream_name]
            return 0
        except (ServerUnavailable, ServerUnsuitable) as error:
            self._lose_store(error)
            return 0
        except (PositionMissing, ArchiveConflict, ArchiveDamaged) as error:
            self._refuse(archive, str(error))
            return 0
        self._refusals.pop(archive.stream_name, None)
        return moved

    def _archive(self, archive: StreamArchive) -> int:
        archive.open()
        self._drop_other_objects(archive)
        moved = 0
        if archive.plan():
            moved = archive.store()
            self._leases.note(archive.lease)
        if archive.is_manifest_due:
            archive.write_manifest()
        return moved

    def _copy_keys(self) -> None:
        """Now and then for all that is archived, whoever archives it and whether more comes."""
        if time.monotonic() < self._next_copying_at:
            return
        try:
            with self._excused:
                self._table.require_in(self._store, self._connection)
                archived = self._table.archived_streams(self._connection)
                self._bench.keys.refresh_all(self._connection, archived)
        except (ServerUnavailable, ServerUnsuitable) as error:
            self._lose_store(error)
        else:
            self._next_copying_at = time.monotonic() + COPIES_SECONDS

    def _lose_store(self, error: Exception) -> None:
        self._outage.begin(error)
        # Whether it is back is found out with a few bytes, not with an object.
        self._is_probed = False

    def _drop_other_objects(self, archive: StreamArchive) -> None:
        """One object in memory, however many wait for a store that is away."""
        for other in self._archives.values():
            if other is not archive:
                other.drop_object()

    def _refuse(self, archive: StreamArchive, reason: str) -> None:
        archive.drop_object()
        refusal = self._refusals.get(archive.stream_name)
        if refusal is None or refusal[0] != reason:
            emit(signals.ArchiveRefused(archive.stream_name, reason))
        retry_at = time.monotonic() + REFUSED_RETRY_SECONDS
        self._refusals[archive.stream_name] = (reason, retry_at)
