"""Users for Redis: each may do with a stream's keys what its part in the policies needs, no more.

A line is a user's whole definition: written again, it takes away what the policies took away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.core.policy import Member, StreamPolicy
from penstock.core.timer_keys import KeyNames

# What a reader of the hot log sends, and what the script that looks for its end calls; wrapped
# data keys lie beside the log.
READING_COMMANDS = (
    *("xread", "xrevrange", "hmget", "get", "evalsha", "script|load"),
    *("info", "ping", "select"),
)
# What publishing calls besides, and keeping wrapped data keys there.
WRITING_COMMANDS = (
    *("xadd", "xtrim", "xlen", "del", "set", "hset", "hget", "hincrby", "time", "memory|usage"),
)
# What the scripts of Redis timers call, and what wakes their workers.
TIMER_COMMANDS = (
    *("evalsha", "eval", "script|load", "time", "publish", "subscribe", "unsubscribe"),
    *("zadd", "zrem", "zscore", "zrange", "zrangebyscore", "zcard", "unlink"),
    *("hget", "hset", "hdel", "hlen", "hscan", "hrandfield", "info", "ping", "select"),
)
PASSWORD = "…"  # noqa: S105 - the place where one goes
WORKER = "penstock_worker"
"""The user of workers, unless they have another."""


@dataclass(frozen=True, slots=True)
class RedisUser:
    """One user, and the line that makes it."""

    name: str
    what_for: str
    line: str


def reader_line(user: str, prefix: str, stream_names: Iterable[str]) -> str:
    """A user that reads these streams' hot logs and writes nothing."""
    return _line(user, [_keys(prefix, name) for name in stream_names], READING_COMMANDS)


def worker_line(user: str, prefix: str) -> str:
    """A user that publishes, reads and trims every stream."""
    return _line(user, [f"~{prefix}:*"], (*READING_COMMANDS, *WRITING_COMMANDS))


def timer_line(user: str, names: KeyNames) -> str:
    """A user that publishes, handles and looks at Redis timers of all topics, under these names."""
    keys = names.of("*")
    stored = (keys.timeline, keys.payloads, keys.state, keys.dead)
    return _line(user, (*(f"~{name}" for name in stored), f"&{keys.channel}"), TIMER_COMMANDS)


def users_of(
    policies: Sequence[StreamPolicy],
    prefix: str,
    *,
    stream_name: str | None = None,
    worker: str = WORKER,
) -> list[RedisUser]:
    """The users that the policies ask for: the workers', and one for each named consumer.

    With a stream, those that have to do with it; a consumer of several has them all in its line.
    """
    streams_of: dict[str, list[str]] = {}
    names_of: dict[str, list[str]] = {}
    for policy in policies:
        for member in policy.consumers if policy.is_limited else ():
            streams_of.setdefault(user_of(member), []).append(policy.stream_name)
            names_of.setdefault(user_of(member), []).append(member.name)
    users = [RedisUser(worker, "workers", worker_line(worker, prefix))]
    for user, streams in streams_of.items():
        if stream_name is None or stream_name in streams:
            what_for = ", ".join(dict.fromkeys(names_of[user]))
            users.append(RedisUser(user, what_for, reader_line(user, prefix, streams)))
    return users


def user_of(member: Member) -> str:
    """The user's name: its role's in PostgreSQL or, without one, its own."""
    return member.role_name or member.name


def _keys(prefix: str, stream_name: str) -> str:
    # The braces are the keys' own: they keep a stream on one node of a cluster.
    return f"~{prefix}:{{{stream_name}}}:*"


def _line(user: str, keys: Iterable[str], commands: Iterable[str]) -> str:
    # `reset` would end the user's connections; these words set everything just the same.
    reset = f"on resetpass >{PASSWORD} resetkeys resetchannels -@all"
    rights = (*keys, *(f"+{command}" for command in commands))
    return f"ACL SETUSER {user} {reset} {' '.join(rights)}"
