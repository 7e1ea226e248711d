"""A stream's manifest in the store: what is archived, for readers without the database."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence

from penstock.core.archive import (
    ArchivedObject,
    manifest_json,
    manifest_name,
    parse_manifest,
)
from penstock.stores.objects import ObjectStore

# How soon a reader at the end of what it knows looks whether more was archived.
LOOK_SECONDS = 1.0


def write_manifest(store: ObjectStore, stream_name: str, objects: Sequence[ArchivedObject]) -> None:
    """Let readers find these, and nothing else. May raise ServerUnavailable."""
    store.put(manifest_name(stream_name), manifest_json(stream_name, objects))


def read_manifest(store: ObjectStore, stream_name: str) -> list[ArchivedObject]:
    """What the manifest lists; nothing where there is none. Raises ArchiveDamaged."""
    raw = store.get(manifest_name(stream_name))
    return [] if raw is None else parse_manifest(stream_name, raw)


class ManifestCatalogue:
    """The objects of a stream as its manifest lists them, looked at again when they are used up."""

    def __init__(self, store: ObjectStore, stream_name: str) -> None:
        self._store = store
        self._stream_name = stream_name
        self._objects: list[ArchivedObject] = []
        self._looked_at = float("-inf")

    def bounds(self) -> tuple[int, int] | None:
        """The first and the last archived position."""
        objects = self._present()
        return (objects[0].first, objects[-1].last) if objects else None

    def behind(self, after: int) -> ArchivedObject | None:
        """The object that holds the next position behind `after`, or the first one after it."""
        if not self._objects or self._objects[-1].last <= after:
            self._present()
        index = bisect_right(self._objects, after, key=lambda found: found.last)
        return self._objects[index] if index < len(self._objects) else None

    def since(self, moment_us: int) -> ArchivedObject | None:
        """The first object with an event sent at or after a moment."""
        return next((found for found in self._present() if found.newest_us >= moment_us), None)

    def refresh(self) -> None:
        """Look again, however short ago the last look was."""
        self._looked_at = float("-inf")
        self._present()

    def _present(self) -> list[ArchivedObject]:
        if time.monotonic() - self._looked_at >= LOOK_SECONDS:
            self._objects = read_manifest(self._store, self._stream_name)
            self._looked_at = time.monotonic()
        return self._objects
