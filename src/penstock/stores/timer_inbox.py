"""The inbox as a timer's worker uses it: claim, then the handler, then COMMIT, in one transaction.

The rows are those of `penstock.inbox`, and the lock too. Besides, the transaction is sealed like a
consumer's batch, so that no handler can commit a part of it.
"""

from __future__ import annotations

import secrets

import psycopg

from penstock.core.claims import Claim, lock_number
from penstock.errors import (
    AlreadyHandled,
    CommitInTransactionError,
    LockContention,
    RollbackInTransactionError,
    SchemaMismatch,
)
from penstock.stores.inbox import SEAL_ID_BITS
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.worker_connection import WorkerConnection

_SCHEMA_MISSING = frozenset({"42P01", "3F000"})


class TimerInbox:
    """Claims timers on a worker's connection and commits them."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = Queries("timer_inbox.sql", schema)

    def claim(self, worker: WorkerConnection, claim: Claim) -> int:
        """Begin the transaction of a timer that is not handled yet; returns its seal.

        Raises AlreadyHandled, or LockContention while another transaction has it.
        """
        try:
            worker.begin(self._sql["lock"], {"number": lock_number(claim)})
            row = worker.first_row()
            if row is None or not row[0]:
                raise LockContention(f"Another transaction is handling {claim.event_id!r}.")
            seal_id = secrets.randbits(SEAL_ID_BITS)
            values = {"consumer": claim.consumer, "event_id": claim.event_id, "seal_id": seal_id}
            if worker.fetch(self._sql["enter"], values)[0][0] == 0:
                raise AlreadyHandled(f"{claim.consumer} has handled {claim.event_id!r} already.")
        except psycopg.Error as error:
            if error.sqlstate in _SCHEMA_MISSING:
                raise SchemaMismatch(
                    f"Timers cannot be claimed: {str(error).partition(chr(10))[0]}. Nothing was "
                    f"handled; run `penstock migrate` for the schema {self._schema!r}."
                ) from error
            raise
        return seal_id

    def commit(self, worker: WorkerConnection, seal_id: int) -> None:
        """Commit what the handler wrote, together with the claim: all of it or nothing."""
        try:
            worker.commit_after((self._sql["unseal"], {"seal_id": seal_id}))
        except psycopg.errors.DivisionByZero as error:
            raise RollbackInTransactionError(
                "The transaction was ended inside the handler, so its earlier writes are gone. "
                "Nothing was committed; leave commit and rollback to the worker."
            ) from error
        except psycopg.Error as error:
            if error.sqlstate == "PS001":
                message = str(error).partition("\n")[0]
                raise CommitInTransactionError(message) from error
            raise
