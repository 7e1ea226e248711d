"""Connections to the model: one that commits every statement, and a worker's with transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypeVar

import psycopg

from penstock.stores.guard import Guard
from penstock.stores.worker_connection import nothing
from tests.simulation import (
    inbox_statements,
    lease_statements,
    log_statements,
    operator_statements,
    parked_statements,
)
from tests.simulation.database import (
    IDLE_SECONDS,
    NAMES,
    STATEMENTS,
    WAITING,
    Database,
    Parameters,
    Rows,
    Statement,
    Transaction,
    statement_for,
)
from tests.simulation.machine import Process
from tests.simulation.rows import Effect

T = TypeVar("T")
MODELLED = (
    *(inbox_statements, lease_statements, log_statements),
    *(operator_statements, parked_statements),
)
"""Where the statements come from that the connections below understand."""


class Wire:
    """How a network treats statements; a history's faults are here."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.machine = database.machine
        self.loss_share = 0.0
        """How likely a connection breaks at a statement, before or after the server ran it."""
        self.losses = 0

    def is_lost_now(self) -> bool:
        """Whether the connection breaks here."""
        if self.machine.dice() < self.loss_share and self.machine.current:
            self.losses += 1
            self.machine.note("FAULT the connection breaks")
            return True
        return False


class Result:
    """The rows of a statement."""

    __slots__ = ("_rows", "rowcount")

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.rowcount = len(rows)

    def fetchone(self) -> tuple[Any, ...] | None:
        return self._rows[0] if self._rows else None

    def fetchall(self) -> Rows:
        return self._rows

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self._rows)


class ModelConnection:
    """Stands in for a psycopg connection in autocommit."""

    prepare_threshold: int | None = None
    autocommit = True

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._transaction: Transaction | None = None
        self._timeline = wire.database.timeline
        self.closed = False

    def execute(
        self,
        query: str,
        parameters: Parameters | None = None,
        *,
        prepare: bool | None = None,  # noqa: ARG002 - psycopg's
    ) -> Result:
        wire = self._wire
        machine = wire.machine
        machine.breathe()
        if (wire.loss_share and wire.is_lost_now()) or self._timeline != wire.database.timeline:
            self.closed = True
        if self.closed:
            raise psycopg.OperationalError("the connection is closed")
        if machine.tell is not None:
            machine.note(f"{NAMES.get(query)} {parameters}")
        statement = STATEMENTS.get(query) or statement_for(query)
        if self._transaction is not None:
            rows = statement(self._transaction, parameters or {})
        elif statement in WAITING:
            rows = self._in_transaction(statement, parameters or {})
        else:
            rows = statement(wire.database.autocommit, parameters or {})
        if wire.loss_share and wire.is_lost_now():
            self.closed = True
            raise psycopg.OperationalError("the connection broke after the statement")
        return Result(rows)

    def _in_transaction(self, statement: Statement, parameters: Parameters) -> Rows:
        transaction = Transaction(self._wire.database)
        try:
            rows = statement(transaction, parameters)
        except BaseException:
            transaction.rollback()
            raise
        transaction.commit()
        return rows

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Until its end what it writes is in hand; a broken connection rolls it back."""
        transaction = self._transaction = self._wire.database.begin()
        transaction.on_end = self.close
        try:
            yield
            self._wire.machine.breathe()
            if self.closed:
                raise psycopg.OperationalError("the connection is closed")
            transaction.commit()
        except BaseException:
            transaction.rollback()
            raise
        finally:
            self._transaction = None

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelWorker:
    """Stands in for a worker's connection: what a lane needs of the transaction of a batch."""

    def __init__(self, wire: Wire, process: Process) -> None:
        self.guard = Guard()
        self.meanwhile = nothing
        self._wire = wire
        self._process = process
        self._transaction: Transaction | None = None
        self._row: tuple[Any, ...] | None = None
        self._is_lost = False
        self._timeline = wire.database.timeline
        process.at_end.append(self._vanish)

    def _vanish(self) -> None:
        """The process is dead; where its host is, nobody tells the server for a while."""
        transaction = self._transaction
        if transaction is not None and transaction.is_open:
            machine = self._wire.machine
            if machine.dice() < 0.5:
                transaction.idle_until = machine.now + IDLE_SECONDS
            else:
                transaction.rollback()

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    @property
    def is_spoiled(self) -> bool:
        return False

    def run(self, work: Callable[[], T]) -> T:
        return work()

    def begin(self, query: str, parameters: Parameters) -> None:
        self._row = None
        self._arrive()
        transaction = self._transaction = self._wire.database.begin()
        transaction.on_end = self.interrupt
        (self._row,) = self._run(transaction, query, parameters)
        self._answer()

    def first_row(self) -> tuple[Any, ...] | None:
        return self._row

    def execute(self, query: str, parameters: Parameters) -> None:
        self.fetch(query, parameters)

    def fetch(self, query: str, parameters: Parameters) -> Rows:
        self._arrive()
        transaction = self._transaction
        assert transaction is not None
        rows = self._run(transaction, query, parameters)
        self._answer()
        return rows

    def _run(self, transaction: Transaction, query: str, parameters: Parameters) -> Rows:
        machine = self._wire.machine
        if machine.tell is not None:
            machine.note(f"{NAMES.get(query)} {parameters}")
        return statement_for(query)(transaction, parameters)

    def commit_after(self, *statements: tuple[str, Parameters]) -> None:
        self.meanwhile()
        self._arrive()
        transaction = self._transaction
        assert transaction is not None
        for query, parameters in statements:
            self._run(transaction, query, parameters)
        transaction.commit()
        self._transaction = None
        self._answer()

    def _arrive(self) -> None:
        self._wire.machine.breathe()
        if self._wire.is_lost_now() or self._timeline != self._wire.database.timeline:
            self.interrupt()
        if self._is_lost:
            raise psycopg.OperationalError("the connection is closed")

    def _answer(self) -> None:
        if self._wire.is_lost_now():
            self.interrupt()
        if self._is_lost:
            raise psycopg.OperationalError("the connection broke before the answer")

    def rollback(self) -> None:
        # What a dead process leaves behind is the server's business.
        if self._transaction is not None and not self._process.is_dead:
            self._transaction.rollback()
            self._transaction = None

    def close(self) -> None:
        self.interrupt()
        if not self._process.is_dead and self._vanish in self._process.at_end:
            self._process.at_end.remove(self._vanish)

    def cancel(self) -> None:
        pass

    def interrupt(self) -> None:
        self._is_lost = True
        self.rollback()

    def call(self, function: Callable[..., Any], arguments: list[Any]) -> Any:
        return function(*arguments)

    def write(self, effect: Effect) -> None:
        """What a handler does with its cursor."""
        self._arrive()
        assert self._transaction is not None
        inbox_statements.write_effect(self._transaction, effect)

    def session(self) -> Any:
        return self

    def flush(self) -> None:
        pass

    def connection(self) -> Any:
        return self

    def cursor(self) -> Any:
        return self

    def pipelined(self) -> AbstractContextManager[Any]:
        return nullcontext()
