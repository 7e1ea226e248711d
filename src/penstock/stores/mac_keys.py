"""The keys that sign entries of the hot log, as PostgreSQL keeps them."""

from __future__ import annotations

from typing import Any

import psycopg

from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.errors import ServerUnsuitable
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


class MacKeyTable:
    """The table `mac_key`; callers bring connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("mac_key.sql", schema)

    def read(self, connection: Connection) -> MacKeys:
        """All keys; the latest signs."""
        rows = connection.execute(self._sql["read"]).fetchall()
        if not rows:
            raise ServerUnsuitable(
                "There is no key to sign entries with: the table mac_key is empty. Nothing was "
                "lost; add one with `penstock streams rotate-key`, or set PENSTOCK_MAC_KEY."
            )
        return MacKeys(rows[0][0].encode(), {key_id.encode(): bytes(s) for key_id, s in rows})

    def rotate(self, connection: Connection) -> str:
        """Sign with a new key from now on; entries of older keys stay valid."""
        row = connection.execute(self._sql["add"]).fetchone()
        assert row is not None
        return str(row[0])

    def retire(self, connection: Connection) -> list[str]:
        """Accept the latest key only; what older ones signed is read from PostgreSQL instead."""
        return [key_id for (key_id,) in connection.execute(self._sql["retire"]).fetchall()]


def keys_for(settings: Settings, connection: Connection) -> MacKeys:
    """The keys of the settings, or else those that PostgreSQL keeps."""
    if settings.mac_key is not None:
        return MacKeys.parse(settings.mac_key)
    return MacKeyTable(settings.schema).read(connection)
