"""Copies of a stream's wrapped keys beside its events, so that other services need KMS rights only.

One lies in Redis beside the hot log, one in the object store beside the archive. Each is written
as a whole from what the database has: a shredded key is gone from it, and named as shredded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import psycopg

from penstock.core.archive import folder_of
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.wrapped_keys import WrappedKey, decode_keys, encode_keys
from penstock.errors import (
    KeyUnavailable,
    MalformedEntry,
    ServerUnavailable,
    ServerUnsuitable,
)
from penstock.stores.data_keys import DataKeys
from penstock.stores.mac_keys import keys_for
from penstock.stores.objects import ObjectStore, WriteSwept
from penstock.stores.outage import Outage
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

Connection = psycopg.Connection[Any]


@runtime_checkable
class KeyShelf(Protocol):
    """Where copies lie. May raise ServerUnavailable or ServerUnsuitable."""

    def read_keys(self, stream_name: str) -> bytes | None:
        """The copy of a stream's keys; None where there is none."""

    def write_keys(self, stream_name: str, copy: bytes) -> None:
        """Put a copy in the place of the one that is there."""


class ArchiveShelf:
    """Beside the archived objects: `{stream}/keys.json`."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def read_keys(self, stream_name: str) -> bytes | None:
        """The copy of a stream's keys; None where there is none."""
        return self._store.get(_name_of(stream_name))

    def write_keys(self, stream_name: str, copy: bytes) -> None:
        """Put a copy in the place of the one that is there."""
        self._store.put(_name_of(stream_name), copy)

    def leftovers(self, stream_name: str) -> list[str]:
        """Files that a killed writer has left of a copy; they may hold keys that were shredded."""
        return self._store.leftovers(_name_of(stream_name))

    def remove_leftovers(self, stream_name: str) -> None:
        """Remove those."""
        self._store.remove_leftovers(_name_of(stream_name))

    @property
    def answers_at_once(self) -> bool:
        """Whether trouble with one copy says nothing of others, and costs no time."""
        return self._store.is_directory


class KeyCopies:
    """Makes the copies on one shelf what the database has."""

    def __init__(self, settings: Settings, shelf: KeyShelf, worker: str) -> None:
        self._settings = settings
        self._shelf = shelf
        self._worker = worker
        self._data_keys = DataKeys(settings.schema)
        self._troubles: dict[str, Outage] = {}

    def refresh(self, connection: Connection, stream_name: str) -> None:
        """Write a stream's copy anew where it differs; without keys there is none.

        Raises ServerUnavailable or ServerUnsuitable; then say it again.
        """
        if keys := self._data_keys.read(connection, stream_name):
            mac_keys = keys_for(self._settings, connection)
            self._renew(connection, stream_name, keys, mac_keys)

    def refresh_all(
        self,
        connection: Connection,
        stream_names: Collection[str],
        mac_keys: MacKeys | None = None,
    ) -> None:
        """The same for many. Trouble with one copy is told once, and holds up no other.

        Raises ServerUnavailable where a server is away: it would be waited for again for each.
        """
        held = self._data_keys.read_all(connection)
        for stream_name in held.keys() & set(stream_names):
            mac_keys = mac_keys or keys_for(self._settings, connection)
            trouble = self._troubles.setdefault(
                stream_name, Outage(self._worker, f"the copy of the data keys of {stream_name}")
            )
            try:
                self._renew(connection, stream_name, held[stream_name], mac_keys)
            except (ServerUnavailable, ServerUnsuitable) as error:
                if isinstance(error, ServerUnavailable) and not self._answers_at_once:
                    raise
                trouble.begin(error)
            else:
                trouble.end()

    @property
    def _answers_at_once(self) -> bool:
        return isinstance(self._shelf, ArchiveShelf) and self._shelf.answers_at_once

    def _renew(
        self,
        connection: Connection,
        stream_name: str,
        keys: Sequence[WrappedKey],
        mac_keys: MacKeys,
    ) -> None:
        found = self._shelf.read_keys(stream_name)
        while found != encode_keys(stream_name, keys, mac_keys):
            # Asked again before each write and behind it: who stood still in between has
            # brought back what was shredded meanwhile, and hidden what was made.
            keys = self._data_keys.read(connection, stream_name)
            copy = encode_keys(stream_name, keys, mac_keys)
            if found != copy:
                try:
                    self._shelf.write_keys(stream_name, copy)
                except WriteSwept:
                    found = None
                    continue
                emit(signals.KeysCopied(stream_name, len(keys)))
            keys, found = self._data_keys.read(connection, stream_name), copy
        if isinstance(self._shelf, ArchiveShelf):
            # Behind the write, and also where there was none to do: what a rival has begun to
            # write of a shredded key is gone, and dead or alive it cannot give it its name.
            self._shelf.remove_leftovers(stream_name)


def read_copy(shelf: KeyShelf, stream_name: str, mac_keys: MacKeys) -> list[WrappedKey]:
    """The keys that a copy has; none where there is no copy.

    Raises ServerUnavailable, also for a copy that the stream's publisher has not signed.
    """
    copy = shelf.read_keys(stream_name)
    if copy is None:
        return []
    try:
        return decode_keys(stream_name, copy, mac_keys)
    except MalformedEntry as error:
        raise KeyUnavailable(
            f"{error} Nothing was skipped; its publisher writes it anew, once it runs."
        ) from error


def _name_of(stream_name: str) -> str:
    return f"{folder_of(stream_name)}/keys.json"
