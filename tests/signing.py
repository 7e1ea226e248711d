"""Entries of the hot log as the publisher of a database would sign them."""

from __future__ import annotations

import psycopg

from penstock.core.mac import MacKeys
from penstock.core.wire import encode_entry
from penstock.stores.mac_keys import MacKeyTable

OTHER_KEYS = MacKeys(b"other", {b"other": b"not the key of any database"})


def keys_of(database_url: str) -> MacKeys:
    """The keys that a database keeps."""
    with psycopg.connect(database_url) as connection:
        return MacKeyTable().read(connection)


def signed(database_url: str, position: int, body: str, stream_name: str = "orders") -> bytes:
    """A body as it stands on the hot log of a database."""
    return encode_entry(stream_name, position, body, keys_of(database_url))
