"""Keeps the leases of a process alive from a thread of its own, whatever handlers do."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.leases import Lease
from penstock.core.settings import Settings
from penstock.errors import PenstockError
from penstock.stores.identity import new_token, owner_id
from penstock.stores.leases import LeaseTable
from penstock.stores.postgres import connect
from penstock.telemetry import signals
from penstock.telemetry.bus import emit


@dataclass(slots=True)
class _Held:
    lease: Lease
    deadline: float
    """In this process's monotonic time, taken before the request: never later than the truth."""


class LeaseKeeper:
    """Acquires leases and renews them at a third of their duration, on one shared connection."""

    def __init__(self, settings: Settings, worker_id: str | None = None) -> None:
        self._settings = settings
        self.worker_id = worker_id or new_token()
        self._table = LeaseTable(settings.schema)
        self._held: dict[tuple[str, str], _Held] = {}
        self._abandoned: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(
        self, connection: psycopg.Connection[Any], stream_name: str, role: str
    ) -> Lease | None:
        """Take a lease if it is free, ending what a former holder left open."""
        asked_at = time.monotonic()
        lease = self._table.acquire(
            connection,
            stream_name,
            role,
            owner_id=owner_id(role, stream_name, new_token()),
            worker_id=self.worker_id,
            lease_seconds=self._settings.lease_seconds,
            abandoned_owner_id=self._abandoned.get((stream_name, role)),
        )
        if lease is None:
            return None
        with self._lock:
            self._abandoned.pop((stream_name, role), None)
            self._held[stream_name, role] = _Held(lease, asked_at + self._settings.lease_seconds)
        self._ensure_thread()
        emit(signals.LeaseAcquired(stream_name, role, lease.owner_id, lease.term))
        ended = self._table.end_predecessor(connection, lease)
        if ended:
            emit(signals.PredecessorEnded(stream_name, role, ended))
        return lease

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
        with self._lock:
            was_held = self._held.pop((lease.stream_name, lease.role), None)
        if was_held is not None:
            emit(signals.LeaseLost(lease.stream_name, lease.role, lease.owner_id, reason))

    def abandon(self, lease: Lease, reason: str) -> None:
        """Stop renewing a lease that could not be given back, and remember it as our own."""
        with self._lock:
            self._abandoned[lease.stream_name, lease.role] = lease.owner_id
        self.forget(lease, reason)

    def release(self, connection: psycopg.Connection[Any], lease: Lease) -> None:
        """Give a lease back, so that a successor need not wait."""
        with self._lock:
            self._held.pop((lease.stream_name, lease.role), None)
        self._table.release(connection, lease)
        emit(signals.LeaseReleased(lease.stream_name, lease.role))

    def close(self) -> None:
        """Stop renewing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=self._settings.lease_renew_seconds)

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._renew_for_ever, name="penstock-leases", daemon=True
            )
            self._thread.start()

    def _renew_for_ever(self) -> None:
        connection: psycopg.Connection[Any] | None = None
        while not self._stop.wait(self._settings.lease_renew_seconds):
            try:
                if connection is None or connection.closed:
                    connection = connect(self._settings.database_url, "penstock leases")
                self._renew(connection)
            except (psycopg.Error, PenstockError):
                # The deadline of each lease decides; a server that comes back in time is no news.
                if connection is not None:
                    connection.close()
        if connection is not None:
            connection.close()

    def _renew(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            leases = [held.lease for held in self._held.values()]
        if not leases:
            return
        asked_at = time.monotonic()
        kept = self._table.renew(connection, leases, self._settings.lease_seconds)
        for lease in leases:
            if (lease.stream_name, lease.role) in kept:
                with self._lock:
                    held = self._held.get((lease.stream_name, lease.role))
                    if held is not None and held.lease.term == lease.term:
                        held.deadline = asked_at + self._settings.lease_seconds
            else:
                self.forget(lease, "it ended before it was renewed")
        emit(signals.LeaseRenewed(len(kept)))
