"""Parked events: a lane's owner parks them, tries them again when they are due, or buries them."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from penstock.core.forensics import Forensics
from penstock.core.isolation import Batch
from penstock.core.lanes import key_hash
from penstock.core.leases import Lease
from penstock.core.verdict import Reason
from penstock.core.wire import Entry, body_of, decode_body
from penstock.stores.inbox import SEAL_ID_BITS, Claim, array
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.worker_connection import WorkerConnection

Connection = psycopg.Connection[Any]


class ParkedRow(NamedTuple):
    """One parked event that may be tried now."""

    entry: Entry
    attempts: int
    """How often its handler was called for it."""
    setbacks: int
    """How often it was set aside, also without a call."""
    is_redriven: bool

    @property
    def is_alone(self) -> bool:
        """Whether it failed since it was parked, so that nothing is tried together with it."""
        return self.attempts > 0 or (self.setbacks > 0 and not self.is_redriven)


class Look(NamedTuple):
    """What is parked of a lane, at one moment."""

    has_any: bool
    keys: frozenset[int] | None
    """The hashes of the keys; None: they are too many."""
    due_seconds: float | None


@dataclass(frozen=True, slots=True)
class Setback:
    """Why it is set aside, and when to try again; None: not before somebody says so."""

    attempts: int
    """How often its handler was called by now."""
    error: str
    delay_seconds: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Letter:
    """What a dead letter says beside its event."""

    reason: Reason = "exhausted"
    forensics: Forensics
    error: str
    """The last attempt's error in one line."""
    handler: str
    starts: list[dict[str, Any]] | None = None
    """The attempts, where they ended their processes."""


class Queue(NamedTuple):
    """What parked events wait behind: its position (0: nothing), how many did, and do more now."""

    behind: int
    waiting: int
    added: int

    @property
    def length(self) -> int:
        """How many wait now."""
        return self.waiting + self.added


