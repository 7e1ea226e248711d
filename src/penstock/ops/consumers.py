"""What an operator does to a consumer: pause and resume it, rename it, forget it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.core.replays import is_replay_name
from penstock.core.sealing import SEALED_TEXT_PREFIX
from penstock.errors import ConsumerAtWork, ConsumerUnknown, OperationRefused, UsageError
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

FORGET_BATCH = 1000
LOCK_SECONDS = 10.0
_NIL = UUID(int=0)

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Lane:
    """One lane's row, locked."""

    epoch: int
    checkpoint: int
    is_held: bool


@dataclass(frozen=True, slots=True)
class LockedConsumer:
    """A consumer whose row and lanes nobody else changes until the transaction ends."""

    name: str
    stream_name: str
    start_position: int
    lane_count: int
    epoch: int
    lanes: tuple[Lane, ...]

    @property
    def floor(self) -> int:
        """The lowest lane's checkpoint; before the first lease, just before the start."""
        present = [lane.checkpoint for lane in self.lanes if lane.epoch == self.epoch]
        return min(present, default=self.start_position - 1)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """How many rows a consumer has in the tables that grow."""

    settled: int
    parked: int
    dead: int


class Consumers:
    """The books of all consumers, on a connection in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        assert connection.autocommit, "every operation begins a transaction of its own"
        self._connection = connection
        self._sql = Queries("operator.sql", schema)

    # ── names ──────────────────────────────────────────────────────────────────────────────────

    def find(self, given: str) -> str:
        """The full name of a consumer, from that or from a short name that only one has."""
        rows = self._connection.execute(self._sql["names"]).fetchall()
        return find_name(given, [name for (name,) in rows])

    # ── pause and resume ───────────────────────────────────────────────────────────────────────

    def pause(self, names: Sequence[str], *, by: str, reason: str = "") -> set[str]:
        """Workers on all hosts finish their batch and let go; returns those that were not paused.

        Nothing changes for a consumer that is paused already.
        """
        parameters = {"consumers": list(names), "by": by, "reason": reason}
        return self._changed("pause", parameters)

    def resume(self, names: Sequence[str]) -> set[str]:
        """Workers take up the lanes again; returns those that were paused."""
        return self._changed("resume", {"consumers": list(names)})

    def lanes_held(self, names: Sequence[str]) -> int:
        """How many lanes somebody may work on now."""
        row = self._connection.execute(
            self._sql["lanes_held"], {"consumers": list(names)}
        ).fetchone()
        assert row is not None
        return int(row[0])

    def _changed(self, query: str, parameters: dict[str, Any]) -> set[str]:
        with changing(self._connection, self._sql):
            rows = self._connection.execute(self._sql[query], parameters).fetchall()
        return {name for (name,) in rows}

    # ── rename ─────────────────────────────────────────────────────────────────────────────────

    def rename(self, old: str, new: str) -> None:
        """Give a consumer that is not running another name, in all books at once."""
        require_full_name(new)
        require_no_replay(old, "renamed")
        if new == old:
            raise OperationRefused(f"{old} has that name already. Nothing was changed.")
        with changing(self._connection, self._sql):
            consumer = self._lock_idle(old, "renamed")
            self._require_no_effects(old)
            self._sweep("rename", {"old": old, "new": new, "stream_name": consumer.stream_name})

    def _require_no_effects(self, name: str) -> None:
        row = self._connection.execute(
            self._sql["effects_of_name"], {"consumer": name, "sealed": SEALED_TEXT_PREFIX}
        ).fetchone()
        assert row is not None
        interrupted, are_sealed = row
        if interrupted:
            raise OperationRefused(
                f"{name} cannot be renamed: {interrupted} of its calls to the outside began and "
                "never returned. Their idempotency keys are made of the name, so that under "
                "another one the other side would take a second call for a new one. Nothing was "
                "changed; let the consumer try those events again, or write down what became of "
                "the calls: docs/EFFECTS.md shows how."
            )
        if are_sealed:
            raise OperationRefused(
                f"{name} cannot be renamed: {are_sealed} results of its calls to the outside are "
                "sealed for that name, and under another one they would be taken for forged. "
                "Nothing was changed; keep the name."
            )

    # ── forget ─────────────────────────────────────────────────────────────────────────────────

    def count_leftovers(self, name: str) -> Leftovers:
        """What forgetting the consumer would delete."""
        row = self._connection.execute(self._sql["count_rows"], {"consumer": name}).fetchone()
        assert row is not None
        return Leftovers(*row)

    def forget(
        self,
        name: str,
        *,
        with_dead_letters: bool = False,
        on_progress: Callable[[int], None] = lambda _deleted: None,
    ) -> None:
        """Delete a consumer that is not running, and all its rows.

        The many rows go first, in batches, and only those that the checkpoint makes superfluous:
        whoever is interrupted leaves a consumer that works as before and can be forgotten later.
        """
        with changing(self._connection, self._sql):
            floor = self._lock_forgettable(name, with_dead_letters=with_dead_letters).floor
            self._connection.execute(self._sql["give_up"], {"consumer": name, "floor": floor})
        self._delete_settled(name, floor, on_progress)
        with changing(self._connection, self._sql):
            consumer = self._lock_forgettable(name, with_dead_letters=with_dead_letters)
            self._sweep("forget", {"consumer": name, "stream_name": consumer.stream_name})

    def _delete_settled(self, name: str, floor: int, on_progress: Callable[[int], None]) -> None:
        after, deleted = _NIL, 0
        while True:
            rows = self._connection.execute(
                self._sql["delete_settled_batch"],
                {"consumer": name, "after": after, "floor": floor, "count": FORGET_BATCH},
            ).fetchall()
            if not rows:
                return
            after = max(event_uuid for (event_uuid,) in rows)
            deleted += len(rows)
            on_progress(deleted)

    def _lock_forgettable(self, name: str, *, with_dead_letters: bool) -> LockedConsumer:
        consumer = self._lock_idle(name, "forgotten")
        leftovers = self.count_leftovers(name)
        if (leftovers.parked or leftovers.dead) and not with_dead_letters:
            raise OperationRefused(
                f"{name} has {leftovers.parked} parked events and {leftovers.dead} dead letters, "
                "the only place where they are kept for it. Nothing was changed; add "
                "--with-dead-letters to delete them too."
            )
        return consumer

    # ── the parts of both ──────────────────────────────────────────────────────────────────────

    def _lock_idle(self, name: str, done: str) -> LockedConsumer:
        consumer = lock(self._connection, self._sql, name)
        replays = self._connection.execute(self._sql["replays"], {"consumer": name}).fetchall()
        if replays:
            raise OperationRefused(
                f"{name} cannot be {done} while there are replays of it: "
                f"{', '.join(replay for (replay,) in replays)}. Nothing was changed; let them "
                "finish, or `penstock replay cancel` them."
            )
        held = sum(lane.is_held for lane in consumer.lanes)
        workers = self._connection.execute(
            self._sql["workers_alive"], {"consumer": name}
        ).fetchall()
        if held or workers:
            places = ", ".join(f"{host} (pid {pid})" for host, pid in workers) or "no known host"
            raise ConsumerAtWork(
                f"{name} cannot be {done} while it runs: {held} of its lanes are held, and its "
                f"workers are on {places}. Nothing was changed; stop them, wait until "
                "`penstock consumers list` shows none, and try again."
            )
        return consumer

    def _sweep(self, verb: str, parameters: dict[str, Any]) -> None:
        for query in SWEEPS[verb]:
            try:
                self._connection.execute(self._sql[query], parameters)
            except psycopg.errors.UniqueViolation as error:
                raise OperationRefused(
                    f"{parameters['new']} is taken: the database has rows of a consumer of that "
                    "name. Nothing was changed; choose another name, or forget that one first."
                ) from error


SWEEPS = {
    "rename": (
        "rename_consumer",
        "rename_lanes",
        "rename_processed_event",
        "rename_parked_event",
        "rename_dead_letter",
        "rename_quarantine",
        "rename_suspect",
        "rename_seek",
        "rename_effect",
        "rename_operation",
        "rename_operation_event",
        "rename_worker",
        "rename_trail",
    ),
    "forget": (
        "forget_lanes",
        "forget_processed_event",
        "forget_parked_event",
        "forget_dead_letter",
        "forget_quarantine",
        "forget_suspect",
        "forget_seek",
        "forget_effect",
        "forget_operation_event",
        "forget_operation",
        "forget_worker",
        "forget_trail",
        "forget_consumer",
        "forget_source",
    ),
}
"""All tables that hold a consumer's name. `remote_consumer` has those of other databases."""


