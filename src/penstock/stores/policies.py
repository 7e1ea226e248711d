"""The policies of streams, as PostgreSQL keeps them, and as senders remember them for a while."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import orjson
import psycopg

from penstock.core.policy import Member, MemberKind, SecurityLevel, StreamPolicy
from penstock.errors import OperationRefused
from penstock.stores.queries import DEFAULT_SCHEMA, Queries
from penstock.stores.questions import Statement

Connection = psycopg.Connection[Any]
POLICY_SECONDS = 30.0
"""For how long a sender may not know of a change. PostgreSQL itself enforces it at once."""
REMEMBERED_MAX = 10_000
LOCK_SECONDS = 5.0
"""How long a change waits for the outbox, and all senders with it."""

_remembered: dict[tuple[object, str, str], tuple[float, StreamPolicy]] = {}


# ── as senders ask ─────────────────────────────────────────────────────────────────────────────


def read_statement(schema: str, stream_name: str) -> Statement:
    """The question for one stream's policy, for any driver; `decode` reads the answer."""
    return Statement(Queries("policy.sql", schema)["read"], {"stream_name": stream_name})


def decode(stream_name: str, rows: Sequence[Any]) -> StreamPolicy:
    """The policy in the rows that `read_statement` is answered with; none: an open stream."""
    return _policy(rows[0]) if rows else StreamPolicy(stream_name=stream_name)


def remembered_policy(
    place: object, schema: str, stream_name: str
) -> Generator[Statement, Sequence[Any], StreamPolicy]:
    """A stream's policy, at most POLICY_SECONDS old; asks one question, or none.

    `place` tells databases apart.
    """
    identity = (place, schema, stream_name)
    known = _remembered.get(identity)
    if known is not None and known[0] > time.monotonic():
        return known[1]
    # Before the question: what changes while it is answered counts from now on.
    until = time.monotonic() + POLICY_SECONDS
    policy = decode(stream_name, (yield read_statement(schema, stream_name)))
    if len(_remembered) >= REMEMBERED_MAX:
        _remembered.clear()
    _remembered[identity] = (until, policy)
    return policy


def forget_policies() -> None:
    """Remember nothing: PostgreSQL refused what a remembered policy allows."""
    _remembered.clear()


# ── as operators do ────────────────────────────────────────────────────────────────────────────


class Policies:
    """The tables `stream_policy` and `policy_member`; callers bring connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._schema = schema
        self._sql = Queries("policy.sql", schema)

    def read(self, connection: Connection, stream_name: str) -> StreamPolicy:
        """One stream's policy; an open one where none is written."""
        statement = read_statement(self._schema, stream_name)
        return decode(stream_name, connection.execute(*statement).fetchall())

    def read_all(self, connection: Connection) -> list[StreamPolicy]:
        """Every policy that is written, by stream."""
        rows = connection.execute(self._sql["read"], {"stream_name": None}).fetchall()
        return [_policy(row) for row in rows]

    def lock(self, connection: Connection) -> None:
        """Until the transaction ends nobody else changes a policy."""
        connection.execute(self._sql["lock"])

    def write(self, connection: Connection, policy: StreamPolicy) -> None:
        """Write a policy and its members, for the library to read; `enforce` has to follow.

        The active key stays as it is: whoever makes keys sets it.
        """
        stream = {"stream_name": policy.stream_name}
        connection.execute(
            self._sql["write"],
            {
                **stream,
                "security_level": policy.security_level,
                "encryption_alg": policy.encryption_alg,
                "kms_key_id": policy.kms_key_id,
                "dek_rotation_days": policy.dek_rotation_days,
            },
        )
        connection.execute(self._sql["remove_members"], stream)
        for member in policy.members:
            connection.execute(
                self._sql["add_member"],
                {**stream, "kind": member.kind, "name": member.name, "role_name": member.role_name},
            )

    def enforce(self, connection: Connection) -> None:
        """Have PostgreSQL enforce what is written, from COMMIT on; let that follow soon.

        Until then senders may have to wait. Raises OperationRefused where some transaction has
        the outbox in use for longer than they should have to.
        """
        limit = {"milliseconds": str(int(LOCK_SECONDS * 1000))}
        connection.execute(self._sql["limit_waiting"], limit)
        try:
            connection.execute(self._sql["apply"])
        except psycopg.errors.LockNotAvailable as error:
            raise OperationRefused(
                f"Some transaction has used the outbox for longer than {LOCK_SECONDS:.0f} s, and "
                "senders must not wait behind this. Nothing was changed; try again, or end that "
                "transaction first."
            ) from error

    def set_wrapping_key(self, connection: Connection, stream_name: str, kms_key_id: str) -> None:
        """New data keys of a stream are wrapped with this key from now on."""
        parameters = {"stream_name": stream_name, "kms_key_id": kms_key_id}
        connection.execute(self._sql["set_wrapping_key"], parameters)

    def record(self, connection: Connection, stream_name: str, change: str, by: str) -> None:
        """Note for ever who has changed what."""
        parameters = {"stream_name": stream_name, "change": change, "changed_by": by}
        connection.execute(self._sql["record"], parameters)

    def unknown_roles(self, connection: Connection, names: Iterable[str]) -> list[str]:
        """Those of these roles that the server does not have."""
        rows = connection.execute(self._sql["unknown_roles"], {"names": list(names)})
        return [name for (name,) in rows.fetchall()]


def _policy(row: Sequence[Any]) -> StreamPolicy:
    stream_name, level, algorithm, kms_key_id, rotation_days, key_version, members = row
    named = [
        Member(MemberKind(kind), name, role_name)
        for kind, name, role_name in orjson.loads(members or "[]")
    ]
    return StreamPolicy(
        stream_name=stream_name,
        security_level=SecurityLevel(level),
        encryption_alg=algorithm,
        kms_key_id=kms_key_id,
        dek_rotation_days=rotation_days,
        active_key_version=key_version,
        producers=tuple(one for one in named if one.kind is MemberKind.PRODUCER),
        consumers=tuple(one for one in named if one.kind is MemberKind.CONSUMER),
    )
