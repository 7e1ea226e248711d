"""Copies of a stream's wrapped keys beside its events, so that other services need KMS rights only.

One lies in Redis beside the hot log, one in the object store beside the archive. Each is written
as a whole from what the database has: a shredded key is gone from it, and named as shredded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import psycopg

from penstock.core.archive import folder_of
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.wrapped_keys import WrappedKey, decode_keys, encode_keys
from penstock.errors import KeyUnavailable, MalformedEntry
from penstock.stores.data_keys import DataKeys
from penstock.stores.mac_keys import keys_for
from penstock.stores.objects import ObjectStore
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


class KeyCopies:
    """Makes the copies on one shelf what the database has."""

    def __init__(self, settings: Settings, shelf: KeyShelf) -> None:
        self._settings = settings
        self._shelf = shelf
        self._data_keys = DataKeys(settings.schema)

    def refresh(
        self,
        connection: Connection,
        stream_names: Collection[str],
        mac_keys: MacKeys | None = None,
    ) -> None:
        """Write the copies of these streams anew where they differ; without keys there is none.

        Raises ServerUnavailable or ServerUnsuitable; then say it again.
        """
        held = self._data_keys.read_all(connection)
        for stream_name in stream_names:
            keys = held.get(stream_name)
            if keys is None:
                continue
            mac_keys = mac_keys or keys_for(self._settings, connection)
            found = self._shelf.read_keys(stream_name)
            while found != encode_keys(stream_name, keys, mac_keys):
                # Asked again before each write and behind it: who stood still in between has
                # brought back what was shredded meanwhile, and hidden what was made.
                keys = self._data_keys.read(connection, stream_name)
                copy = encode_keys(stream_name, keys, mac_keys)
                if found != copy:
                    self._shelf.write_keys(stream_name, copy)
                    emit(signals.KeysCopied(stream_name, len(keys)))
                keys, found = self._data_keys.read(connection, stream_name), copy


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