# ── what seeking uses too ──────────────────────────────────────────────────────────────────────


@contextmanager
def changing(connection: Connection, sql: Queries) -> Iterator[None]:
    """A transaction that gives up, with everything as it was, rather than wait for a hung one."""
    try:
        with connection.transaction():
            connection.execute(sql["limit_waiting"], {"lock_timeout": f"{LOCK_SECONDS:g}s"})
            yield
    except psycopg.errors.LockNotAvailable as error:
        raise OperationRefused(
            f"Somebody has held a row of this consumer for {LOCK_SECONDS:g} s: a hung worker, or "
            "another operator. Nothing was changed; try again, or look in pg_stat_activity."
        ) from error


def lock(connection: Connection, sql: Queries, name: str) -> LockedConsumer:
    """Lock a consumer and its lanes, so that no batch of it commits until we do."""
    row = connection.execute(sql["lock_consumer"], {"consumer": name}).fetchone()
    if row is None:
        raise ConsumerUnknown(f"{name} is gone: somebody renamed or forgot it just now.")
    stream_name, start_position, lane_count, epoch = row
    lanes = connection.execute(
        sql["lock_lanes"], {"consumer": name, "stream_name": stream_name}
    ).fetchall()
    return LockedConsumer(
        name, stream_name, start_position, lane_count, epoch, tuple(Lane(*lane) for lane in lanes)
    )


