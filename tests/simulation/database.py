"""A model of PostgreSQL: the tables of one stream and one consumer, transactions, row locks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, TypeVar

import psycopg

from penstock.core.leases import PUBLISHER
from tests.simulation.machine import NEVER, Actor, Machine
from tests.simulation.rows import DeadRow, Effect, Hole, LeaseRow, OutboxRow, ParkedRow

Parameters = dict[str, Any]
Rows = list[tuple[Any, ...]]
Key = int | str
RowT = TypeVar("RowT")
# The server ends what a vanished client left open, at the latest.
IDLE_SECONDS = 2.0


Snapshot = dict[str, Any]
REPLICATED = (
    *("outbox", "by_position", "holes", "next_id", "head", "published", "stream_timeline"),
    *("lanes", "epoch", "settled_to", "deployed_at", "workers", "leases"),
    *("processed", "parked", "dead", "suspects", "effects"),
)
"""What a standby has of a database."""


class Refused(psycopg.DatabaseError):
    """What a function of the schema raises."""

    def __init__(self, sqlstate: str, message: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class Transaction:
    """Sees what is committed and its own writes; rows that it wrote are locked until it ends."""

    __slots__ = (
        "_locked",
        "_shared",
        "_writes",
        "database",
        "effects",
        "groups",
        "idle_until",
        "is_open",
        "on_end",
        "seal",
        "sleeper",
        "waiters",
    )

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_open = True
        self.groups: tuple[str, ...] = ()
        """By these a successor finds it."""
        self.seal: tuple[int, int] | None = None
        self.idle_until = NEVER
        self.effects: list[Effect] = []
        self.on_end: Callable[[], None] | None = None
        """Called when the server ends it by itself."""
        self._locked: list[tuple[int, Key]] = []
        self._shared: list[tuple[int, Key]] = []
        self._writes: dict[int, dict[Any, Any]] = {}
        self.waiters: list[Actor] = []
        self.sleeper: Actor | None = None
        """Who waits for a lock in it."""

    def rows(self, table: dict[Any, RowT]) -> dict[Any, RowT]:
        """A table as this transaction sees it. Not to be changed."""
        writes = self._writes.get(id(table))
        if not writes:
            return table
        merged = {**table, **writes}
        return {key: row for key, row in merged.items() if row is not None}

    def lock(self, table: dict[Any, Any], key: Key) -> None:
        """Wait until nobody else has this row in hand, and take it."""
        place = (id(table), key)
        locks, shares = self.database.locks, self.database.shares
        while True:
            holder = locks.get(place)
            rivals = [t for t in shares.get(place, ()) if t is not self]
            if holder is self and not rivals:
                return
            if holder not in {None, self}:
                rivals.append(holder)
            if not rivals:
                locks[place] = self
                self._locked.append(place)
                return
            self._wait_for(rivals[-1])

    def lock_free(self, table: dict[Any, Any], key: Key) -> bool:
        """FOR UPDATE SKIP LOCKED: take this row, unless somebody else has it in hand."""
        place = (id(table), key)
        rivals = [t for t in self.database.shares.get(place, ()) if t is not self]
        if rivals or self.database.locks.get(place) not in {None, self}:
            return False
        self.lock(table, key)
        return True

    def share(self, table: dict[Any, Any], key: Key) -> bool:
        """FOR SHARE SKIP LOCKED: others may share it too, and nobody may write it."""
        place = (id(table), key)
        if self.database.locks.get(place) not in {None, self}:
            return False
        self.database.shares.setdefault(place, []).append(self)
        self._shared.append(place)
        return True

    def insert(self, table: dict[Any, RowT], key: Key, row: RowT) -> bool:
        """ON CONFLICT DO NOTHING: waits for whoever writes it, not for a lock alone."""
        while (holder := self.database.locks.get((id(table), key))) not in (None, self):
            assert holder is not None
            if key in table and key not in holder._writes.get(id(table), {}):
                return False
            self._wait_for(holder)
        if key in self.rows(table):
            return False
        self.write(table, key, row)
        return True

    def _wait_for(self, holder: Transaction) -> None:
        self.database.wait_for(holder, self)
        if not self.is_open:
            raise psycopg.OperationalError("the server ended this transaction")

    def sleep(self, seconds: float) -> None:
        """Let the others go on meanwhile, who may end this one."""
        self.sleeper = self.database.machine.current
        self.database.machine.sleep(seconds)
        self.sleeper = None
        if not self.is_open:
            raise psycopg.OperationalError("the server ended this transaction")

    def write(self, table: dict[Any, RowT], key: Key, row: RowT | None) -> None:
        """Insert, update, or with None delete."""
        self.lock(table, key)
        self._writes.setdefault(id(table), {})[key] = row

    def commit(self) -> None:
        """All of it, at one moment."""
        database = self.database
        for table in database.tables:
            for key, row in self._writes.get(id(table), {}).items():
                if row is None:
                    table.pop(key, None)
                else:
                    table[key] = row
        if self.effects:
            database.effects += self.effects
        self._end()
        if self.effects:
            database.on_effects(self.effects)

    def rollback(self) -> None:
        """Nothing of it."""
        if self.is_open:
            self._end()

    def terminate(self) -> None:
        """As pg_terminate_backend does."""
        self.rollback()
        if self.on_end is not None:
            self.on_end()
        if self.sleeper is not None:
            self.sleeper.wake_at = self.database.machine.now

    def _end(self) -> None:
        self.is_open = False
        database = self.database
        for place in self._locked:
            del database.locks[place]
        for place in self._shared:
            database.shares[place].remove(self)
        database.open_transactions.pop(id(self), None)
        for waiter in self.waiters:
            waiter.wake_at = database.machine.now


class Database:
    """The tables. Whatever is not a worker's transaction is one atomic statement."""

    stream_name = "orders"
    origin = "11111111-1111-1111-1111-111111111111"
    consumer = "shop.bill"

    def __init__(self, machine: Machine, *, lanes: int = 1) -> None:
        self.machine = machine
        self.outbox: dict[int, OutboxRow] = {}
        self.by_position: dict[int, OutboxRow] = {}
        self.holes: list[Hole] = []
        self.next_id = 1
        self.head = 0
        self.published = 0
        self.timeline = "00000001"
        # The stream is registered from the beginning.
        self.stream_timeline = self.timeline
        self.lanes = lanes
        self.epoch = 1
        self.settled_to = 0
        self.deployed_at = 0.0
        self.is_paused = False
        self.ordering = "key"
        self.operations: list[float] = []
        """When each began."""
        self.workers: dict[str, float] = {}
        self.leases: dict[str, LeaseRow] = {PUBLISHER: LeaseRow()}
        self.processed: dict[str, tuple[int, str]] = {}
        self.parked: dict[int, ParkedRow] = {}
        self.dead: dict[str, DeadRow] = {}
        self.suspects: dict[int, tuple[str, ...]] = {}
        self.effects: list[Effect] = []
        self.tables: tuple[dict[Any, Any], ...] = (
            self.processed,
            self.parked,
            self.dead,
            self.suspects,
        )
        self.locks: dict[tuple[int, Key], Transaction] = {}
        self.shares: dict[tuple[int, Key], list[Transaction]] = {}
        self.open_transactions: dict[int, Transaction] = {}
        self.autocommit = Transaction(self)
        """What statements run in that neither wait nor write rows."""
        self.wrong_share = 0.0
        """How often a consumer that begins early begins with another event than the next."""
        self.on_sent: Callable[[], None] = lambda: None
        self.on_effects: Callable[[list[Effect]], None] = lambda _effects: None

    def begin(self) -> Transaction:
        """A transaction that others can find."""
        transaction = Transaction(self)
        self.open_transactions[id(transaction)] = transaction
        return transaction

    def wait_for(self, holder: Transaction, waiting: Transaction) -> None:
        """Let the others go on until a transaction has ended; one whose client is gone is ended."""
        machine = self.machine
        if holder.idle_until <= machine.now:
            holder.terminate()
            return
        actor = machine.current
        if actor is None:
            raise psycopg.errors.LockNotAvailable("somebody else has it")
        holder.waiters.append(actor)
        waiting.sleeper = actor
        machine.sleep(holder.idle_until - machine.now)
        waiting.sleeper = None

    def snapshot(self) -> Snapshot:
        """Everything that is committed, as a standby has it."""
        return {name: copy(getattr(self, name)) for name in REPLICATED}

    def fail_over(self, snapshot: Snapshot) -> None:
        """A standby takes over: what it does not have is lost, and every connection."""
        for transaction in list(self.open_transactions.values()):
            transaction.terminate()
        for name, value in snapshot.items():
            present = getattr(self, name)
            if isinstance(present, dict):
                # The tables stay the same objects: rows are locked by them.
                present.clear()
                present.update(value)
            else:
                setattr(self, name, copy(value))
        self.timeline = f"{int(self.timeline) + 1:08d}"

    def consumer_leases(self) -> Iterator[tuple[str, LeaseRow]]:
        """The lanes' rows of `stream_lease`."""
        return ((role, row) for role, row in self.leases.items() if role != PUBLISHER)

    def send(self, events: Iterable[OutboxRow]) -> None:
        """What a sender's COMMIT makes visible."""
        for row in events:
            self.outbox[row.id] = row
        self.on_sent()

    def unnumbered(self) -> list[OutboxRow]:
        """Events without a position, in the order of their ids."""
        return [self.outbox[i] for i in sorted(self.outbox) if self.outbox[i].position is None]

    def sent(self, event_uuid: str) -> OutboxRow | None:
        """An event that somebody has sent, numbered or not."""
        return next((row for row in self.outbox.values() if row.event_uuid == event_uuid), None)


Statement = Callable[[Transaction, Parameters], Rows]
STATEMENTS: dict[str, Statement] = {}
WAITING: set[Statement] = set()
"""Statements outside of a worker's transaction that write rows, and may wait for them."""
NAMES: dict[str, str] = {}


def statement_for(query: str) -> Statement:
    """What a query does. Raises NotImplementedError where it has no model yet."""
    statement = STATEMENTS.get(query)
    if statement is None:
        raise NotImplementedError(f"tests/simulation has no model of this query: {query[:200]}")
    return statement
