"""What happens to a stream's archive: opened, planned, stored, recorded."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class ArchiveBegun(Signal, level=Level.INFO):
    """A stream is archived from this position on, and pruned no further than that."""

    stream_name: str
    first: int


@dataclass(frozen=True, slots=True)
class ArchiveOpened(Signal):
    """The archiver goes on behind a position; whatever the store holds beyond was looked at."""

    stream_name: str
    after: int


@dataclass(frozen=True, slots=True)
class ObjectPlanned(Signal):
    """A range is fixed in PostgreSQL, durably; its object is not stored yet."""

    stream_name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ObjectStored(Signal):
    """The planned object is in the store; PostgreSQL has not recorded that yet."""

    stream_name: str
    name: str
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class ObjectAdopted(Signal, level=Level.INFO):
    """The planned object was in the store already, with the same content."""

    stream_name: str
    name: str


@dataclass(frozen=True, slots=True)
class ObjectArchived(Signal):
    """PostgreSQL has recorded an object and moved the checkpoint; the manifest comes next."""

    stream_name: str
    first: int
    last: int
    events: int


@dataclass(frozen=True, slots=True)
class ManifestWritten(Signal):
    """Readers without the database find everything that is archived."""

    stream_name: str
    objects: int


@dataclass(frozen=True, slots=True)
class ObjectSuperseded(Signal, level=Level.ERROR):
    """The store held an object that PostgreSQL has lost; it was moved aside, not deleted."""

    stream_name: str
    name: str
    moved_to: str


@dataclass(frozen=True, slots=True)
class ArchiveRefused(Signal, level=Level.ERROR):
    """A stream cannot be archived as things are; nothing of it is pruned meanwhile."""

    stream_name: str
    reason: str
