"""Roles of PostgreSQL that tests create, log in with, and drop."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import psycopg
from psycopg import sql


@dataclass(frozen=True)
class Roles:
    """Short names of a test, each a role of its own on the server."""

    database_url: str
    owner: psycopg.Connection[Any]
    password: str = field(default_factory=lambda: secrets.token_hex(8), repr=False)
    suffix: str = field(default_factory=lambda: secrets.token_hex(4))

    def name(self, short: str) -> str:
        """What the server calls it."""
        return f"{short}_{self.suffix}"

    def url(self, short: str) -> str:
        """The database's address for this role."""
        return self.on_server(self.database_url, short)

    def on_server(self, url: str, short: str) -> str:
        """Any server's address for a user of this name and password."""
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return parts._replace(netloc=f"{self.name(short)}:{self.password}@{host}").geturl()

    @contextmanager
    def connected(self, short: str) -> Iterator[psycopg.Connection[Any]]:
        """A session of this role."""
        with psycopg.connect(self.url(short), autocommit=True) as connection:
            yield connection

    def run(self, statements: Sequence[str]) -> None:
        """Execute what was printed for an administrator."""
        for statement in statements:
            self.owner.execute(statement.encode())


@contextmanager
def new_roles(database_url: str, *short_names: str) -> Iterator[Roles]:
    """Roles that may log in and nothing else."""
    with psycopg.connect(database_url, autocommit=True) as owner:
        roles = Roles(database_url, owner)
        identifiers = [sql.Identifier(roles.name(short)) for short in short_names]
        password = sql.Literal(roles.password)
        for name in identifiers:
            owner.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(name, password))
        try:
            yield roles
        finally:
            for name in identifiers:
                owner.execute(sql.SQL("DROP OWNED BY {}").format(name))
                owner.execute(sql.SQL("DROP ROLE {}").format(name))
