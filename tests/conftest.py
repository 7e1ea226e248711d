"""Real servers, one pair per process; a fresh database and an empty hot log for every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing

import pytest
import redis
from hypothesis import HealthCheck, settings

from penstock.stores.servers import Servers, running_servers
from tests.databases import name_of, new_database, server_folder

# Hypothesis would call a test broken that a busy machine merely slows down.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Below a shell in the background, Ctrl-C would be ignored by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

OWN_SERVERS = ("PENSTOCK_DATABASE_URL", "PENSTOCK_REDIS_URL")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one per core, each with servers of its own; just one on servers of yours."""
    return 0 if all(map(os.environ.get, OWN_SERVERS)) else os.cpu_count() or 1


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The servers of this run: embedded ones, or yours if both URLs are set."""
    database_url, redis_url = map(os.environ.get, OWN_SERVERS)
    if database_url and redis_url:
        yield Servers(database_url=database_url, redis_url=redis_url)
        return
    with server_folder() as folder, running_servers(folder, durable=False) as running:
        yield running


@pytest.fixture(scope="session")
def template_database(servers: Servers) -> Iterator[str]:
    """The name of a migrated database that every test's own is copied from."""
    from penstock.stores.migrations import migrate

    with new_database(servers.database_url) as url:
        migrate(url)
        yield name_of(url)


@pytest.fixture
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """A migrated, empty database that no other test sees."""
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def redis_url(servers: Servers) -> str:
    """A hot log without a single key."""
    with closing(redis.Redis.from_url(servers.redis_url)) as client:
        # Not FLUSHALL: the server may be yours, with other databases beside this one.
        client.flushdb()
    return servers.redis_url
