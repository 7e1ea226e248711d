"""Where consumers get the wrapped keys of their streams from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager
from typing import Any

import psycopg

from penstock.app.hot_logs import HotLogs
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.core.wrapped_keys import WrappedKey
from penstock.errors import KeyUnavailable, ServerUnavailable, ServerUnsuitable
from penstock.stores.data_keys import DataKeys
from penstock.stores.key_copies import ArchiveShelf, KeyShelf, read_copy
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.objects import open_store
from penstock.stores.postgres import connect
from penstock.stores.stream_keys import StreamKeys


class KeySources:
    """Leads to the keys of own streams, in the database, and of others', in copies."""

    def __init__(self, settings: Settings, hot_logs: HotLogs) -> None:
        self._settings = settings
        self._hot_logs = hot_logs

    def own(self, stream_name: str, control: Callable[[], psycopg.Connection[Any]]) -> StreamKeys:
        """The keys of a stream of this database."""
        data_keys = DataKeys(self._settings.schema)
        return StreamKeys(
            stream_name, lambda _wanted: data_keys.read(control(), stream_name), is_complete=True
        )

    def of_source(self, source: Source) -> StreamKeys:
        """The keys of another service's stream: beside its tiers, or in its database."""
        return StreamKeys(
            source.stream_name, lambda wanted: self._found(source, wanted), is_complete=False
        )

    def _found(self, source: Source, wanted: Set[str]) -> list[WrappedKey]:
        """What the first place has that has all that are wanted; else what the last one has.

        Raises KeyUnavailable where one that could not be asked may have them.
        """
        mac_keys = _mac_keys(source)
        places: list[Callable[[], list[WrappedKey]]] = [
            lambda: self._beside_hot_log(source, mac_keys),
            lambda: _beside_archive(source, mac_keys),
            lambda: _in_database(source),
        ]
        found: list[WrappedKey] = []
        troubles: list[str] = []
        for read in places:
            try:
                found = read() or found
            except (ServerUnavailable, ServerUnsuitable) as error:
                troubles.append(str(error))
                continue
            if found and wanted <= {key.key_id for key in found}:
                return found
        if troubles:
            raise KeyUnavailable(
                f"The data keys of {source.stream_name!r} cannot be had now. {' '.join(troubles)}"
            )
        return found

    def _beside_hot_log(self, source: Source, mac_keys: MacKeys) -> list[WrappedKey]:
        with closing(self._hot_logs.of_source(source)) as log:
            if not isinstance(log, KeyShelf):
                return []
            return read_copy(log, source.stream_name, mac_keys)


def _beside_archive(source: Source, mac_keys: MacKeys) -> list[WrappedKey]:
    if source.archive_url is None:
        return []
    shelf = ArchiveShelf(open_store(source.archive_url))
    return read_copy(shelf, source.stream_name, mac_keys)


def _in_database(source: Source) -> list[WrappedKey]:
    if source.source_url is None:
        return []
    with _asking(source, source.source_url) as connection:
        return DataKeys(source.source_schema).read(connection, source.stream_name)


def _mac_keys(source: Source) -> MacKeys:
    """What signs the copies: as the application was told, or as the producer's database says."""
    if source.keys is not None:
        return source.keys
    if source.source_url is None:
        raise KeyUnavailable(
            f"Nothing tells who signs the copy of the data keys of {source.stream_name!r}. Nothing "
            "was skipped; give pipeline.source(…) a mac_key or a source_url."
        )
    with _asking(source, source.source_url) as connection:
        return MacKeyTable(source.source_schema).read(connection)


@contextmanager
def _asking(source: Source, url: str) -> Iterator[psycopg.Connection[Any]]:
    try:
        with connect(url, "penstock data keys") as connection:
            yield connection
    except (ServerUnavailable, ServerUnsuitable, psycopg.Error) as error:
        raise KeyUnavailable(
            f"The data keys of {source.stream_name!r} cannot be read in its database: {error} "
            "Nothing was skipped; `penstock streams share` over there prints the grants."
        ) from error
