"""Events that wait for the COMMIT of a SQLAlchemy connection, and go with it or not at all.

An event belongs to the transaction on a `Connection`, because that is what commits, whoever asks
for it. Buffers hang on transaction objects by weak references: nothing keeps a connection alive,
and nothing can survive into the next transaction.

COMMIT and savepoints are followed through SQLAlchemy (`commit`, `begin_nested`); those of literal
statements, or of the driver's own methods, are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, repeat
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import (
    ExceptionContext,
    NestedTransaction,
    RootTransaction,
    TwoPhaseTransaction,
)

from penstock.core.outgoing import OutgoingEvent
from penstock.errors import OutcomeUnknown, UnsafeTransaction
from penstock.stores.outbox_writer import insert_through_sqlalchemy

_numbers = count()


class Pending(NamedTuple):
    """An event that waits, and the schema of the outbox that it is meant for."""

    number: int
    """Grows with every send of the process, through whatever it was sent."""
    schema: str
    event: OutgoingEvent


def pending_for(schema: str, events: Iterable[OutgoingEvent]) -> list[Pending]:
    """The events, sent just now."""
    return [Pending(next(_numbers), schema, event) for event in events]


def by_schema(pending: Iterable[Pending]) -> dict[str, list[OutgoingEvent]]:
    """The events for each outbox, in the order in which they were sent."""
    outboxes: dict[str, list[OutgoingEvent]] = {}
    for each in sorted(pending):
        outboxes.setdefault(each.schema, []).append(each.event)
    return outboxes


@dataclass(slots=True)
class TransactionBuffer:
    """What one transaction on a connection is going to insert when it commits."""

    lists: list[list[Pending]] = field(default_factory=lambda: [[]])
    """Its own events; then those of each session that shares it and has not used it itself yet."""
    marks: list[tuple[str | None, list[int]]] = field(default_factory=list)
    """Per savepoint, outermost first: the one around it; how many events it found in each list."""
    is_committing: bool = False
    has_inserted: bool = False

    def add(
        self,
        connection: Connection,
        pending: Sequence[Pending],
        guest: list[Pending] | None = None,
    ) -> None:
        """Remember events, in a guest's list if there is one; during the COMMIT, insert them."""
        if self.is_committing:
            self._insert(connection, pending)
            return
        waiting = self.lists[0] if guest is None else guest
        if not self.has(waiting):
            self.lists.append(waiting)
        waiting.extend(pending)

    def has(self, waiting: list[Pending]) -> bool:
        """Whether this very list is inserted with the transaction."""
        return any(each is waiting for each in self.lists)

    def insert_all(self, connection: Connection) -> None:
        """Insert everything that waits. What is sent from now on is inserted at once."""
        self.is_committing = True
        self._insert(connection, self.take())

    def waiting(self) -> list[Pending]:
        """What would be inserted now."""
        return sorted(chain(*self.lists))

    def take(self) -> list[Pending]:
        """What would be inserted now; it waits no longer."""
        taken = self.waiting()
        for waiting in self.lists:
            waiting.clear()
        return taken

    def begin_savepoint(self, around: str | None) -> None:
        """Mark where a savepoint begins."""
        self._forget_savepoints_inside(around)
        self.marks.append((around, [len(waiting) for waiting in self.lists]))

    def rollback_savepoint(self, name: str) -> None:
        """Drop what was sent since."""
        self._forget_savepoints_inside(name)
        found = self.marks[-1][1] if self.marks else []
        for waiting, length in zip(self.lists, chain(found, repeat(0)), strict=False):
            del waiting[length:]

    def _forget_savepoints_inside(self, name: str | None) -> None:
        for index, mark in enumerate(self.marks):
            if mark[0] == name:
                del self.marks[index:]
                return

    def _insert(self, connection: Connection, pending: Sequence[Pending]) -> None:
        for schema, events in by_schema(pending).items():
            insert_through_sqlalchemy(connection, schema, events)
            self.has_inserted = True


_buffers: WeakKeyDictionary[RootTransaction, TransactionBuffer] = WeakKeyDictionary()
_watched: WeakSet[Engine] = WeakSet()
_watching = threading.Lock()


def buffer_of(connection: Connection) -> TransactionBuffer | None:
    """The buffer of the transaction in progress, if anything was sent in it."""
    transaction = connection.get_transaction()
    return None if transaction is None else _buffers.get(transaction)