class Parked:
    """The tables `parked_event` and `dead_letter` as a worker writes them."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("parked.sql", schema)

    def look(
        self, connection: Connection, consumer: str, *, lane: int, lanes: int, keys_max: int
    ) -> Look:
        """What a lane has parked."""
        row = connection.execute(
            self._sql["look"],
            {"consumer": consumer, "lane": lane, "lanes": lanes, "keys_max": keys_max},
        ).fetchone()
        assert row is not None
        has_any, keys, due_seconds = row
        return Look(
            has_any, None if has_any and keys is None else frozenset(keys or ()), due_seconds
        )

    def due(
        self,
        connection: Connection,
        consumer: str,
        stream_name: str,
        *,
        lane: int,
        lanes: int,
        count: int,
        in_order: bool,
    ) -> list[ParkedRow]:
        """What may be tried now, in the order of positions."""
        rows = connection.execute(
            self._sql["due"],
            {
                "consumer": consumer,
                "lane": lane,
                "lanes": lanes,
                "count": count,
                "in_order": in_order,
            },
        )
        return [
            ParkedRow(decode_body(stream_name, position, body.encode()), *rest)
            for position, body, *rest in rows
        ]

    def still_there(
        self, connection: Connection, consumer: str, batch: Batch, *, in_order: bool
    ) -> frozenset[int]:
        """Which of a batch are still parked, and wait behind nothing that is not part of it."""
        rows = connection.execute(
            self._sql["still_there"],
            {
                "consumer": consumer,
                "positions": _positions(batch.entries),
                "in_order": in_order,
            },
        )
        return frozenset(position for (position,) in rows)

    def put_off(self, connection: Connection, consumer: str, batch: Batch, seconds: float) -> None:
        """A batch is due later, and that was no attempt."""
        connection.execute(
            self._sql["put_off"],
            {"consumer": consumer, "positions": _positions(batch.entries), "seconds": seconds},
        )

    def let_overtake(self, connection: Connection, consumer: str) -> None:
        """From now on nothing waits behind another."""
        connection.execute(self._sql["let_overtake"], {"consumer": consumer})

    # ── in the worker's transaction ───────────────────────────────────────────────────────────

    def claim(
        self,
        worker: WorkerConnection,
        consumer: str,
        lease: Lease,
        batch: Batch,
        *,
        in_order: bool,
    ) -> Claim:
        """Begin the transaction of a parked batch, with its rows in hand.

        `in_order`: without those that wait behind a row of their key which is not in hand.
        """
        seal_id = secrets.randbits(SEAL_ID_BITS)
        worker.begin(
            self._sql["claim"],
            {
                "seal_id": seal_id,
                "consumer": consumer,
                "stream_name": lease.stream_name,
                "role": lease.role,
                "epoch_group": lease.epoch_group,
                "positions": _positions(batch.entries),
                "in_order": in_order,
            },
        )
        row = worker.first_row()
        assert row is not None
        return Claim(seal_id, frozenset(row[0]))

    def settle(
        self, worker: WorkerConnection, consumer: str, entries: Sequence[Entry], outcome: str
    ) -> None:
        """These are parked no longer; the next of each key is due."""
        if entries:
            worker.execute(
                self._sql["settle"],
                {"consumer": consumer, "positions": _positions(entries), "outcome": outcome},
            )

    def park(
        self,
        worker: WorkerConnection,
        consumer: str,
        entries: Sequence[Entry],
        setback: Setback | None = None,
    ) -> list[Queue]:
        """Park a failed event, or events that wait behind one."""
        rows = worker.fetch(
            self._sql["park"],
            {
                "consumer": consumer,
                "stream_name": entries[0].stream_name,
                "positions": _positions(entries),
                "event_uuids": array(entry.event_uuid for entry in entries),
                "key_hashes": array(str(_hash(entry)) for entry in entries),
                "entries": [body_of(entry).decode() for entry in entries],
                **_setback(setback),
            },
        )
        return [Queue(*row) for row in rows]

    def postpone(
        self, worker: WorkerConnection, consumer: str, position: int, setback: Setback
    ) -> None:
        """A parked event failed again."""
        worker.execute(
            self._sql["postpone"],
            {"consumer": consumer, "position": position, **_setback(setback)},
        )

    def bury(self, worker: WorkerConnection, consumer: str, entry: Entry, letter: Letter) -> None:
        """Write the dead letter."""
        forensics = letter.forensics
        worker.execute(
            self._sql["bury"],
            {
                "consumer": consumer,
                "stream_name": entry.stream_name,
                "position": entry.position,
                "event_uuid": entry.event_uuid,
                "event_type": entry.event_type,
                "version": entry.version,
                "key_hash": _hash(entry),
                "entry": body_of(entry).decode(),
                "reason": letter.reason,
                "error_type": forensics.error_type,
                "error_message": forensics.error_message,
                "traceback": forensics.traceback,
                "fingerprint": forensics.fingerprint,
                "handler": letter.handler,
                "error": letter.error,
                "starts": None if letter.starts is None else json.dumps(letter.starts),
                "host": socket.gethostname(),
            },
        )

    def remove(self, worker: WorkerConnection, consumer: str, position: int) -> None:
        """A parked event is a dead letter from now on, and its key goes on."""
        worker.execute(self._sql["remove"], {"consumer": consumer, "position": position})

    def begin_letter(self, worker: WorkerConnection, consumer: str, entry: Entry) -> str | None:
        """Begin a transaction on a settled event. Returns its outcome; None: it is not settled."""
        worker.begin(
            self._sql["begin_letter"], {"consumer": consumer, "event_uuid": entry.event_uuid}
        )
        row = worker.first_row()
        assert row is not None
        outcome: str | None = row[0]
        return outcome

    def declare_dead(self, worker: WorkerConnection, consumer: str, entry: Entry) -> None:
        """An event that was settled before its attempt is a dead letter after all. Commits."""
        worker.commit_after(
            (self._sql["declare_dead"], {"consumer": consumer, "event_uuid": entry.event_uuid})
        )


def _hash(entry: Entry) -> int:
    return key_hash(entry.key, entry.event_uuid)


def _positions(entries: Sequence[Entry]) -> str:
    return array(str(entry.position) for entry in entries)


def _setback(setback: Setback | None) -> dict[str, Any]:
    if setback is None:
        return {"attempts": 0, "delay_seconds": None, "held": False, "error": None, "host": None}
    return {
        "attempts": setback.attempts,
        "delay_seconds": setback.delay_seconds,
        "held": setback.delay_seconds is None,
        "error": setback.error,
        "host": socket.gethostname(),
    }
