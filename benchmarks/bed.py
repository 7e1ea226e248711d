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

TEMPLATE = "bench_template"


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
        return _create(self.servers, name, TEMPLATE)


@contextmanager
def made_bed(*, durable: bool) -> Iterator[Bed]:
    """Servers in a temporary folder. Only durable ones are worth measuring."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        running_servers(Path(folder), durable=durable) as servers,
    ):
        template_url = _create(servers, TEMPLATE, "template1")
        migrate(template_url)
        with psycopg.connect(template_url) as connection:
            connection.execute(files("benchmarks").joinpath("bench.sql").read_text().encode())
        yield Bed(servers)


def _create(servers: Servers, name: str, template: str) -> str:
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(
            sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
    return urlsplit(servers.database_url)._replace(path=f"/{name}").geturl()