def open_buffer(connection: Connection) -> TransactionBuffer:
    """The buffer of the transaction in progress, which begins here if it has to."""
    watch(connection.engine)
    # Like any statement, a send begins the transaction that it belongs to.
    transaction = connection.get_transaction() or connection.begin()
    _require_safe(connection, transaction)
    buffer = _buffers.get(transaction)
    if buffer is None:
        buffer = _buffers[transaction] = TransactionBuffer(marks=_marks_of_open(connection))
    return buffer


def watch(engine: Engine) -> None:
    """Hear of this engine's commits and savepoints. Done once, at the first send at the latest."""
    if engine in _watched:
        return
    # One thread at a time: a second list of listeners would take the place of the first, empty for
    # a moment, and a commit in that moment would leave its events behind.
    with _watching:
        if engine in _watched:
            return
        event.listen(engine, "commit", _on_commit)
        event.listen(engine, "rollback", _on_rollback)
        event.listen(engine, "savepoint", _on_savepoint)
        event.listen(engine, "rollback_savepoint", _on_rollback_savepoint)
        event.listen(engine, "handle_error", _on_error)
        _watched.add(engine)


def _require_safe(connection: Connection, transaction: RootTransaction) -> None:
    if isinstance(transaction, TwoPhaseTransaction):
        raise UnsafeTransaction(
            "Sending in a two-phase transaction is not supported: its outcome is decided "
            "elsewhere. Nothing was sent; use a transaction on one database."
        )
    if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
        raise autocommit_refused()
    if not transaction.is_active:
        raise UnsafeTransaction(
            "The transaction of this connection has already failed. Nothing was sent; "
            "roll it back and begin again."
        )


def autocommit_refused() -> UnsafeTransaction:
    """Why sending in autocommit mode is impossible."""
    return UnsafeTransaction(
        "In autocommit mode the event could not be atomic with your data. Nothing was sent; use a "
        'connection without isolation_level="AUTOCOMMIT".'
    )


# ── what engines tell; each may be told twice, through an engine and its execution_options() ───


def _on_commit(connection: Connection) -> None:
    buffer = buffer_of(connection)
    if buffer is None:
        return
    try:
        buffer.insert_all(connection)
    except BaseException:
        _undo(connection)
        raise


def _on_rollback(connection: Connection) -> None:
    # The buffer goes with the transaction, but the lists of idle sessions are also theirs.
    if (buffer := buffer_of(connection)) is not None:
        buffer.take()


def _undo(connection: Connection) -> None:
    # SQLAlchemy takes a commit that raised for a transaction that is over: it would send no
    # ROLLBACK, and the next user of the pooled connection would inherit the open transaction.
    if connection.invalidated:
        return
    try:
        connection.connection.rollback()
    except Exception:  # noqa: BLE001 - whatever it is, this connection must not be used again
        connection.invalidate()


def _on_savepoint(connection: Connection, _name: str | None) -> None:
    if (buffer := buffer_of(connection)) is not None:
        buffer.begin_savepoint(_name_of(connection.get_nested_transaction()))


def _on_rollback_savepoint(connection: Connection, name: str, _context: None) -> None:
    if (buffer := buffer_of(connection)) is not None:
        buffer.rollback_savepoint(name)


def _marks_of_open(connection: Connection) -> list[tuple[str | None, list[int]]]:
    """The marks of savepoints that are older than the first event: they found nothing."""
    around: list[str | None] = []
    nested = connection.get_nested_transaction()
    while nested is not None:
        nested = nested._previous_nested  # noqa: SLF001 - as below
        around.append(_name_of(nested))
    return [(name, []) for name in reversed(around)]


def _name_of(nested: NestedTransaction | None) -> str | None:
    # Rollbacks are told by name, and SQLAlchemy shows names nowhere else.
    return None if nested is None else nested._savepoint  # noqa: SLF001


def _on_error(context: ExceptionContext) -> OutcomeUnknown | None:
    if context.connection is None or context.statement is not None or not context.is_disconnect:
        return None
    buffer = buffer_of(context.connection)
    if buffer is None or not (buffer.is_committing and buffer.has_inserted):
        return None
    # Cancellation and interrupts have to stay what they are.
    if not isinstance(context.original_exception, Exception):
        return None
    return OutcomeUnknown(
        "The connection broke during COMMIT: data and events are either all there or all absent, "
        "and only the database knows which. Look there, or run the transaction again with the "
        "same event_uuid: an event that is there already is not sent a second time."
    )
