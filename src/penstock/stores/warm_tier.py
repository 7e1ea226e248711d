"""The warm tier as a reader sees it: what the hot log lacks, from PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import psycopg

from penstock.core.mac import MacKeys
from penstock.core.settings import Settings
from penstock.stores.mac_keys import keys_for
from penstock.stores.outbox import Outbox
from penstock.stores.streams import Streams


class WarmTier(Protocol):
    """One stream where it is kept for good. Every method may raise ServerUnavailable."""

    def origin(self) -> str | None:
        """The database that made the stream's entries; None where any is taken."""

    def keys(self) -> MacKeys:
        """The keys that its entries are signed with, as they are now."""

    def keys_seen(self) -> MacKeys:
        """The same as far as it is known: once a second, and nobody is waited for."""

    def head(self) -> int:
        """The last position given out, as far as it can be known."""

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Positions and bodies behind `after`, in order, holes among them."""


class OwnWarmTier:
    """A stream of this database, asked on the connection that its process shares."""

    def __init__(
        self,
        settings: Settings,
        stream_name: str,
        control: Callable[[], psycopg.Connection[Any]],
    ) -> None:
        self._settings = settings
        self._stream_name = stream_name
        self._control = control
        self._outbox = Outbox(settings.schema)
        self._streams = Streams(settings.schema)

    def origin(self) -> str:
        """This database's."""
        return self._streams.read(self._control(), self._stream_name).origin

    def keys(self) -> MacKeys:
        """Out of the settings or the database."""
        return keys_for(self._settings, self._control())

    def keys_seen(self) -> MacKeys:
        """As they are: nothing can be handled without this database either."""
        return self.keys()

    def head(self) -> int:
        """The last position given out."""
        return self._streams.read(self._control(), self._stream_name).head

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Out of the outbox."""
        return self._outbox.read(self._control(), self._stream_name, after, count)
