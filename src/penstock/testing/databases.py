"""Databases that tests create, copy and drop: cheap enough for one per test."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

# Logging a copy block by block, as newer servers prefer, takes ten times as long as copying the
# files; older ones know nothing else than files, and not the word either.
FILE_COPY_SINCE = 150_000
MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own within
MEMORY_BYTES_MIN = 4 * 1024**3


@contextmanager
def server_folder() -> Iterator[Path]:
    """Where servers of tests keep their files: in memory, where there is enough of it.

    A database is a thousand small files; on a disk, creating and removing one takes ten times as
    long, and tests do little else.
    """
    is_roomy = False
    with suppress(OSError):
        is_roomy = shutil.disk_usage(MEMORY).free >= MEMORY_BYTES_MIN
    with tempfile.TemporaryDirectory(
        prefix="penstock-", dir=MEMORY if is_roomy else None, ignore_cleanup_errors=True
    ) as name:
        yield Path(name)


@contextmanager
def new_database(server_url: str, template: str = "template1") -> Iterator[str]:
    """The URL of a copy of the template, which is dropped afterwards, whoever is connected."""
    name = f"penstock_test_{secrets.token_hex(8)}"
    with psycopg.connect(server_url, autocommit=True) as administration:
        create = "CREATE DATABASE {} TEMPLATE {}"
        if administration.info.server_version >= FILE_COPY_SINCE:
            create += " STRATEGY = FILE_COPY"
        names = (sql.Identifier(name), sql.Identifier(template))
        administration.execute(sql.SQL(create).format(*names))
    try:
        yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    finally:
        with psycopg.connect(server_url, autocommit=True) as administration:
            drop = sql.SQL("DROP DATABASE {} WITH (FORCE)")
            administration.execute(drop.format(sql.Identifier(name)))


def name_of(database_url: str) -> str:
    """The name of the database in a URL."""
    return urlsplit(database_url).path.removeprefix("/")
