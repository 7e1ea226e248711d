"""Where measurements run: embedded servers that keep what they are told, a database for each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from penstock.stores.migrations import migrate
from penstock.stores.servers import Servers, running_servers


@dataclass(frozen=True, slots=True)
class Bed:
    """A running pair of servers."""

    servers: Servers

    @property
    def redis_url(self) -> str:
        """Both sides use the same server, under different keys."""
        return self.servers.redis_url

    def database(self, name: str) -> str:
        """The URL of a new database with the tables of both sides."""
        with psycopg.connect(self.servers.database_url, autocommit=True) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        url = urlsplit(self.servers.database_url)._replace(path=f"/{name}").geturl()
        migrate(url)
        with psycopg.connect(url) as connection:
            connection.execute(files("benchmarks").joinpath("bench.sql").read_text().encode())
        return url


@contextmanager
def made_bed() -> Iterator[Bed]:
    """Servers in a temporary folder, durable: without fsync there would be nothing to save."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_servers(Path(folder), durable=True) as servers,
    ):
        yield Bed(servers)
