"""What the tests of sending share: a database per module, a sender, and a look at the outbox."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from penstock.pipeline.sending import Sender


def make_sender(schema: str = "events") -> Sender:
    """A sender with the ordinary limits."""
    return Sender(schema=schema, payload_bytes_max=1024 * 1024, metadata_bytes_max=64 * 1024)


@contextmanager
def database_of_its_own(server_url: str, template: str) -> Iterator[str]:
    """A migrated database for a whole module: making one per test takes longer than the tests."""
    name = f"penstock_send_{secrets.token_hex(8)}"
    with psycopg.connect(server_url, autocommit=True) as administration:
        names = map(sql.Identifier, (name, template))
        administration.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names))
        try:
            yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
        finally:
            statement = sql.SQL("DROP DATABASE {} WITH (FORCE)")
            administration.execute(statement.format(sql.Identifier(name)))


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
