"""One stream's archive under a lease: planned, stored, recorded, listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.archive import (
    ArchivedObject,
    ArchivePlan,
    CutLimits,
    folder_of,
    object_name,
    range_of,
    superseded_name,
)
from penstock.core.leases import Lease
from penstock.errors import ArchiveConflict, ArchiveDamaged, LeaseLost
from penstock.pipeline.cutting import Cutter
from penstock.stores.archive import ArchiveTable
from penstock.stores.archive_manifest import write_manifest
from penstock.stores.archive_objects import PackedObject, as_stored, unpack
from penstock.stores.identity import new_token
from penstock.stores.key_copies import KeyCopies
from penstock.stores.objects import ObjectStore
from penstock.telemetry import signals
from penstock.telemetry.bus import emit


@dataclass(frozen=True, slots=True)
class Workbench:
    """What the archives of one process share."""

    connection: psycopg.Connection[Any]
    table: ArchiveTable
    store: ObjectStore
    cutter: Cutter
    limits: CutLimits
    keys: KeyCopies


class StreamArchive:
    """Adds objects to a stream's archive, one at a time.

    Every method may raise LeaseLost, and ServerUnavailable or ServerUnsuitable for the store: what
    was begun then is finished by the next call, or by a successor. PositionMissing, ArchiveConflict
    and ArchiveDamaged need a person.
    """

    def __init__(self, bench: Workbench, lease: Lease, is_held: Callable[[Lease], bool]) -> None:
        self.lease = lease
        self._bench = bench
        self._is_held = is_held
        self._is_opened = False
        self._plan: ArchivePlan | None = None
        self._packed: PackedObject | None = None
        self._measured = lease.checkpoint
        self._waiting_bytes = 0
        # Whoever died may have recorded an object without listing it.
        self.is_manifest_due = not lease.was_clean

    @property
    def stream_name(self) -> str:
        """Which stream it is."""
        return self.lease.stream_name

    def open(self) -> None:
        """Learn what a predecessor planned, and move aside what PostgreSQL has lost."""
        if self._is_opened:
            return
        self._plan = self._bench.table.planned(self._bench.connection, self.stream_name)
        for name in self._lost_objects():
            if not self._is_held(self.lease):
                raise LeaseLost(f"the lease on {self.stream_name} as archiver has run out")
            moved_to = superseded_name(self.stream_name, name, new_token())
            self._bench.store.move_aside(name, moved_to)
            self.is_manifest_due = True
            emit(signals.ObjectSuperseded(self.stream_name, name, moved_to))
        self._is_opened = True
        emit(signals.ArchiveOpened(self.stream_name, self.lease.checkpoint))

    def plan(self) -> bool:
        """Fix the next range if enough waits for it. Returns whether there is one to store."""
        if self._plan is None and self._is_due():
            packed = self._bench.cutter.cut(
                self._bench.connection, self.stream_name, self.lease.checkpoint
            )
            if packed is not None:
                self._bench.table.plan(self._bench.connection, self.lease, packed.plan)
                self._plan, self._packed = packed.plan, packed
                emit(signals.ObjectPlanned(self.stream_name, packed.plan.first, packed.plan.last))
        return self._plan is not None

    def store(self) -> int:
        """Store the planned object and record that. Returns how many events it holds."""
        plan, packed = self._plan, self._packed
        assert plan is not None, "it is planned first"
        if packed is None:
            packed = self._bench.cutter.cut_again(self._bench.connection, plan)
            self._packed = packed
        stored = packed.as_stored()
        self._require_place()
        if self._bench.store.put_if_absent(plan.name, packed.data):
            emit(signals.ObjectStored(self.stream_name, plan.name, stored.stored_bytes))
        else:
            stored = self._adopted(plan)
        self.lease = self._bench.table.archive(self._bench.connection, self.lease, stored)
        self._plan = self._packed = None
        self._measured, self._waiting_bytes = self.lease.checkpoint, 0
        self.is_manifest_due = True
        emit(signals.ObjectArchived(self.stream_name, plan.first, plan.last, plan.events))
        return plan.events

    def write_manifest(self) -> None:
        """List what is archived, for readers without the database."""
        self._require_place()
        # First the keys: whoever finds an object listed can also open what is in it.
        self._bench.keys.refresh(self._bench.connection, self.stream_name)
        listed: list[ArchivedObject] | None = None
        # Looked at again behind each write: who stood still before it has hidden what a successor
        # listed meanwhile, and nobody else might ever list it again.
        while (objects := self._objects()) != listed:
            write_manifest(self._bench.store, self.stream_name, objects)
            listed = objects
        self.is_manifest_due = False
        emit(signals.ManifestWritten(self.stream_name, len(objects)))

    def _require_place(self) -> None:
        # Right before a write: an empty mount point would take it.
        self._bench.table.require_in(self._bench.store, self._bench.connection)

    def _objects(self) -> list[ArchivedObject]:
        return self._bench.table.objects(self._bench.connection, self.stream_name)

    def drop_object(self) -> None:
        """Keep the plan and forget its bytes: they are made again when they are needed."""
        self._packed = None

    def _is_due(self) -> bool:
        limits = self._bench.limits
        waiting = self._bench.table.waiting(
            self._bench.connection, self.lease, self._measured, limits.count_max
        )
        self._measured = max(self._measured, waiting.head)
        self._waiting_bytes += waiting.new_bytes
        return limits.are_reached(
            count=waiting.head - self.lease.checkpoint,
            size_bytes=self._waiting_bytes,
            oldest_seconds=waiting.oldest_seconds,
        )

    def _lost_objects(self) -> list[str]:
        """What the store holds behind the checkpoint, but for the planned object."""
        after = self.lease.checkpoint
        planned = None if self._plan is None else self._plan.name
        beyond = object_name(self.stream_name, after, after)
        found = self._bench.store.names(folder_of(self.stream_name), beyond)
        ranges = {each.name: range_of(self.stream_name, each.name) for each in found}
        return sorted(
            name
            for name, covered in ranges.items()
            if covered is not None and covered[1] > after and name != planned
        )

    def _adopted(self, plan: ArchivePlan) -> ArchivedObject:
        """The object that is there already. Raises ArchiveConflict where it is another one."""
        data = self._bench.store.get(plan.name)
        try:
            if data is None:
                raise ArchiveDamaged("it is gone again")
            unpack(plan, data)
        except ArchiveDamaged as error:
            raise ArchiveConflict(
                f"{self._bench.store.url} holds another object as {plan.name} than the one that is "
                f"planned: {error} Neither was touched, nothing is pruned. Move the one in the "
                "store to another name; the archiver then stores the planned one."
            ) from None
        emit(signals.ObjectAdopted(self.stream_name, plan.name))
        return as_stored(plan, data)
