"""The consumer's books: registration, deduplication rows, fence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry
from penstock.errors import (
    CommitInTransactionError,
    LeaseLost,
    RegistrationError,
    RollbackInTransactionError,
)
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.worker_connection import WorkerConnection

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Registration:
    """A consumer as the books have it."""

    consumer: str
    stream_name: str
    start_position: int
    lanes: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch in hand: its seal, its transaction, and which of its positions are new."""

    seal_id: int
    xid: str
    fresh: frozenset[int]


class Inbox:
    """The tables `consumer`, `processed_event` and `seal`."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("consumer.sql", schema)
        self._outbox_sql = Queries("outbox.sql", schema)
        self._stream_sql = Queries("stream.sql", schema)

    def register(
        self, connection: Connection, consumer: str, options: ConsumerOptions
    ) -> Registration:
        """Enter a consumer into the books, once; later starts find it there."""
        found = self._read(connection, consumer)
        if found is None:
            start_position = self._start_position(connection, options)
            connection.execute(
                self._sql["register"],
                {
                    "consumer": consumer,
                    "stream_name": options.stream_name,
                    "start_position": start_position,
                    "guarantee": options.guarantee.value,
                },
            )
            found = self._read(connection, consumer)
            assert found is not None
        if found.stream_name != options.stream_name:
            raise RegistrationError(
                f"Consumer {consumer!r} reads {found.stream_name!r} according to the database, "
                f"but the code says {options.stream_name!r}. Nothing was touched. A consumer's "
                "name is its identity: give the new one a new name, or restore the stream."
            )
        return found

    def _read(self, connection: Connection, consumer: str) -> Registration | None:
        row = connection.execute(self._sql["read"], {"consumer": consumer}).fetchone()
        if row is None:
            return None
        stream_name, start_position, lanes, epoch, _guarantee = row
        return Registration(consumer, stream_name, start_position, lanes, epoch)

    def _start_position(self, connection: Connection, options: ConsumerOptions) -> int:
        start = options.start
        if start == "earliest":
            return 1
        if isinstance(start, int):
            return start
        head_row = connection.execute(
            self._stream_sql["read"], {"stream_name": options.stream_name}
        ).fetchone()
        after_head = head_row[2] + 1 if head_row else 1
        if isinstance(start, datetime):
            row = connection.execute(
                self._outbox_sql["position_at_time"],
                {"stream_name": options.stream_name, "moment": start},
            ).fetchone()
            return row[0] if row and row[0] else int(after_head)
        return int(after_head)

    def claim(
        self,
        worker: WorkerConnection,
        consumer: str,
        lease: Lease,
        batch: Batch,
        outcomes: list[str],
    ) -> Claim:
        """Begin the batch's transaction and write its deduplication rows."""
        seal_id, xid, fresh = worker.begin(
            self._sql["claim_batch"],
            {
                "consumer": consumer,
                "stream_name": lease.stream_name,
                "role": lease.role,
                "event_uuids": _array(entry.event_uuid for entry in batch.entries),
                "positions": _array(str(entry.position) for entry in batch.entries),
                "outcomes": _array(outcomes),
            },
        )
        return Claim(seal_id, xid, frozenset(fresh))

    def unclaim(self, worker: WorkerConnection, consumer: str, entries: Sequence[Entry]) -> None:
        """Give back what a batch that ends early has not handled."""
        worker.execute(
            self._sql["unclaim"],
            {"consumer": consumer, "event_uuids": _array(e.event_uuid for e in entries)},
        )

    def commit(
        self, worker: WorkerConnection, claim: Claim, lease: Lease, new_checkpoint: int
    ) -> None:
        """Seal, fence, move the checkpoint and commit: all of it or nothing."""
        try:
            worker.commit_after(
                self._sql["fence"],
                {
                    "seal_id": claim.seal_id,
                    "xid": claim.xid,
                    "stream_name": lease.stream_name,
                    "role": lease.role,
                    "owner_id": lease.owner_id,
                    "term": lease.term,
                    "old_checkpoint": lease.checkpoint,
                    "new_checkpoint": new_checkpoint,
                },
            )
        except psycopg.Error as error:
            raise _translated(error) from error


def _translated(error: psycopg.Error) -> Exception:
    message = str(error).split("\n", 1)[0]
    match error.sqlstate:
        case "PS001":
            return CommitInTransactionError(message)
        case "PS002":
            return RollbackInTransactionError(message)
        case "PS003":
            return LeaseLost(
                f"{message}. Nothing was lost or repeated; this worker stops. "
                "If it recurs, raise lease_seconds."
            )
    return error


def _array(values: Any) -> str:
    """An array literal of values that need no quoting: cheaper than adapting a list."""
    return "{" + ",".join(values) + "}"
