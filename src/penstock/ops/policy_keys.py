"""Data keys in operators' hands: rotated, wrapped anew, shredded; and their copies everywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.settings import Settings
from penstock.errors import OperationRefused, ServerUnavailable, ServerUnsuitable
from penstock.stores.archive import ArchiveTable
from penstock.stores.data_keys import DataKeys
from penstock.stores.key_copies import ArchiveShelf, KeyCopies
from penstock.stores.kms import is_file, kms_for
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.objects import open_store
from penstock.stores.policies import Policies
from penstock.stores.queries import Queries
from penstock.stores.redis_log import RedisLog

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Copy:
    """One place where a stream's wrapped keys lie, brought up to date or not."""

    place: str
    problem: str | None = None
    """Why it could not be written; None: it is what the database has."""


@dataclass(frozen=True, slots=True)
class Shredded:
    """A version that nobody can use any more, and what has become of its copies."""

    was_there: bool
    """False: it was shredded before, and this time only copies were looked after."""
    copies: tuple[Copy, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no copy of the wrapped key is left where Penstock puts them."""
        return all(copy.problem is None for copy in self.copies)


def rotate(
    connection: Connection, settings: Settings, stream_name: str, *, by: str
) -> tuple[int, tuple[Copy, ...]]:
    """Seal with a new key from now on. Returns its version, and where it was copied to."""
    with connection.transaction():
        version = DataKeys(settings.schema).rotate(connection, stream_name)
        _record(connection, settings, stream_name, f"rotate to version {version}", by)
    return version, copy_keys(connection, settings, stream_name)


def rewrap(
    connection: Connection, settings: Settings, stream_name: str, kms_key_id: str | None, *, by: str
) -> tuple[int, tuple[Copy, ...]]:
    """Have another KMS key, or the same one anew, wrap all data keys. Returns how many it did.

    Nothing is changed before the KMS key has proved itself on every data key. Interrupted, or
    failed, say it again: until it returns, the former KMS key is needed.
    """
    policies = Policies(settings.schema)
    policy = policies.read(connection, stream_name)
    if policy.kms_key_id is None:
        raise OperationRefused(
            f"{stream_name!r} has no data keys, since it never was confidential. Nothing was "
            "changed."
        )
    wrapping = kms_key_id or policy.kms_key_id
    kms = kms_for(wrapping)
    if is_file(wrapping):
        assert isinstance(kms, KeyFile)
        kms.create()
    data_keys = DataKeys(settings.schema)
    # Asked before any lock: a KMS may take its time, and whoever rotates would wait for it.
    rewrapped = data_keys.wrapped_anew(connection, stream_name, wrapping)
    with connection.transaction():
        policies.lock(connection)
        policies.set_wrapping_key(connection, stream_name, wrapping)
        done = data_keys.replace(connection, rewrapped)
        _record(connection, settings, stream_name, f"rewrap with {wrapping}", by)
    # A key that was made meanwhile has been wrapped by the former one; from here on none is.
    while late := data_keys.wrapped_anew(connection, stream_name, wrapping, but=done):
        done |= data_keys.replace(connection, late)
    _rewrite_table(connection, settings)
    return len(done), copy_keys(connection, settings, stream_name)


def shred(
    connection: Connection, settings: Settings, stream_name: str, version: int, *, by: str
) -> Shredded:
    """Destroy a version's key and every copy that Penstock made of it. Says again what is left.

    Whatever of it fails can be said again. Backups that were taken earlier still have the key.
    """
    with connection.transaction():
        was_there = DataKeys(settings.schema).shred(connection, stream_name, version)
        if was_there:
            _record(connection, settings, stream_name, f"shred version {version}", by)
    problem = _attempt(lambda: _rewrite_table(connection, settings))
    file = Copy("the file of data_key in PostgreSQL", problem)
    return Shredded(was_there, (file, *copy_keys(connection, settings, stream_name)))


def copy_keys(connection: Connection, settings: Settings, stream_name: str) -> tuple[Copy, ...]:
    """Make the copies beside hot log and archive what the database has. Raises nothing."""
    made: list[Copy] = []
    if settings.redis_url is not None:
        log = RedisLog(settings.redis_url, prefix=settings.redis_prefix)
        with closing(log):
            refresh = KeyCopies(settings, log, "policy").refresh
            problem = _attempt(lambda: refresh(connection, stream_name))
        made.append(Copy("beside the hot log", problem))
    url = settings.archive_url
    if url is not None:

        def refresh_archive() -> None:
            store = open_store(url)
            # A place without its volume would take the copy, and the volume keep the former one.
            ArchiveTable(settings.schema).require_in(store, connection)
            KeyCopies(settings, ArchiveShelf(store), "policy").refresh(connection, stream_name)

        made.append(Copy("beside the archive", _attempt(refresh_archive)))
    return tuple(made)


def _attempt(work: Callable[[], None]) -> str | None:
    try:
        work()
    except (ServerUnavailable, ServerUnsuitable, psycopg.Error) as error:
        return str(error)
    return None


def _rewrite_table(connection: Connection, settings: Settings) -> None:
    """Leave no former version of a row in the table's file. Outside of any transaction."""
    connection.execute(Queries("policy.sql", settings.schema)["rewrite_keys"])


def _record(
    connection: Connection, settings: Settings, stream_name: str, change: str, by: str
) -> None:
    Policies(settings.schema).record(connection, stream_name, change, by)
