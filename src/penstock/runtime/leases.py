"""Keeps the leases of a process alive from a thread of its own, whatever handlers do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.leases import Lease
from penstock.core.settings import Settings
from penstock.errors import PenstockError
from penstock.stores.control_connection import ControlConnection
from penstock.stores.identity import new_token, owner_id
from penstock.stores.lanes import Lanes
from penstock.stores.leases import LeaseTable
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

# The last part of a lease in which nobody handles any more.
ENDING_PART = 0.1


@dataclass(slots=True)
class _Held:
    lease: Lease
    deadline: float
    """In this process's monotonic time, taken before the request: never later than the truth."""
    end: Callable[[], None] | None = None


class LeaseKeeper:
    """Acquires leases and renews them at a third of their duration, on one shared connection."""

    def __init__(self, settings: Settings, worker_id: str | None = None) -> None:
        self._settings = settings
        self._granted_seconds = settings.lease_granted_seconds
        self._worker_id = worker_id or new_token()
        self._table = LeaseTable(settings.schema)
        self._lanes = Lanes(settings.schema)
        self.control = ControlConnection(
            settings.database_url,
            "penstock control",
            statement_seconds=settings.lease_renew_seconds,
        )
        self._joined: set[str] = set()
        self._held: dict[tuple[str, str], _Held] = {}
        self._abandoned: dict[tuple[str, str], set[str]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failure: BaseException | None = None
        """Why leases are not kept any more; a bug."""

    @property
    def worker_id(self) -> str:
        """The name of this process in the books."""
        return self._worker_id

    def acquire(
        self,
        connection: psycopg.Connection[Any],
        stream_name: str,
        role: str,
        former_groups: Sequence[str] = (),
    ) -> Lease | None:
        """Take a lease if it is free, ending what a former holder left open."""
        asked_at = time.monotonic()
        owner = owner_id(role, stream_name, new_token())
        with self._lock:
            abandoned = self._abandoned.setdefault((stream_name, role), set())
            formerly_ours = list(abandoned)
            # Until the answer is here: it may be granted, and the answer lost.
            abandoned.add(owner)
        lease = self._table.acquire(
            connection,
            stream_name,
            role,
            owner_id=owner,
            worker_id=self._worker_id,
            lease_seconds=self._granted_seconds,
            abandoned_owner_ids=formerly_ours,
        )
        with self._lock:
            abandoned.discard(owner)
            if lease is None:
                return None
            abandoned.clear()
            self._held[stream_name, role] = _Held(lease, asked_at + self._granted_seconds)
        self._ensure_thread()
        emit(signals.LeaseAcquired(stream_name, role, lease.owner_id, lease.term))
        try:
            ended = self._table.end_predecessor(connection, lease, former_groups)
        except BaseException as error:
            # Nobody will know of this lease: it must not be renewed for ever.
            self.abandon(lease, str(error).strip())
            raise
        if ended:
            emit(signals.PredecessorEnded(stream_name, role, ended))
        return lease

    def guard(self, lease: Lease, end: Callable[[], None]) -> None:
        """Have `end` called shortly before the lease runs out, if it cannot be renewed."""
        with self._lock:
            held = self._held.get((lease.stream_name, lease.role))
            if held is not None and held.lease.term == lease.term:
                held.end = end

    def note(self, lease: Lease) -> None:
        """Remember a checkpoint that was committed: the database must never be behind it."""
        with self._lock:
            held = self._held.get((lease.stream_name, lease.role))
            if held is not None and held.lease.term == lease.term:
                held.lease = lease

    def is_held(self, lease: Lease) -> bool:
        """Whether the lease is known to run on, without asking anybody."""
        with self._lock:
            held = self._held.get((lease.stream_name, lease.role))
        return (
            held is not None and held.lease.term == lease.term and time.monotonic() < held.deadline
        )

    def read(self, connection: psycopg.Connection[Any], lease: Lease) -> Lease | None:
        """The lease with its checkpoint as the database has it; None where it is lost."""
        current = self._table.read(connection, lease)
        if current is None:
            self.forget(lease, "another worker holds it")
        return current

    def forget(self, lease: Lease, reason: str) -> None:
        """Stop renewing a lease that is lost."""
        key = (lease.stream_name, lease.role)
        with self._lock:
            held = self._held.get(key)
            was_held = held is not None and held.lease.term == lease.term
            if was_held:
                del self._held[key]
        if was_held:
            emit(signals.LeaseLost(lease.stream_name, lease.role, lease.owner_id, reason))

    def abandon(self, lease: Lease, reason: str) -> None:
        """Stop renewing a lease that could not be given back, and remember it as our own."""
        with self._lock:
            key = (lease.stream_name, lease.role)
            self._abandoned.setdefault(key, set()).add(lease.owner_id)
        self.forget(lease, reason)

    def release(
        self, connection: psycopg.Connection[Any], lease: Lease, *, term_seen: int = 0
    ) -> None:
        """Give a lease back, so that a successor need not wait; it gets a term past all seen."""
        with self._lock:
            self._held.pop((lease.stream_name, lease.role), None)
        self._table.release(connection, lease, term_seen=term_seen)
        emit(signals.LeaseReleased(lease.stream_name, lease.role))

    def join(self, connection: psycopg.Connection[Any], consumer: str) -> None:
        """Take a share of a consumer's lanes from now on."""
        self._lanes.join(connection, consumer, self._worker_id, self._granted_seconds)
        self._joined.add(consumer)
        self._ensure_thread()

    def leave(self, connection: psycopg.Connection[Any], consumer: str) -> None:
        """Leave a consumer's lanes to the other workers."""
        self._joined.discard(consumer)
        self._lanes.leave(connection, consumer, self._worker_id)

    def close(self) -> None:
        """Stop renewing."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._settings.lease_renew_seconds)
        self.control.close()

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._threads:
                return
            self._threads = [
                threading.Thread(
                    target=self._or_fail, args=(work,), name=f"penstock-{name}", daemon=True
                )
                for name, work in (
                    ("leases", self._renew_for_ever),
                    ("lease-ends", self._end_in_time),
                )
            ]
        for thread in self._threads:
            thread.start()

    def _or_fail(self, work: Callable[[], None]) -> None:
        """A process whose leases nobody keeps any more must not go on: whoever runs it looks."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the process's main thread
            self.failure = error

    def _end_in_time(self) -> None:
        """What cannot be renewed is ended while it is still ours.

        On a thread of its own: a renewal may hang in a network that swallows everything.
        """
        while not self._stop.wait(self._granted_seconds * ENDING_PART / 4):
            self._end_what_runs_out()

    def _end_what_runs_out(self) -> None:
        soon = time.monotonic() + self._granted_seconds * ENDING_PART
        with self._lock:
            ending = [held for held in self._held.values() if held.end and held.deadline < soon]
            ends = [(held.lease, held.end) for held in ending]
            for held in ending:
                held.end = None
        for lease, end in ends:
            assert end is not None
            end()
            # A renewal may be under way that arrives in time after all: it is ours to take then.
            self.abandon(lease, "it could not be renewed in time")

    def _renew_for_ever(self) -> None:
        while not self._stop.wait(self._settings.lease_renew_seconds):
            try:
                self._renew(self.control.get())
            except (psycopg.Error, PenstockError):
                # The deadline of each lease decides; a server that comes back in time is no news.
                continue

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            leases = [held.lease for held in self._held.values()]
        if self._joined:
            self._lanes.stay(connection, self._worker_id, self._granted_seconds)
        if not leases:
            return
        asked_at = time.monotonic()
        kept = self._table.renew(connection, leases, self._granted_seconds)
        for lease in leases:
            checkpoint = kept.get((lease.stream_name, lease.role))
            if checkpoint is None:
                self.forget(lease, "it ended before it was renewed")
            elif checkpoint < lease.checkpoint:
                # Whoever goes on from what it remembers would leave out what was taken back.
                self.abandon(lease, "PostgreSQL lost commits: its checkpoint went back")
            else:
                with self._lock:
                    held = self._held.get((lease.stream_name, lease.role))
                    if held is not None and held.lease.term == lease.term:
                        held.deadline = asked_at + self._granted_seconds
        emit(signals.LeaseRenewed(len(kept)))