def find_name(given: str, known: Sequence[str]) -> str:
    """The one full name that is meant. Raises ConsumerUnknown with the nearest ones."""
    if given in known:
        return given
    candidates = [name for name in known if name.partition(".")[2] == given]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise ConsumerUnknown(
            f"{given!r} is the name of several consumers: {', '.join(candidates)}. Nothing was "
            "changed; write one of these."
        )
    spellings = {name.partition(".")[2]: name for name in known} | {name: name for name in known}
    close = difflib.get_close_matches(given, list(spellings), n=1)
    advice = f"did you mean {spellings[close[0]]}?" if close else _listed(known)
    raise ConsumerUnknown(f"There is no consumer {given!r}; {advice}")


def _listed(known: Sequence[str]) -> str:
    if not known:
        return "this database has none yet. They register when they first run."
    return f"there are: {', '.join(known)}."


def require_no_replay(name: str, done: str) -> None:
    """Refuse what can be done only to consumers that live on."""
    if is_replay_name(name):
        raise OperationRefused(
            f"{name} is a replay and cannot be {done}. Nothing was changed; `penstock replay list` "
            "shows how far it is, and `penstock replay cancel` gives it up."
        )


def require_full_name(name: str) -> None:
    """Refuse a name that no code could register."""
    pipeline, dot, short = name.partition(".")
    if not dot or not pipeline or not short:
        raise UsageError(
            f"{name!r} is no full name. Write pipeline.consumer, for example shop.bill_order."
        )
    for part in (pipeline, short):
        ConsumerOptions(stream_name="any", name=part)
