"""What to grant in PostgreSQL and in Redis so that policies hold, and who passes them anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.policy import MemberKind, StreamPolicy
from penstock.core.redis_acl import WORKER, RedisUser, users_of
from penstock.core.settings import Settings
from penstock.errors import OperationRefused
from penstock.stores.policies import Policies
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class RoleGrants:
    """What an administrator executes for one role."""

    role_name: str
    what_for: str
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passing:
    """Roles that policies do not hold back, superusers aside."""

    workers: tuple[str, ...]
    """They may number events, or bypass row-level security; the owner is one of them."""
    administrators: tuple[str, ...]
    """They may write the policies themselves, and are not the owner."""


def read_passing(connection: Connection, schema: str = DEFAULT_SCHEMA) -> Passing:
    """Who gets at every stream, whatever its policy says."""
    sql = Queries("policy.sql", schema)
    workers = connection.execute(sql["passing_roles"]).fetchall()
    administrators = connection.execute(sql["administrators"]).fetchall()
    return Passing(tuple(name for (name,) in workers), tuple(name for (name,) in administrators))


def grants_for(
    connection: Connection,
    policies: Iterable[StreamPolicy],
    *,
    worker: str = WORKER,
    schema: str = DEFAULT_SCHEMA,
) -> list[RoleGrants]:
    """The grants of every role that the policies name, and those of workers. Executes nothing."""
    kinds: dict[str, set[MemberKind]] = {}
    for policy in policies:
        for member in policy.members:
            if member.role_name is not None:
                kinds.setdefault(member.role_name, set()).add(member.kind)

    def printed(role: str, *queries: tuple[str, str]) -> tuple[str, ...]:
        parameters = {"schema": schema, "role": role}
        rows = (
            statement
            for file, name in queries
            for (statement,) in connection.execute(Queries(file, schema)[name], parameters)
        )
        return tuple(dict.fromkeys(rows))

    found = [RoleGrants(worker, "workers", printed(worker, ("policy.sql", "worker_grants")))]
    for role, held in sorted(kinds.items()):
        queries = [query for kind in sorted(held) for query in _QUERIES[kind]]
        what_for = " and ".join(f"{kind}s" for kind in sorted(held))
        found.append(RoleGrants(role, what_for, printed(role, *queries)))
    return found


# A consumer's role reads as another service does, and looks after what it has set aside.
_QUERIES: dict[MemberKind, Sequence[tuple[str, str]]] = {
    MemberKind.PRODUCER: [("policy.sql", "producer_grants")],
    MemberKind.CONSUMER: [("share.sql", "grants"), ("policy.sql", "consumer_grants")],
}


def redis_users(
    connection: Connection, settings: Settings, stream_name: str | None, *, worker: str = WORKER
) -> list[RedisUser]:
    """The users of Redis that the policies ask for, all or those of one stream.

    Raises OperationRefused where there is no Redis, or for a stream that anybody may read.
    """
    if settings.redis_url is None:
        raise OperationRefused(
            "There is no Redis (redis_url is None), so there is nothing to restrict in it."
        )
    policies = Policies(settings.schema)
    if stream_name is not None and not policies.read(connection, stream_name).is_limited:
        raise OperationRefused(
            f"{stream_name!r} names nobody, so anybody may read it. For one more reader write "
            f"`penstock streams share {stream_name} --role ROLE`; to restrict it, "
            f"`penstock policy set {stream_name} restricted --producer … --consumer …`."
        )
    return users_of(
        policies.read_all(connection),
        settings.redis_prefix,
        stream_name=stream_name,
        worker=worker,
    )
