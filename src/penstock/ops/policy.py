"""What operators do to policies, and what they have to know before and afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.policy import StreamPolicy
from penstock.core.policy_change import PolicyChange, changed
from penstock.core.settings import Settings
from penstock.errors import OperationRefused
from penstock.stores.data_keys import DataKeys
from penstock.stores.kms import is_file, kms_for
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.policies import Policies
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.redis_log import RedisLog

Connection = psycopg.Connection[Any]
CHANGES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Plaintext:
    """What of a confidential stream is stored unencrypted, from the time before."""

    outbox: int
    timers: int
    parked: int
    dead_letters: int
    archived: int
    """Events in objects from before its first key."""

    @property
    def is_any(self) -> bool:
        """Whether there is any."""
        return any((self.outbox, self.timers, self.parked, self.dead_letters, self.archived))


@dataclass(frozen=True, slots=True)
class PolicySet:
    """A policy that holds from now on, and whom and what it meets."""

    policy: StreamPolicy
    strangers: tuple[tuple[str, str], ...]
    """Kind and name of those who are known to use the stream and are not named."""
    plaintext: Plaintext | None
    """None: the stream is not confidential."""


@dataclass(frozen=True, slots=True)
class KeyVersion:
    """One data key; version 0 hashes keys, the others seal events."""

    version: int
    key_id: str
    kms_key_id: str
    created_at: datetime
    shredded_at: datetime | None


@dataclass(frozen=True, slots=True)
class Change:
    """What somebody did to a policy."""

    change: str
    changed_by: str
    role_name: str
    changed_at: datetime


@dataclass(frozen=True, slots=True)
class PolicyDetails:
    """A stream's policy with its keys and its past."""

    policy: StreamPolicy
    keys: tuple[KeyVersion, ...]
    changes: tuple[Change, ...]
    plaintext: Plaintext | None


def set_policy(
    connection: Connection, change: PolicyChange, *, by: str, schema: str = DEFAULT_SCHEMA
) -> PolicySet:
    """Write a policy, make the keys that it needs, and have it enforced: all of it or nothing.

    Raises UsageError or OperationRefused, and what a KMS that is asked for keys raises.
    """
    policies = Policies(schema)
    with connection.transaction():
        policies.lock(connection)
        policy = changed(policies.read(connection, change.stream_name), change)
        _require_roles(policies, connection, policy)
        policies.write(connection, policy)
        if policy.is_confidential:
            _prepare_keys(connection, policy, schema)
        policies.record(connection, policy.stream_name, f"set {described(policy)}", by)
        # Last, because it locks the outbox: no KMS is waited for meanwhile.
        policies.enforce(connection)
    # With the key that seals now.
    policy = policies.read(connection, policy.stream_name)
    return PolicySet(
        policy,
        _strangers(connection, policy, schema),
        read_plaintext(connection, policy, schema),
    )


def read_details(
    connection: Connection, stream_name: str, schema: str = DEFAULT_SCHEMA
) -> PolicyDetails:
    """Everything about one stream's policy."""
    sql = Queries("policy.sql", schema)
    policy = Policies(schema).read(connection, stream_name)
    stream = {"stream_name": stream_name}
    keys = connection.execute(sql["keys"], stream).fetchall()
    changes = connection.execute(sql["changes"], {**stream, "count": CHANGES_SHOWN}).fetchall()
    return PolicyDetails(
        policy,
        tuple(KeyVersion(*row) for row in keys),
        tuple(Change(*row) for row in changes),
        read_plaintext(connection, policy, schema),
    )


def read_plaintext(
    connection: Connection, policy: StreamPolicy, schema: str = DEFAULT_SCHEMA
) -> Plaintext | None:
    """What is left of the time before a stream was confidential; None where it is not."""
    if not policy.is_confidential:
        return None
    query = Queries("policy.sql", schema)["plaintext"]
    row = connection.execute(query, {"stream_name": policy.stream_name}).fetchone()
    assert row is not None
    return Plaintext(*row)


def purge_hot_log(settings: Settings, stream_name: str) -> int:
    """Remove all entries of a stream but the last from the hot log; readers go to PostgreSQL.

    Returns how many. The last one goes as soon as others follow and it is done again.
    """
    if settings.redis_url is None:
        return 0
    log = RedisLog(settings.redis_url, prefix=settings.redis_prefix)
    try:
        last = log.last(stream_name)
        return 0 if last is None else log.trim(stream_name, through=last)
    finally:
        log.close()


def described(policy: StreamPolicy) -> str:
    """The policy in one line, as it would be written on the command line."""
    words = [str(policy.security_level)]
    for member in policy.members:
        role = "" if member.role_name is None else f"={member.role_name}"
        words.append(f"--{member.kind} {member.name}{role}")
    if policy.is_confidential:
        words.append(f"--kms {policy.kms_key_id} --rotate-days {policy.dek_rotation_days}")
    return " ".join(words)


def _prepare_keys(connection: Connection, policy: StreamPolicy, schema: str) -> None:
    assert policy.kms_key_id is not None, "a confidential stream has a key that wraps others"
    kms = kms_for(policy.kms_key_id)
    if is_file(policy.kms_key_id):
        assert isinstance(kms, KeyFile)
        kms.create()
    keys = DataKeys(schema)
    active = keys.prepare(connection, policy.stream_name, policy.kms_key_id)
    for key in keys.read(connection, policy.stream_name):
        if key.version == active and key.is_shredded:
            # Shredded while the stream was open; what nobody can read must not be sealed with it.
            keys.rotate(connection, policy.stream_name)


def _require_roles(policies: Policies, connection: Connection, policy: StreamPolicy) -> None:
    wanted = {member.role_name for member in policy.members if member.role_name is not None}
    unknown = policies.unknown_roles(connection, wanted)
    if unknown:
        raise OperationRefused(
            f"PostgreSQL has no role {', '.join(map(repr, unknown))}. Nothing was changed; create "
            "it first, or leave =ROLE out where only the owner and workers use that name."
        )


def _strangers(
    connection: Connection, policy: StreamPolicy, schema: str
) -> tuple[tuple[str, str], ...]:
    if not policy.is_limited:
        return ()
    query = Queries("policy.sql", schema)["strangers"]
    known = connection.execute(query, {"stream_name": policy.stream_name}).fetchall()
    named = {(str(member.kind), member.name) for member in policy.members}
    return tuple((kind, name) for kind, name in known if (kind, name) not in named)
