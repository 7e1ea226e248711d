"""What the tests of sending share: a sender and a look at the outbox."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from penstock.pipeline.sending import Sender


def make_sender(schema: str = "events") -> Sender:
    """A sender with the ordinary limits."""
    return Sender(schema=schema, payload_bytes_max=1024 * 1024, metadata_bytes_max=64 * 1024)


class Outbox:
    """What has been committed, as another session sees it."""

    def __init__(self, url: str) -> None:
        self.connection: psycopg.Connection[Any] = psycopg.connect(url, autocommit=True)

    def clear(self) -> None:
        """Forget what earlier tests have sent."""
        self.connection.execute("TRUNCATE events.outbox_event")

    def column(self, name: str) -> list[Any]:
        """One column of all events, in the order of their ids."""
        query = sql.SQL("SELECT {} FROM events.outbox_event ORDER BY id")
        return [row[0] for row in self.connection.execute(query.format(sql.Identifier(name)))]

    @property
    def sent(self) -> list[str]:
        """The types of all events, in the order of their ids."""
        return self.column("event_type")

    def close(self) -> None:
        """Give the connection up."""
        self.connection.close()
