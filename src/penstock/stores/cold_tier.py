"""The cold tier as a reader sees it: what PostgreSQL no longer holds, from archived objects."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import psycopg

from penstock.core.archive import ArchivedObject
from penstock.core.settings import Settings
from penstock.core.wire import sent_us_of
from penstock.errors import ArchiveDamaged
from penstock.stores.archive import ArchiveTable
from penstock.stores.archive_manifest import ManifestCatalogue
from penstock.stores.archive_objects import UnpackedObject, load
from penstock.stores.objects import ObjectStore, open_store

# One that is read, and one that another lane of the same consumer has begun.
OBJECTS_KEPT = 2
T = TypeVar("T")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class ColdTier(Protocol):
    """One stream's archived objects.

    Every method may raise ServerUnavailable (the store is away: wait and ask again) and
    ArchiveDamaged (an object is not what was archived: nothing of it is ever given out).
    """

    def bounds(self) -> tuple[int, int] | None:
        """The first and the last archived position, holes included; None: nothing is archived."""

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Positions and bodies behind `after`, in order, holes among them, as the warm tier's.

        Fewer than `count` come where an object ends; none, where the archive ends before.
        """

    def position_at(self, moment: datetime) -> int | None:
        """The first archived event sent at or after a moment; None where there is none."""

    def close(self) -> None:
        """Let go of what was read, for whoever needs it no more for now; must not raise."""


class Catalogue(Protocol):
    """Which objects there are, according to whoever knows."""

    def bounds(self) -> tuple[int, int] | None:
        """The first and the last archived position."""

    def behind(self, after: int) -> ArchivedObject | None:
        """The object that holds the next position behind `after`, or the first one after it."""

    def since(self, moment_us: int) -> ArchivedObject | None:
        """The first object with an event sent at or after a moment."""

    def refresh(self) -> None:
        """Trust nothing that is remembered."""


def own_cold_tier(
    settings: Settings, stream_name: str, control: Callable[[], psycopg.Connection[Any]]
) -> ColdTier | None:
    """The archive of a stream of this database, as its table has it; None without archive_url."""
    if settings.archive_url is None:
        return None
    catalogue = _TableCatalogue(ArchiveTable(settings.schema), stream_name, control)
    # Opened when an object is needed: consumers that need none run whatever becomes of the store.
    return ArchivedStream(partial(open_store, settings.archive_url), catalogue)


def source_cold_tier(archive_url: str, stream_name: str) -> ColdTier:
    """The archive of another service's stream, as its manifest.json has it."""
    store = open_store(archive_url)
    return ArchivedStream(lambda: store, ManifestCatalogue(store, stream_name))


class ArchivedStream:
    """Reads objects one after the other; lanes of one process share what they have unpacked."""

    def __init__(self, open_store: Callable[[], ObjectStore], catalogue: Catalogue) -> None:
        self._open_store = open_store
        self._store: ObjectStore | None = None
        self._catalogue = catalogue
        self._kept: OrderedDict[str, UnpackedObject] = OrderedDict()

    def bounds(self) -> tuple[int, int] | None:
        """As the catalogue has them."""
        return self._catalogue.bounds()

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Out of one object."""
        return self._from_object(
            lambda: self._catalogue.behind(after), lambda found: found.read(after, count), []
        )

    def position_at(self, moment: datetime) -> int | None:
        """By looking through one object: the catalogue knows the latest event of each."""
        moment_us = (moment - _EPOCH) // timedelta(microseconds=1)

        def first_since(found: UnpackedObject) -> int | None:
            rows = found.read(0, len(found.lines))
            return next((row[0] for row in rows if sent_us_of(row[1]) >= moment_us), None)

        return self._from_object(lambda: self._catalogue.since(moment_us), first_since, None)

    def close(self) -> None:
        """What other lanes still read stays with them."""
        self._kept.clear()

    def _from_object(
        self,
        find: Callable[[], ArchivedObject | None],
        use: Callable[[UnpackedObject], T],
        otherwise: T,
    ) -> T:
        wanted = find()
        if wanted is None:
            return otherwise
        try:
            return use(self._unpacked(wanted))
        except ArchiveDamaged:
            # The catalogue may have been rewritten, after a failover that lost what it named.
            self._catalogue.refresh()
            renewed = find()
            if renewed == wanted:
                raise
        return otherwise if renewed is None else use(self._unpacked(renewed))

    def _unpacked(self, wanted: ArchivedObject) -> UnpackedObject:
        found = self._kept.get(wanted.content_sha256)
        if found is None:
            self._store = self._store or self._open_store()
            found = _shared(self._store, wanted)
            self._kept[wanted.content_sha256] = found
        self._kept.move_to_end(wanted.content_sha256)
        while len(self._kept) > OBJECTS_KEPT:
            self._kept.popitem(last=False)
        return found


# Held by those who read them, and by nobody else.
_unpacked: WeakValueDictionary[tuple[str, str, str], UnpackedObject] = WeakValueDictionary()
_locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


def _shared(store: ObjectStore, wanted: ArchivedObject) -> UnpackedObject:
    """An object that some lane of this process has unpacked, or that is fetched once for all."""
    key = (store.url, wanted.name, wanted.content_sha256)
    with _locks[store.url]:
        found = _unpacked.get(key)
        if found is None:
            found = load(store, wanted)
            _unpacked[key] = found
        return found


class _TableCatalogue:
    """This database's own table."""

    def __init__(
        self,
        table: ArchiveTable,
        stream_name: str,
        control: Callable[[], psycopg.Connection[Any]],
    ) -> None:
        self._table = table
        self._stream_name = stream_name
        self._control = control

    def bounds(self) -> tuple[int, int] | None:
        return self._table.bounds(self._control(), self._stream_name)

    def behind(self, after: int) -> ArchivedObject | None:
        return self._table.behind(self._control(), self._stream_name, after)

    def since(self, moment_us: int) -> ArchivedObject | None:
        return self._table.since(self._control(), self._stream_name, moment_us)

    def refresh(self) -> None:
        """Nothing is remembered."""
