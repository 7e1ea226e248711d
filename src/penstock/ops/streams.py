"""Streams over the borders of a service: who reads them, and what a reader elsewhere needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.masking import masked_url
from penstock.core.redis_acl import reader_line
from penstock.core.settings import Settings
from penstock.errors import ConsumerUnknown, OperationRefused, UsageError
from penstock.stores.mac_keys import MacKeyTable, keys_for
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.streams import Streams

# A consumer that reported within this time is alive, and would enter itself again at once.
ALIVE_SECONDS = 60.0
PLACEHOLDER = "…"
_ROLE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}")

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class StreamReader:
    """One consumer of a stream, of this service or of another."""

    name: str
    is_remote: bool
    checkpoint: int
    lag_events: int
    seen_at: datetime | None
    """When a remote one last reported."""


@dataclass(frozen=True, slots=True)
class SharedStream:
    """One stream, of this service or of another, with those who read it."""

    name: str
    is_source: bool
    origin: str | None
    head: int
    published: int
    seen_at: datetime | None
    """When another service's stream was last seen to move."""
    consumers: tuple[StreamReader, ...]


@dataclass(frozen=True, slots=True)
class RemoteConsumer:
    """A consumer of another service, as it last reported."""

    name: str
    stream_name: str
    checkpoint: int
    seen_at: datetime
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class Share:
    """Everything that another service needs to read a stream."""

    grants: tuple[str, ...]
    redis_acl: str | None
    call: str


def read_streams(connection: Connection, schema: str = DEFAULT_SCHEMA) -> list[SharedStream]:
    """All streams by name, each with its consumers."""
    sql = Queries("share.sql", schema)
    rows = connection.execute(sql["streams"]).fetchall()
    readers = connection.execute(sql["readers"]).fetchall()
    return [
        SharedStream(
            *(name, is_source, origin, head, published, seen_at),
            tuple(_readers(readers, stream_name=name, head=head)),
        )
        for name, is_source, origin, head, published, seen_at in rows
    ]


def _readers(
    rows: Iterable[tuple[Any, ...]], *, stream_name: str, head: int
) -> Iterable[StreamReader]:
    for of_stream, name, kind, checkpoint, seen_at in rows:
        if of_stream == stream_name:
            is_remote = kind == "remote consumer"
            lag_events = max(0, head - checkpoint)
            yield StreamReader(name, is_remote, checkpoint, lag_events, seen_at)


# ── sharing ────────────────────────────────────────────────────────────────────────────────────


def share(
    connection: Connection, settings: Settings, stream_name: str, role: str, *, show_secrets: bool
) -> Share:
    """What to execute here, and what to write there. Executes nothing itself."""
    if _ROLE.fullmatch(role) is None:
        raise UsageError(
            f"--role {role!r} cannot name a user in PostgreSQL and Redis. Choose one of letters, "
            "digits and _ . - (63 at most)."
        )
    Streams(settings.schema).read(connection, stream_name)
    sql = Queries("share.sql", settings.schema)
    grants = connection.execute(sql["grants"], {"schema": settings.schema, "role": role})
    redis_url, redis_acl = "None", None
    if settings.redis_url is not None:
        redis_url = f'"redis://{role}:{PLACEHOLDER}@host:port/0"'
        redis_acl = reader_line(role, settings.redis_prefix, [stream_name])
    written = [f"redis_url={redis_url}"]
    if settings.redis_prefix != "penstock":
        written.append(f'redis_prefix="{settings.redis_prefix}"')
    key = keys_for(settings, connection).as_setting() if show_secrets else PLACEHOLDER
    written.append(f'mac_key="{key}"')
    database = connection.info.dbname
    written.append(f'source_url="postgresql://{role}:{PLACEHOLDER}@host:port/{database}"')
    if settings.archive_url is not None:
        written.append(f'archive_url="{masked_url(settings.archive_url)}"')
    if settings.schema != DEFAULT_SCHEMA:
        written.append(f'source_schema="{settings.schema}"')
    lines = "".join(f"    {argument},\n" for argument in written)
    return Share(
        grants=tuple(statement for (statement,) in grants.fetchall()),
        redis_acl=redis_acl,
        call=f'pipeline.source(\n    "{stream_name}",\n{lines})',
    )


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


def rotate_key(
    connection: Connection, settings: Settings, *, retire_old: bool
) -> tuple[str, list[str]]:
    """Sign with a new key from now on. Returns its id, and those of the keys that are gone."""
    if settings.mac_key is not None:
        raise OperationRefused(
            "The keys are in the settings (mac_key), not in the database. Nothing was changed; "
            "put a new one in front of PENSTOCK_MAC_KEY, on all hosts, and remove the old one "
            "when all of them have it."
        )
    table = MacKeyTable(settings.schema)
    with connection.transaction():
        key_id = table.rotate(connection)
        retired = table.retire(connection) if retire_old else []
    return key_id, retired


# ── remote consumers ───────────────────────────────────────────────────────────────────────────


def find_remote(
    connection: Connection, name: str, schema: str = DEFAULT_SCHEMA
) -> list[RemoteConsumer]:
    """A consumer of another service, once for each stream. Raises OperationRefused."""
    rows = connection.execute(Queries("share.sql", schema)["remote_consumers"]).fetchall()
    known = [RemoteConsumer(*row) for row in rows]
    found = [remote for remote in known if remote.name == name]
    if not found:
        names = ", ".join(sorted({remote.name for remote in known})) or "none"
        raise ConsumerUnknown(
            f"No consumer of another service is called {name!r}; there are: {names}. Nothing was "
            "changed."
        )
    silent_seconds = min(remote.silent_seconds for remote in found)
    if silent_seconds < ALIVE_SECONDS:
        raise OperationRefused(
            f"{name} reported {silent_seconds:.0f} s ago: it runs, and would be back at once. "
            f"Nothing was changed; stop it over there, and try again after {ALIVE_SECONDS:.0f} s."
        )
    return found


def forget_remote(connection: Connection, name: str, schema: str = DEFAULT_SCHEMA) -> None:
    """Let pruning wait for it no longer."""
    find_remote(connection, name, schema)
    connection.execute(Queries("share.sql", schema)["forget_remote"], {"consumer": name})
