"""Real servers for every test: one pair per run, a fresh database and an empty hot log per test."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from psycopg import sql

from penstock.stores.servers import Servers, running_servers


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """The servers of this run: embedded ones, or yours if both URLs are set."""
    database_url = os.environ.get("PENSTOCK_DATABASE_URL")
    redis_url = os.environ.get("PENSTOCK_REDIS_URL")
    if database_url and redis_url:
        yield Servers(database_url=database_url, redis_url=redis_url)
        return
    with running_servers(tmp_path_factory.mktemp("servers"), durable=False) as running:
        yield running


@pytest.fixture(scope="session")
def template_database(servers: Servers) -> Iterator[str]:
    """The name of a migrated database that every test's own is copied from."""
    from penstock.stores.migrations import migrate

    name = f"penstock_template_{secrets.token_hex(4)}"
    _administer(servers, "CREATE DATABASE {}", name)
    try:
        migrate(_url_of(servers, name))
        yield name
    finally:
        _administer(servers, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """A migrated, empty database that no other test sees."""
    name = f"penstock_test_{secrets.token_hex(8)}"
    _administer(servers, "CREATE DATABASE {} TEMPLATE {}", name, template_database)
    try:
        yield _url_of(servers, name)
    finally:
        _administer(servers, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture
def redis_url(servers: Servers) -> str:
    """A hot log without a single key."""
    with closing(redis.Redis.from_url(servers.redis_url)) as client:
        # Not FLUSHALL: the server may be yours, with other databases beside this one.
        client.flushdb()
    return servers.redis_url


def _administer(servers: Servers, statement: str, *names: str) -> None:
    # CREATE and DROP DATABASE refuse to run inside a transaction.
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL(statement).format(*map(sql.Identifier, names)))


def _url_of(servers: Servers, database: str) -> str:
    return urlsplit(servers.database_url)._replace(path=f"/{database}").geturl()
