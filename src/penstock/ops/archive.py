"""What operators do with an archive: see it, prove it, read from it, give it up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.archive import ArchivedObject, ArchivePlan, folder_of, range_of
from penstock.core.archive_audit import (
    chain_faults,
    content_faults,
    key_faults,
    listing_faults,
    manifest_faults,
)
from penstock.core.archive_lines import position_of
from penstock.core.settings import Settings
from penstock.core.wire import Entry, decode_record
from penstock.core.wrapped_keys import decode_keys
from penstock.errors import (
    ArchiveDamaged,
    MalformedEntry,
    OperationRefused,
    SettingsError,
    UsageError,
)
from penstock.stores.archive import ArchiveTable
from penstock.stores.archive_manifest import read_manifest
from penstock.stores.archive_objects import load, unpack
from penstock.stores.data_keys import DataKeys
from penstock.stores.key_copies import ArchiveShelf
from penstock.stores.mac_keys import keys_for
from penstock.stores.objects import ObjectStore, open_store

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class StreamArchiveState:
    """One stream's archive as the books have it."""

    stream_name: str
    checkpoint: int
    head: int
    objects: tuple[ArchivedObject, ...]

    @property
    def waiting(self) -> int:
        """How many positions are not archived yet."""
        return max(0, self.head - self.checkpoint)


@dataclass(frozen=True, slots=True)
class ArchiveFinding:
    """Something about an archive that is not as it should be."""

    stream_name: str
    what: str

    def __str__(self) -> str:
        return f"{self.stream_name}: {self.what}"


@dataclass(frozen=True, slots=True)
class ArchiveProof:
    """How much of a stream's archive was looked at, and what was wrong with it."""

    stream_name: str
    objects: int
    events: int
    first: int | None
    last: int | None
    findings: tuple[ArchiveFinding, ...]


OnStep = Callable[[str, int, int], None]
"""Told after every object: the stream, how many are done, of how many."""


def store_of(settings: Settings) -> ObjectStore:
    """The store that the settings name. Raises SettingsError where they name none."""
    if settings.archive_url is None:
        raise SettingsError(
            "There is no archive: archive_url is not set. Set PENSTOCK_ARCHIVE_URL=s3://bucket/"
            "prefix, or the path of a folder."
        )
    return open_store(settings.archive_url)


def read_archives(
    connection: Connection, settings: Settings, stream_name: str | None = None
) -> list[StreamArchiveState]:
    """Every stream that is archived, or the one that is named. Raises UsageError without one."""
    table = ArchiveTable(settings.schema)
    found = [
        StreamArchiveState(
            progress.stream_name,
            progress.checkpoint,
            progress.head,
            # What is archived in this moment is left for the next look.
            tuple(
                known
                for known in table.objects(connection, progress.stream_name)
                if known.last <= progress.checkpoint
            ),
        )
        for progress in table.streams(connection)
        if stream_name in (None, progress.stream_name)
    ]
    if stream_name is not None and not found:
        raise UsageError(f"{stream_name!r} is not archived, or there is no such stream.")
    return found


# ── proving ────────────────────────────────────────────────────────────────────────────────────


def verify_archive(
    connection: Connection,
    settings: Settings,
    archive: StreamArchiveState,
    on_step: OnStep = lambda _stream_name, _done, _total: None,
) -> ArchiveProof:
    """Read every object of a stream and compare it with the books. Changes nothing.

    Raises ServerUnavailable where the store is away: then nothing is proved or refuted.
    """
    store = store_of(settings)
    faults = chain_faults(archive.objects, archive.checkpoint)
    faults += _store_faults(connection, settings, store, archive)
    used: set[str] = set()
    for done, known in enumerate(archive.objects, 1):
        faults += _object_faults(store, known, used)
        on_step(archive.stream_name, done, len(archive.objects))
    faults += _key_faults(connection, settings, store, archive.stream_name, used)
    return ArchiveProof(
        archive.stream_name,
        len(archive.objects),
        sum(known.events for known in archive.objects),
        archive.objects[0].first if archive.objects else None,
        archive.objects[-1].last if archive.objects else None,
        tuple(ArchiveFinding(archive.stream_name, fault) for fault in faults),
    )


