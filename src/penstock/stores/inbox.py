"""The consumer's books: registration, deduplication rows, fence."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.isolation import Batch
from penstock.core.leases import Lease, consumer_role
from penstock.core.options import ConsumerOptions
from penstock.core.wire import Entry
from penstock.errors import (
    CommitInTransactionError,
    LeaseLost,
    RegistrationError,
    RollbackInTransactionError,
)
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.starts import StartChooser, Starts
from penstock.stores.worker_connection import WorkerConnection

Connection = psycopg.Connection[Any]
SEAL_ID_BITS = 63


@dataclass(frozen=True, slots=True)
class Registration:
    """A consumer as the books have it."""

    consumer: str
    stream_name: str
    start_position: int
    lanes: int = 1
    epoch: int = 1
    settled_to: int = 0
    """Up to here, lanes of earlier epochs may have settled events."""

    def role(self, lane: int) -> str:
        """The role of one of its lanes."""
        return consumer_role(self.consumer, self.epoch, lane, self.lanes)


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch in hand: its seal, and which of its positions are new, or taken for new."""

    seal_id: int
    fresh: frozenset[int]
    waiting: frozenset[int] = frozenset()
    """Positions whose keys are parked: entered as such, and to be parked."""


class Inbox:
    """The tables `consumer`, `processed_event` and `seal`."""

    def __init__(self, schema: str = DEFAULT_SCHEMA, starts: StartChooser | None = None) -> None:
        self._sql = Queries("consumer.sql", schema)
        self._lane_sql = Queries("lane.sql", schema)
        self._early_sql = Queries("early.sql", schema)
        self._starts = starts or Starts(schema)

    def register(
        self,
        connection: Connection,
        consumer: str,
        options: ConsumerOptions,
        deployed_at: datetime,
    ) -> Registration:
        """Enter a consumer into the books, once; later starts find it there.

        The lane count is the books', unless `deployed_at` is later than when it was decided, or
        the order of the whole stream demands one.
        """
        stream_name = self._stream_of(connection, consumer)
        if stream_name is None:
            # One transaction: nothing is pruned between the choice and the entry.
            with connection.transaction():
                connection.execute(self._sql["hold_registration"], {"consumer": consumer})
                if self._stream_of(connection, consumer) is None:
                    self._enter(connection, consumer, options)
            stream_name = self._stream_of(connection, consumer)
        if stream_name != options.stream_name:
            raise RegistrationError(
                f"Consumer {consumer!r} reads {stream_name!r} according to the database, "
                f"but the code says {options.stream_name!r}. Nothing was touched. A consumer's "
                "name is its identity: give the new one a new name, or restore the stream."
            )
        connection.execute(
            self._sql["describe"],
            {
                "consumer": consumer,
                "guarantee": options.guarantee.value,
                "ordering": options.order,
            },
        )
        row = connection.execute(
            self._lane_sql["agree"],
            {
                "consumer": consumer,
                "lanes": options.lanes,
                "needs_one_lane": options.order == "stream",
                "deployed_at": deployed_at,
            },
        ).fetchone()
        assert row is not None
        return Registration(consumer, *row)

    def _enter(self, connection: Connection, consumer: str, options: ConsumerOptions) -> None:
        start_position = self._starts.choose(connection, consumer, options)
        connection.execute(
            self._sql["register"],
            {
                "consumer": consumer,
                "stream_name": options.stream_name,
                "start_position": start_position,
                "guarantee": options.guarantee.value,
                "lanes": options.lanes,
            },
        )

    def _stream_of(self, connection: Connection, consumer: str) -> str | None:
        row = connection.execute(self._sql["read"], {"consumer": consumer}).fetchone()
        return None if row is None else str(row[0])

    def claim(
        self,
        worker: WorkerConnection,
        consumer: str,
        lease: Lease,
        batch: Batch,
        outcomes: list[str],
        *,
        ahead: bool = False,
        key_hashes: Sequence[int] | None = None,
    ) -> Claim:
        """Begin the batch's transaction and write its deduplication rows.

        `ahead`: without waiting for the server, taking every event for new. The fence refuses the
        batch if that is wrong, and `fell_short` tells. With `key_hashes`, events of parked keys
        are entered as parked.
        """
        seal_id, claimant = _claimant(consumer, lease)
        parameters = {
            **claimant,
            "event_uuids": array(entry.event_uuid for entry in batch.entries),
            "positions": array(str(entry.position) for entry in batch.entries),
            "outcomes": array(outcomes),
        }
        if key_hashes is None:
            worker.begin(self._sql["claim_batch"], parameters)
        else:
            parameters["key_hashes"] = array(map(str, key_hashes))
            worker.begin(self._sql["claim_among_parked"], parameters)
        if ahead:
            return Claim(seal_id, frozenset(entry.position for entry in batch.entries))
        row = worker.first_row()
        assert row is not None
        return Claim(seal_id, frozenset(row[0]), frozenset(row[1]))

    def claim_early(
        self, worker: WorkerConnection, consumer: str, lease: Lease, after: int
    ) -> Claim:
        """Begin a transaction with the event that will most likely follow a position.

        Its body is the first row; NULL: there is none, and nothing was written.
        """
        seal_id, claimant = _claimant(consumer, lease)
        worker.begin(self._early_sql["claim_early"], {**claimant, "after": after})
        return Claim(seal_id, frozenset((after + 1,)))

    def survey(
        self, connection: Connection, consumer: str, batch: Batch, key_hashes: Sequence[int] | None
    ) -> frozenset[int]:
        """The positions that are not settled nor, with `key_hashes`, behind a parked event."""
        row = connection.execute(
            self._sql["survey"],
            {
                "consumer": consumer,
                "event_uuids": array(entry.event_uuid for entry in batch.entries),
                "positions": array(str(entry.position) for entry in batch.entries),
                "key_hashes": array(map(str, key_hashes or [0] * len(batch.entries))),
                "in_order": key_hashes is not None,
            },
        ).fetchone()
        assert row is not None
        return frozenset(row[0])

    def rehearse(self, worker: WorkerConnection) -> None:
        """Begin a transaction that cannot be committed."""
        worker.begin(self._sql["rehearse"], {"seal_id": secrets.randbits(SEAL_ID_BITS)})
        worker.first_row()

    def fell_short(self, worker: WorkerConnection, claim: Claim) -> bool:
        """Whether fewer events were new than this claim, rolled back by now, took for new."""
        row = worker.first_row()
        return row is not None and len(row[0]) < len(claim.fresh)

    def unclaim(self, worker: WorkerConnection, consumer: str, entries: Sequence[Entry]) -> None:
        """Give back what a batch that ends early has not handled."""
        worker.execute(
            self._sql["unclaim"],
            {"consumer": consumer, "event_uuids": array(e.event_uuid for e in entries)},
        )

    def commit(
        self,
        worker: WorkerConnection,
        claim: Claim,
        lease: Lease,
        new_checkpoint: int,
        early: Entry | None = None,
    ) -> None:
        """Seal, fence, move the checkpoint and commit: all of it or nothing.

        Nothing, too, where an `early` event is not at its place.
        """
        fence = {
            "seal_id": claim.seal_id,
            "fresh": len(claim.fresh),
            "stream_name": lease.stream_name,
            "role": lease.role,
            "owner_id": lease.owner_id,
            "term": lease.term,
            "old_checkpoint": lease.checkpoint,
            "new_checkpoint": new_checkpoint,
        }
        statements = [(self._sql["fence"], fence)]
        if early is not None:
            place = {
                "stream_name": early.stream_name,
                "position": early.position,
                "event_uuid": early.event_uuid,
            }
            # The fence is the last, whatever else there is.
            statements.insert(0, (self._early_sql["require_numbered"], place))
        try:
            worker.commit_after(*statements)
        except psycopg.Error as error:
            raise _translated(error) from error


def _claimant(consumer: str, lease: Lease) -> tuple[int, dict[str, Any]]:
    """Who claims, and the number of the seal."""
    # The worker draws the number, so that the fence can be sent without the claim's result.
    seal_id = secrets.randbits(SEAL_ID_BITS)
    return seal_id, {
        "seal_id": seal_id,
        "consumer": consumer,
        "stream_name": lease.stream_name,
        "role": lease.role,
        "epoch_group": lease.epoch_group,
    }


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


def array(values: Any) -> str:
    """An array literal of values that need no quoting: cheaper than adapting a list."""
    return "{" + ",".join(values) + "}"
