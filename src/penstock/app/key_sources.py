"""Where consumers get the wrapped keys of their streams from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg

from penstock.app.hot_logs import HotLogs
from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.core.wrapped_keys import WrappedKey
from penstock.errors import KeyUnavailable
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
            stream_name, lambda: data_keys.read(control(), stream_name), is_complete=True
        )

    def of_source(self, source: Source) -> StreamKeys:
        """The keys of another service's stream: beside its tiers, or in its database."""
        return StreamKeys(source.stream_name, lambda: self._copied(source), is_complete=False)

    def _copied(self, source: Source) -> list[WrappedKey]:
        mac_keys = _mac_keys(source)
        with closing(self._hot_logs.of_source(source)) as log:
            found = (
                read_copy(log, source.stream_name, mac_keys) if isinstance(log, KeyShelf) else []
            )
        if not found and source.archive_url is not None:
            shelf = ArchiveShelf(open_store(source.archive_url))
            found = read_copy(shelf, source.stream_name, mac_keys)
        return found or _in_its_database(source)


def _in_its_database(source: Source) -> list[WrappedKey]:
    if source.source_url is None:
        return []
    try:
        with connect(source.source_url, "penstock data keys") as connection:
            return DataKeys(source.source_schema).read(connection, source.stream_name)
    except psycopg.Error as error:
        raise KeyUnavailable(
            f"The data keys of {source.stream_name!r} cannot be read in its database: {error} "
            "Nothing was skipped; `penstock streams share` over there prints the grants."
        ) from error


def _mac_keys(source: Source) -> MacKeys:
    """What signs the copies: as the application was told, or as the producer's database says."""
    if source.keys is not None:
        return source.keys
    if source.source_url is None:
        raise KeyUnavailable(
            f"Nothing tells who signs the copy of the data keys of {source.stream_name!r}. Nothing "
            "was skipped; give pipeline.source(…) a mac_key or a source_url."
        )
    with connect(source.source_url, "penstock data keys") as connection:
        return MacKeyTable(source.source_schema).read(connection)