def _store_faults(
    connection: Connection, settings: Settings, store: ObjectStore, archive: StreamArchiveState
) -> list[str]:
    """What the store's list and the manifest say, against the books as they were read before."""
    table = ArchiveTable(settings.schema)
    listed = {
        found.name: found.stored_bytes
        for found in store.names(folder_of(archive.stream_name))
        if range_of(archive.stream_name, found.name) is not None
    }
    # What was archived since the books were read is no stray.
    later = table.objects(connection, archive.stream_name)[len(archive.objects) :]
    for known in later:
        listed.pop(known.name, None)
    planned = table.planned(connection, archive.stream_name)
    faults = listing_faults(archive.objects, listed, planned)
    try:
        manifest = read_manifest(store, archive.stream_name)
    except ArchiveDamaged as error:
        return [*faults, str(error)]
    return faults + manifest_faults(archive.objects, manifest[: len(archive.objects)])


def _key_faults(
    connection: Connection,
    settings: Settings,
    store: ObjectStore,
    stream_name: str,
    used: Collection[str],
) -> list[str]:
    """Whether services without this database can open what is archived."""
    keys = DataKeys(settings.schema).read(connection, stream_name)
    if not keys:
        return []
    shelf = ArchiveShelf(store)
    copy = shelf.read_keys(stream_name)
    faults = [
        f"{left} is left of a copy of the data keys, and may hold one that was shredded: the "
        "archiver removes it within a minute"
        for left in shelf.leftovers(stream_name)
    ]
    try:
        mac_keys = keys_for(settings, connection)
        copied = [] if copy is None else decode_keys(stream_name, copy, mac_keys)
    except MalformedEntry as error:
        return [*faults, f"keys.json: {error}"]
    return faults + key_faults(used, keys, copied)


def _object_faults(store: ObjectStore, known: ArchivedObject, used: set[str]) -> list[str]:
    """What is wrong with an object; the ids of the data keys in it are added to `used`."""
    data = store.get(known.name)
    if data is None:
        # The store's list has told so.
        return []
    faults = []
    if hashlib.sha256(data).hexdigest() != known.sha256:
        faults.append(f"{known.name}: what is stored has another checksum")
    try:
        rows = unpack(known, data).read(0, known.last)
        records = [decode_record(known.stream_name, at, body.encode()) for at, body in rows]
    except ArchiveDamaged as error:
        return [*faults, str(error)]
    except MalformedEntry as error:
        return [*faults, f"{known.name}: {error}"]
    used.update(record.key_id for record in records if isinstance(record, Entry) and record.key_id)
    return faults + content_faults(known, records)


# ── reading ────────────────────────────────────────────────────────────────────────────────────


def read_lines(
    connection: Connection, settings: Settings, stream_name: str, first: int, last: int
) -> Iterator[str]:
    """The lines of a range, in order, holes among them. Raises OperationRefused at what lacks."""
    store, table = store_of(settings), ArchiveTable(settings.schema)
    after = first - 1
    while after < last:
        known = table.behind(connection, stream_name, after)
        if known is None or known.first > after + 1:
            raise OperationRefused(
                f"{stream_name}/{after + 1} is not archived. `penstock archive list` shows what is."
            )
        yield from _lines(store, known, after, last)
        after = known.last


def _lines(store: ObjectStore, known: ArchivePlan, after: int, last: int) -> Iterator[str]:
    unpacked = load(store, known)
    for line in unpacked.lines[unpacked.index_behind(after) :]:
        yield line.decode()
        # A hole stands at its last position, which may lie behind what was asked for.
        if position_of(line) >= last:
            return


# ── giving up ──────────────────────────────────────────────────────────────────────────────────


def forget_archiver(connection: Connection, settings: Settings, stream_name: str) -> int:
    """Let pruning of a stream wait for the archiver no longer; what is archived stays readable.

    Returns up to where it is archived. Raises OperationRefused while archiving is going on.
    """
    if settings.archive_url is not None:
        raise OperationRefused(
            "archive_url is set, so the archiver would enter itself again at once. Nothing was "
            "changed; remove the setting first, on all hosts."
        )
    read_archives(connection, settings, stream_name)
    checkpoint = ArchiveTable(settings.schema).forget(connection, stream_name)
    if checkpoint is None:
        raise OperationRefused(
            f"An archiver holds the lease on {stream_name} just now. Nothing was changed; stop it, "
            "and try again."
        )
    return checkpoint
