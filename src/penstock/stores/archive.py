"""The archive in the books: which objects hold which positions, and who may add the next one."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, cast

import psycopg

from penstock.core.archive import ArchivedObject, ArchivePlan, folder_of
from penstock.core.leases import Lease
from penstock.stores.objects import ObjectStore
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.streams import refusals

Connection = psycopg.Connection[Any]
_PLAN = ("first", "last", "events", "raw_bytes", "content_sha256", "newest_us")
_OBJECT = (*_PLAN, "stored_bytes", "sha256")


@dataclass(frozen=True, slots=True)
class Waiting:
    """What of a stream is not archived yet."""

    head: int
    oldest_seconds: float
    """How long ago its first event was sent."""
    new_bytes: int
    """How much came since the last look, as PostgreSQL stores it."""


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """How far the archiver of a stream is."""

    stream_name: str
    checkpoint: int
    head: int


class ArchiveTable:
    """The table `archive_object`; callers bring connections in autocommit."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("archive.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)

    # ── who may ───────────────────────────────────────────────────────────────────────────────

    def ensure(self, connection: Connection, stream_name: str) -> None:
        """Hold pruning for the archiver of a stream from now on."""
        self._one(connection, "ensure", stream_name=stream_name)

    def ensure_all(self, connection: Connection) -> None:
        """The same for every stream that the archiver has not met yet."""
        self._one(connection, "ensure_all")

    def unleased(self, connection: Connection, worker_id: str) -> list[str]:
        """The streams with something to archive that no other archiver holds just now."""
        rows = connection.execute(self._sql["unleased"], {"worker_id": worker_id}).fetchall()
        return [name for (name,) in rows]

    def forget(self, connection: Connection, stream_name: str) -> int | None:
        """Let pruning wait no longer. Returns the checkpoint; None: held just now, or unknown."""
        rows = connection.execute(self._sql["forget"], {"stream_name": stream_name}).fetchall()
        return int(rows[0][0]) if rows else None

    # ── one object at a time ──────────────────────────────────────────────────────────────────

    def waiting(self, connection: Connection, lease: Lease, measured: int, count: int) -> Waiting:
        """What lies behind the checkpoint, at most `count` rows of it measured."""
        return Waiting(
            *self._one(
                connection,
                "waiting",
                stream_name=lease.stream_name,
                checkpoint=lease.checkpoint,
                measured=measured,
                count=count,
            )
        )

    def rows(
        self, connection: Connection, stream_name: str, after: int, *, count: int, at_once: int
    ) -> Generator[list[tuple[int, str]]]:
        """Positions and bodies behind `after`, `at_once` in memory at a time.

        Whoever ends early closes the generator, which ends the question.
        """
        parameters = {"stream_name": stream_name, "after": after, "count": count}
        with connection.cursor() as cursor:
            found = cursor.stream(self._outbox_sql["read"], parameters, size=at_once)
            with closing(cast("Generator[tuple[int, str]]", found)) as rows:
                while chunk := list(islice(rows, at_once)):
                    yield chunk

    def planned(self, connection: Connection, stream_name: str) -> ArchivePlan | None:
        """The range that was fixed and not recorded as stored; None where there is none."""
        row = connection.execute(self._sql["planned"], {"stream_name": stream_name}).fetchone()
        if row is None:
            return None
        return ArchivePlan(stream_name=stream_name, **dict(zip(_PLAN, row, strict=True)))

    def plan(self, connection: Connection, lease: Lease, plan: ArchivePlan) -> None:
        """Fix the next range, durably. Raises LeaseLost, having done nothing."""
        assert plan.first == lease.checkpoint + 1, "objects follow each other without a gap"
        with refusals():
            connection.execute(self._sql["plan"], {**asdict(plan), **_fence(lease)})

    def archive(self, connection: Connection, lease: Lease, stored: ArchivedObject) -> Lease:
        """Record that the planned object is stored. Raises LeaseLost, having done nothing."""
        with refusals():
            (reached,) = self._one(
                connection,
                "archive",
                **_fence(lease),
                stored_bytes=stored.stored_bytes,
                sha256=stored.sha256,
            )
        assert reached == stored.last, "what is planned does not change"
        return lease.at(reached)

    # ── for readers ───────────────────────────────────────────────────────────────────────────

    def streams(self, connection: Connection) -> list[ArchiveProgress]:
        """Every stream that is archived, by name."""
        return [ArchiveProgress(*row) for row in connection.execute(self._sql["streams"])]

    def archived_streams(self, connection: Connection) -> list[str]:
        """Every stream with an object in the store, by name."""
        return [name for (name,) in connection.execute(self._sql["archived_streams"])]

    def require_in(self, store: ObjectStore, connection: Connection) -> None:
        """Raise ServerUnavailable where a directory has lost what was archived in it."""
        if store.is_directory:
            store.require_folders(map(folder_of, self.archived_streams(connection)))

    def objects(self, connection: Connection, stream_name: str) -> list[ArchivedObject]:
        """All that is archived of a stream, in order."""
        return self._objects(connection, "objects", stream_name=stream_name)

    def bounds(self, connection: Connection, stream_name: str) -> tuple[int, int] | None:
        """The first and the last archived position; None: nothing is archived."""
        first, last = self._one(connection, "bounds", stream_name=stream_name)
        return None if first is None else (int(first), int(last))

    def behind(self, connection: Connection, stream_name: str, after: int) -> ArchivedObject | None:
        """The object that holds the next position behind `after`, or the first one after it."""
        found = self._objects(connection, "behind", stream_name=stream_name, after=after)
        return found[0] if found else None

    def since(
        self, connection: Connection, stream_name: str, moment_us: int
    ) -> ArchivedObject | None:
        """The first object with an event sent at or after a moment."""
        found = self._objects(connection, "since", stream_name=stream_name, moment_us=moment_us)
        return found[0] if found else None

    def _objects(
        self, connection: Connection, query: str, *, stream_name: str, **parameters: Any
    ) -> list[ArchivedObject]:
        parameters["stream_name"] = stream_name
        return [
            ArchivedObject(stream_name=stream_name, **dict(zip(_OBJECT, row, strict=True)))
            for row in connection.execute(self._sql[query], parameters)
        ]

    def _one(self, connection: Connection, query: str, **parameters: Any) -> tuple[Any, ...]:
        row = connection.execute(self._sql[query], parameters).fetchone()
        assert row is not None, f"{query} always answers with a row"
        return tuple(row)


def _fence(lease: Lease) -> dict[str, Any]:
    return {
        "stream_name": lease.stream_name,
        "owner_id": lease.owner_id,
        "term": lease.term,
        "checkpoint": lease.checkpoint,
    }
