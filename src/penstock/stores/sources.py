"""The streams of other services, as this database knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg

from penstock.errors import RegistrationError
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


class Bounds(NamedTuple):
    """What can be read of a stream: its first position, and the last one given out."""

    first: int
    head: int


class ConsumerProgress(NamedTuple):
    """The last position that a consumer needs no more, and since when it is counted."""

    checkpoint: int
    generation: int


class Sources:
    """The table `source`, and the origins that consumers are pinned to."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("source.sql", schema)

    def register(self, connection: Connection, stream_name: str) -> None:
        """Enter a stream of another service. Raises RegistrationError where it is one of ours."""
        row = connection.execute(self._sql["register"], {"stream_name": stream_name}).fetchone()
        if row is None or not row[0]:
            raise RegistrationError(
                f"pipeline.source({stream_name!r}, …): this database has a stream of that name "
                "itself, with positions of its own. Nothing was touched. Remove the source to "
                "read that stream, or give this service a database or a schema of its own."
            )

    def replace_start(
        self, connection: Connection, consumer: str, choose: Callable[[], int]
    ) -> None:
        """Choose again where a consumer starts that has met the stream as one of ours.

        Not where it has read the other service's, or was moved by hand.
        """
        with connection.transaction():
            if connection.execute(self._sql["lock_misplaced"], {"consumer": consumer}).fetchone():
                connection.execute(
                    self._sql["place"], {"consumer": consumer, "start_position": choose()}
                )

    def require_own(self, connection: Connection, stream_name: str) -> None:
        """Raise RegistrationError for a stream that belongs to another service."""
        if self.read(connection, stream_name) is not None:
            raise RegistrationError(
                f"Stream {stream_name!r} belongs to another service, according to the database. "
                f"Nothing was touched; write pipeline.source({stream_name!r}, redis_url=…, "
                "mac_key=…) beside its consumer. If it is this service's own from now on, "
                "`penstock consumers forget` the consumers that read it before."
            )

    def read(self, connection: Connection, stream_name: str) -> Bounds | None:
        """The stream as it was last seen; None where it is not another service's."""
        row = connection.execute(self._sql["read"], {"stream_name": stream_name}).fetchone()
        return None if row is None else Bounds(*row)

    def see(self, connection: Connection, stream_name: str, bounds: Bounds) -> None:
        """Note how far the stream is, for whoever asks for the lag."""
        connection.execute(self._sql["see"], {"stream_name": stream_name, **bounds._asdict()})

    def progress(self, connection: Connection, consumer: str) -> ConsumerProgress | None:
        """How far a consumer is; None where it is not in the books."""
        row = connection.execute(self._sql["progress"], {"consumer": consumer}).fetchone()
        return None if row is None else ConsumerProgress(*row)

    def generation(self, connection: Connection) -> int:
        """A generation before that of every consumer that registers from now on."""
        row = connection.execute(self._sql["generation"]).fetchone()
        assert row is not None
        return int(row[0])

    def pinned(self, connection: Connection, consumer: str) -> str | None:
        """The database that a consumer's stream comes from; None before its first read."""
        row = connection.execute(self._sql["pinned"], {"consumer": consumer}).fetchone()
        return None if row is None else row[0]

    def pin(self, connection: Connection, consumer: str, origin: str) -> str | None:
        """Pin a consumer to a database, unless it is. Returns the one that it is pinned to."""
        row = connection.execute(
            self._sql["pin"], {"consumer": consumer, "origin": origin}
        ).fetchone()
        return None if row is None else str(row[0])


class Pin:
    """The one database whose entries a consumer takes, from its first read on."""

    def __init__(self, sources: Sources, consumer: str, control: Callable[[], Connection]) -> None:
        self._sources = sources
        self._consumer = consumer
        self._control = control
        self._origin: str | None = None

    def read(self) -> str | None:
        """The database; None before the first read."""
        if self._origin is None:
            self._origin = self._sources.pinned(self._control(), self._consumer)
        return self._origin

    def set(self, origin: str) -> str | None:
        """Pin this one, unless there is another. Returns what holds."""
        self._origin = self._sources.pin(self._control(), self._consumer, origin)
        return self._origin
