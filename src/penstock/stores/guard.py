"""Connections whose transaction cannot be ended by the code that they are lent to.

The server refuses as well (the seal, see `events.refuse_unsealed`); this is the layer that can
say which call it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, Self

import psycopg
from psycopg.abc import QueryNoTemplate as Query
from psycopg.sql import Composable
from sqlalchemy import event
from sqlalchemy.orm import Session

from penstock.core.transaction_control import Control, find_control
from penstock.errors import CommitInTransactionError, HandlerError, RollbackInTransactionError

# After `stream` libpq gives the first answer of a pipeline row by row as well, for which the worker
# took its own COMMIT for failed. An ordinary statement ends that, even one that fails.
END_OF_SINGLE_ROWS = "SELECT"


class Guard:
    """Whether a connection is lent out, and what its borrower tried."""

    __slots__ = ("given_up", "is_active", "is_flushing", "is_undone", "violation")

    def __init__(self) -> None:
        self.is_active = False
        self.is_flushing = False
        self.is_undone = False
        """Whether a flush has failed outside of a savepoint: SQLAlchemy gives all of it up then."""
        self.violation: Exception | None = None
        """What the borrower must not have done, or what has failed; nothing can mend it."""
        self.given_up: Exception | None = None
        """Why SQLAlchemy works with this connection no more. Nothing that follows would count."""

    def give_up(self, *_: Any) -> None:
        """SQLAlchemy invalidates the connection: it was asked to, or a statement was interrupted.

        The transaction is still there, with all that was written so far, for the worker to undo.
        """
        self.given_up = RollbackInTransactionError(
            "SQLAlchemy has given up the connection that the worker has lent to a handler: a "
            "statement was interrupted, or invalidate() was called. Nothing was committed. Let "
            "what interrupts come out of the handler; remove calls of invalidate()."
        )

    def require_kept(self) -> None:
        """Raise what a handler has done to its transaction, even where it swallowed the error."""
        if (lost := self.violation or self.given_up) is not None:
            raise lost

    def refuse(self, control: Control, what: str) -> NoReturn:
        """Refuse to end the transaction, and remember: the handler may swallow the error."""
        refusal: HandlerError
        if control is Control.COMMIT:
            refusal = CommitInTransactionError(
                f"{what} in a transaction of the worker's. Nothing was committed: the worker "
                "commits once, together with the checkpoint. Remove the call; for a part that may "
                "fail on its own use session.begin_nested()."
            )
        else:
            refusal = RollbackInTransactionError(
                f"{what} in a transaction of the worker's, which may hold other events too. "
                "Nothing was rolled back. Use session.begin_nested() for a part that may fail, or "
                "raise an error to have this event tried again."
            )
        # The first is the cause; what clean-up code tries afterwards is not.
        self.violation = self.violation or refusal
        raise refusal

    def roll_back(self) -> None:
        """Refuse, but for a flush that failed: its own error says what happened."""
        if not self.is_flushing:
            self.refuse(Control.ROLLBACK, "connection.rollback()")
        self.is_undone = True

    @contextmanager
    def flushing(self) -> Iterator[None]:
        """A session writes what it has gathered; remembers why, if it cannot."""
        self.is_flushing, self.is_undone = True, False
        try:
            yield
        except Exception as error:
            if self.is_undone:
                self.violation = self.violation or error
            raise
        finally:
            self.is_flushing = False

    def check(self, query: Query, connection: Any) -> None:
        """Refuse SQL text that ends the transaction."""
        if isinstance(query, Composable):
            text = query.as_string(connection)
        else:
            text = query if isinstance(query, str) else bytes(query).decode(errors="replace")
        control = find_control(text)
        if control is not None:
            self.refuse(control, f"SQL text {' '.join(text.split())[:60]!r}")

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The connection is in a handler's hands meanwhile."""
        self.is_active, self.violation = True, None
        try:
            yield
        finally:
            self.is_active = False


class GuardedCursor(psycopg.Cursor[Any]):
    """Looks at SQL text while its connection is lent out."""

    def execute(self, query: Any, params: Any = None, **kwargs: Any) -> Self:
        """Execute, unless the text would end the transaction."""
        if (guard := self.connection.guard).is_active:  # type: ignore[attr-defined]
            guard.check(query, self.connection)
        super().execute(query, params, **kwargs)
        return self

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """The rows as they come. What follows in a pipeline is answered as ever."""
        try:
            yield from super().stream(*args, **kwargs)
        finally:
            with suppress(psycopg.Error):
                psycopg.Cursor(self.connection).execute(END_OF_SINGLE_ROWS)


