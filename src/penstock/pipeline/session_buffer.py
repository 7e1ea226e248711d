"""Events sent through a SQLAlchemy session: they wait until the session has its connection.

A `Session` comes by its connection late, in asyncio only by an await, so a send cannot ask for it.
What is sent before stays with the `SessionTransaction` and moves over to the connection's
transaction (see `transaction_buffer`) as soon as it begins there; from then on sends go straight
to the connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet, ref

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, SessionTransaction

from penstock.errors import UnsafeTransaction, UsageError
from penstock.pipeline.transaction_buffer import (
    Pending,
    TransactionBuffer,
    autocommit_refused,
    buffer_of,
    open_buffer,
)

_early: WeakKeyDictionary[SessionTransaction, list[Pending]] = WeakKeyDictionary()
"""What was sent before the transaction, or the savepoint, began on a connection."""
_connections: WeakKeyDictionary[SessionTransaction, list[ref[Connection]]] = WeakKeyDictionary()
_committing: WeakSet[SessionTransaction] = WeakSet()
"""Transactions and savepoints that are about to commit: sends may not wait any more."""


def remember(session: Session, pending: Sequence[Pending]) -> None:
    """Keep events for the COMMIT of the session's transaction, which begins here if it has to."""
    if session.twophase:
        raise UnsafeTransaction(
            "Sending through a two-phase session is not supported: its outcome is decided "
            "elsewhere. Nothing was sent; use a session with twophase=False."
        )
    bind = _bind_of(session)
    transaction = _begun(session)
    connection = _connection_of(transaction, bind)
    if connection is None and transaction in _committing:
        connection = session.connection()
    if connection is None:
        _keep_early(transaction, bind, pending)
    else:
        open_buffer(connection).add(connection, pending)


def waiting(session: Session) -> list[Pending]:
    """What the session's transaction is going to insert."""
    buffer = _buffer_under(session)
    events = [] if buffer is None else buffer.waiting()
    for early in _early_lists(session):
        if buffer is None or not buffer.has(early):
            events += early
    return sorted(events)


def take(session: Session) -> list[Pending]:
    """What the session's transaction was going to insert; it waits no longer."""
    taken = waiting(session)
    if (buffer := _buffer_under(session)) is not None:
        buffer.take()
    for early in _early_lists(session):
        early.clear()
    return taken


def _keep_early(
    transaction: SessionTransaction, bind: Engine | Connection, pending: Sequence[Pending]
) -> None:
    if _is_autocommit(transaction.session, bind):
        raise autocommit_refused()
    early = _early.setdefault(transaction, [])
    below = _connection_of(_lineage(transaction)[0], bind)
    if below is None and isinstance(bind, Connection) and bind.in_transaction():
        below = bind
    if below is None:
        early.extend(pending)
    else:
        # Whoever commits the connection below commits these too, even if the session is idle.
        open_buffer(below).add(below, pending, guest=early)


def _move(transaction: SessionTransaction, connection: Connection) -> None:
    if early := _early.get(transaction):
        open_buffer(connection).add(connection, early)
        early.clear()


def _bind_of(session: Session) -> Engine | Connection:
    try:
        return session.get_bind()
    except UnboundExecutionError:
        raise UsageError(
            "This session has no default database, so it is not clear where the event belongs. "
            "Nothing was sent; pass session.connection(bind_arguments={...}) instead."
        ) from None


def _is_autocommit(session: Session, bind: Engine | Connection) -> bool:
    # The connection itself is asked later; this finds the plain cases at the send already.
    return "AUTOCOMMIT" in (
        getattr(session, "execution_options", {}).get("isolation_level"),
        bind.get_execution_options().get("isolation_level"),
        getattr(bind.dialect, "_on_connect_isolation_level", None),
    )


def _begun(session: Session) -> SessionTransaction:
    """The innermost transaction; like any statement, a send begins it."""
    transaction = _innermost(session)
    if transaction is None:
        if not session.autobegin:
            raise UnsafeTransaction(
                "This session has no transaction. Nothing was sent; call session.begin() first."
            )
        transaction = session.begin()
    if not transaction.is_active:
        raise UnsafeTransaction(
            "The transaction of this session has already failed or ended, or is only just "
            "beginning. Nothing was sent; roll it back, or send before the commit. In an "
            "after_begin listener, send through the connection that it is given."
        )
    return transaction


def _innermost(session: Session) -> SessionTransaction | None:
    return session.get_nested_transaction() or session.get_transaction()


def _lineage(transaction: SessionTransaction) -> list[SessionTransaction]:
    """The transaction and those around it, outermost first."""
    lineage = [transaction]
    while (parent := lineage[-1].parent) is not None:
        lineage.append(parent)
    return lineage[::-1]


def _early_lists(session: Session) -> list[list[Pending]]:
    transaction = _innermost(session)
    lineage = [] if transaction is None else _lineage(transaction)
    return [_early[each] for each in lineage if each in _early]


def _connection_of(transaction: SessionTransaction, bind: Engine | Connection) -> Connection | None:
    """The connection on which this very transaction, or savepoint, has begun."""
    for reference in _connections.get(transaction, ()):
        connection = reference()
        if connection is not None and connection.engine is bind.engine:
            return connection
    return None


def _buffer_under(session: Session) -> TransactionBuffer | None:
    outermost = session.get_transaction()
    references = [] if outermost is None else _connections.get(outermost, [])
    for connection in (*(reference() for reference in references), session.bind):
        if isinstance(connection, Connection) and (buffer := buffer_of(connection)) is not None:
            return buffer
    return None


# ── what sessions tell ─────────────────────────────────────────────────────────────────────────


def _on_begin(session: Session, transaction: SessionTransaction, connection: Connection) -> None:
    _connections.setdefault(transaction, []).append(ref(connection))
    if _early.get(transaction) and connection.engine is _bind_of(session).engine:
        _move(transaction, connection)


def _on_before_commit(session: Session) -> None:
    # Told for savepoints too. The insert itself is the connection's business: its COMMIT comes
    # after every flush, and after every listener that may still send.
    transaction = _innermost(session)
    assert transaction is not None
    _committing.add(transaction)
    if any(_early_lists(session)):
        connection = session.connection()
        for each in _lineage(transaction):
            _move(each, connection)


def _on_end(_session: Session, transaction: SessionTransaction) -> None:
    # Closing a session tells of no rollback, and somebody may still hold the list as a guest's.
    if (early := _early.pop(transaction, None)) is not None:
        early.clear()


# Once, for all sessions: one that began its transaction unheard could not be followed any more.
event.listen(Session, "after_begin", _on_begin)
event.listen(Session, "before_commit", _on_before_commit)
event.listen(Session, "after_transaction_end", _on_end)