class GuardedConnection(psycopg.Connection[Any]):
    """A psycopg connection whose commit, rollback and close are refused while it is lent out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guard = Guard()
        self.cursor_factory = GuardedCursor
        self.catch_up: Callable[[], None] | None = None
        """Called before the connection is used, where something was sent ahead."""

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        """A cursor, behind whatever was sent ahead."""
        if self.catch_up is not None:
            self.catch_up()
        return super().cursor(*args, **kwargs)

    def transaction(self, *args: Any, **kwargs: Any) -> Any:
        """A savepoint, behind whatever was sent ahead."""
        if self.catch_up is not None:
            self.catch_up()
        return super().transaction(*args, **kwargs)

    def pipeline(self) -> Any:
        """A pipeline, behind whatever was sent ahead."""
        if self.catch_up is not None:
            self.catch_up()
        return super().pipeline()

    def commit(self) -> None:
        """Commit, unless lent out."""
        if self.guard.is_active:
            self.guard.refuse(Control.COMMIT, "connection.commit()")
        super().commit()

    def rollback(self) -> None:
        """Roll back, unless lent out."""
        if self.guard.is_active:
            self.guard.roll_back()
        else:
            super().rollback()

    def close(self) -> None:
        """Close, unless lent out. A broken connection has nothing left to protect."""
        if self.guard.is_active and not self.closed:
            if self.guard.given_up is None:
                self.guard.refuse(Control.ROLLBACK, "connection.close()")
        else:
            super().close()


class GuardedAsyncCursor(psycopg.AsyncCursor[Any]):
    """The same for `async def` handlers."""

    async def execute(self, query: Any, params: Any = None, **kwargs: Any) -> Self:
        """Execute, unless the text would end the transaction."""
        if (guard := self.connection.guard).is_active:  # type: ignore[attr-defined]
            guard.check(query, self.connection)
        await super().execute(query, params, **kwargs)
        return self

    async def stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """The rows as they come. What follows in a pipeline is answered as ever."""
        try:
            async for row in super().stream(*args, **kwargs):
                yield row
        finally:
            with suppress(psycopg.Error):
                await psycopg.AsyncCursor(self.connection).execute(END_OF_SINGLE_ROWS)


class GuardedAsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for `async def` handlers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.guard = Guard()
        self.cursor_factory = GuardedAsyncCursor

    async def commit(self) -> None:
        """Commit, unless lent out."""
        if self.guard.is_active:
            self.guard.refuse(Control.COMMIT, "connection.commit()")
        await super().commit()

    async def rollback(self) -> None:
        """Roll back, unless lent out."""
        if self.guard.is_active:
            self.guard.roll_back()
        else:
            await super().rollback()

    async def close(self) -> None:
        """Close, unless lent out. A broken connection has nothing left to protect."""
        if self.guard.is_active and not self.closed:
            if self.guard.given_up is None:
                self.guard.refuse(Control.ROLLBACK, "connection.close()")
        else:
            await super().close()


def require_first(made: Sequence[GuardedConnection | GuardedAsyncConnection]) -> None:
    """Refuse a second connection: what is written through it would not commit with the claim."""
    if made:
        raise made[0].guard.given_up or psycopg.InterfaceError("The connection is closed.")


_GUARD = "penstock_guard"
_FLUSH = "flush"
_REFUSED_METHODS = {
    "commit": Control.COMMIT,
    "rollback": Control.ROLLBACK,
    "close": Control.ROLLBACK,
}


def guard_session(session: Session, guard: Guard) -> None:
    """Refuse commit, rollback and close of a lent session; savepoints stay welcome."""
    for method, control in _REFUSED_METHODS.items():
        setattr(session, method, partial(guard.refuse, control, f"session.{method}()"))
    setattr(session, _FLUSH, partial(_flush, session, guard))
    session.info[_GUARD] = guard


def unguard_session(session: Session) -> None:
    """Take a lent session back."""
    del session.info[_GUARD]
    for method in (*_REFUSED_METHODS, _FLUSH):
        delattr(session, method)


def _flush(session: Session, guard: Guard, objects: Any = None) -> None:
    with guard.flushing():
        type(session).flush(session, objects)


def _refuse_outermost(session: Session) -> None:
    # Also told when a savepoint is released, which is welcome.
    guard: Guard | None = session.info.get(_GUARD)
    if guard is not None and guard.is_active and not session.in_nested_transaction():
        guard.refuse(Control.COMMIT, "a commit of the session's transaction")


# Once, for all sessions: a listener for each would cost more than the rest of a batch's set-up.
event.listen(Session, "before_commit", _refuse_outermost)
