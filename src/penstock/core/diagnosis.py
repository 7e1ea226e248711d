"""What is wrong with the surroundings of a pipeline, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

CLOCK_SECONDS_MAX = 2.0
CONNECTIONS_SHARE_MAX = 0.8
LEASE_SECONDS_MIN = 5.0
_LIMITS: Final = {
    "statement_timeout": "a handler that takes longer fails",
    "idle_in_transaction_session_timeout": "a handler that takes longer fails",
    "transaction_timeout": "a handler that takes longer fails",
    "lock_timeout": "whoever waits longer for another transaction fails, and tries again",
    "idle_session_timeout": "workers that have nothing to do lose their connections all the time",
}
_INDEX = re.compile(r"^CREATE (?:UNIQUE )?INDEX (\w+)", re.MULTILINE)
_DROPPED = re.compile(r"^DROP INDEX events\.(\w+)", re.MULTILINE)


class Level(StrEnum):
    """How bad it is."""

    GOOD = "good"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of one check."""

    check: str
    level: Level
    what: str
    fix: str = ""


def good(check: str, what: str) -> Finding:
    """Nothing to do."""
    return Finding(check, Level.GOOD, what)


def warning(check: str, what: str, fix: str) -> Finding:
    """It works, and will not always."""
    return Finding(check, Level.WARNING, what, fix)


def problem(check: str, what: str, fix: str) -> Finding:
    """It does not work, or a promise does not hold."""
    return Finding(check, Level.PROBLEM, what, fix)


# ── PostgreSQL ─────────────────────────────────────────────────────────────────────────────────


def judge_parameters(parameters: Mapping[str, str]) -> Iterator[Finding]:
    """What the server was told that the promises depend on."""
    for name in ("fsync", "full_page_writes"):
        if parameters.get(name) == "off":
            yield problem(
                "durability",
                f"{name} is off: a crash of the machine may damage everything",
                f"set {name} = on in postgresql.conf",
            )
    if parameters.get("synchronous_commit") == "off":
        yield problem(
            "durability",
            "synchronous_commit is off: a crash loses commits that applications were told of",
            "set synchronous_commit = on, at least for this database and its roles",
        )
    if parameters.get("autovacuum") == "off":
        yield warning(
            "vacuum", "autovacuum is off: tables that come and go grow without end", "turn it on"
        )
    if parameters.get("default_transaction_read_only") == "on":
        yield problem(
            "read only",
            "default_transaction_read_only is on for this role",
            "ALTER ROLE … RESET default_transaction_read_only",
        )
    if (encoding := parameters.get("server_encoding", "UTF8")) != "UTF8":
        yield problem(
            "encoding",
            f"the database is encoded as {encoding}: what is no UTF-8 there stops its stream",
            "move to a database that was made with CREATE DATABASE … ENCODING 'UTF8'",
        )
    isolation = parameters.get("default_transaction_isolation", "read committed")
    if isolation != "read committed":
        yield warning(
            "isolation",
            f"transactions are {isolation} by default, and those of handlers are read committed",
            "lock what a handler decides by (SELECT … FOR UPDATE); if workers go through a pooler, "
            "also ALTER ROLE … RESET default_transaction_isolation for their role",
        )
    yield from _time_limits(parameters)


def _time_limits(parameters: Mapping[str, str]) -> Iterator[Finding]:
    for name, meaning in _LIMITS.items():
        if milliseconds := int(parameters.get(name, "0")):
            yield warning(
                "time limits",
                f"{name} is {milliseconds:,} ms for this role: {meaning}",
                f"ALTER ROLE … SET {name} = 0 for the role of the workers; they have time limits "
                "of their own (timeout_seconds)",
            )


def judge_clock(name: str, apart_seconds: float) -> Finding:
    """Whether a clock agrees with this host's. Nothing depends on it but what people read."""
    if abs(apart_seconds) <= CLOCK_SECONDS_MAX:
        return good("clock", f"{name} agrees with this host to {abs(apart_seconds):.1f} s")
    order = "ahead of" if apart_seconds > 0 else "behind"
    return warning(
        "clock",
        f"the clock of {name} is {abs(apart_seconds):,.0f} s {order} this host's",
        "let both follow NTP; leases and timers go by the server's clock and are not in danger",
    )


def judge_connections(used: int, allowed: int) -> Finding:
    """Whether the next worker finds a place."""
    if used <= allowed * CONNECTIONS_SHARE_MAX:
        return good("connections", f"{used} of {allowed} are used")
    return warning(
        "connections",
        f"{used} of {allowed} are used",
        "raise max_connections, pack consumers with --processes, or pool the application's",
    )


def expected_indexes(migrations: Iterable[str]) -> set[str]:
    """The names of all indexes that migrations made and kept."""
    names: set[str] = set()
    for sql in migrations:
        names |= set(_INDEX.findall(sql))
        names -= set(_DROPPED.findall(sql))
    return names


def judge_indexes(expected: set[str], there: Mapping[str, bool]) -> Iterator[Finding]:
    """Whether every index is there and in use."""
    missing = sorted(expected - there.keys())
    if missing:
        yield problem(
            "indexes",
            f"missing: {', '.join(missing)}",
            "`penstock migrate --sql` prints how each was made; create it CONCURRENTLY",
        )
    if broken := sorted(name for name, is_valid in there.items() if not is_valid):
        yield problem("indexes", f"not valid: {', '.join(broken)}", "REINDEX INDEX CONCURRENTLY …")
    if not missing and not broken:
        yield good("indexes", f"all {len(expected)} are there")


# ── Redis ──────────────────────────────────────────────────────────────────────────────────────


def judge_redis(
    information: Mapping[str, object], policy: str | None, hot_log_bytes: int
) -> Iterator[Finding]:
    """Role, eviction, memory and persistence. The hot log may be lost, but not all the time."""
    if information.get("role") == "slave":
        yield problem(
            "redis", "the server is a replica: nothing can be appended", "name the primary"
        )
    if policy is not None and policy != "noeviction" and not policy.startswith("volatile"):
        yield warning(
            "redis",
            f"maxmemory-policy is {policy}: the log of a stream may vanish at any moment, and is "
            "filled again from PostgreSQL each time",
            "set maxmemory-policy to noeviction",
        )
    limit = int(str(information.get("maxmemory") or 0))
    if limit and limit < hot_log_bytes:
        yield warning(
            "redis",
            f"maxmemory is {limit:,} bytes, less than one stream's log may have "
            f"({hot_log_bytes:,})",
            "raise maxmemory, or lower hot_log_bytes_max",
        )
    if _is_on(information, "cluster_enabled"):
        yield warning(
            "redis",
            "the server is a node of a cluster: streams whose slots are on other nodes have no hot "
            "log, and PostgreSQL serves their reads",
            "name a server that is no cluster",
        )
    if not _is_on(information, "aof_enabled"):
        yield good(
            "redis",
            "no append-only file: the hot log is filled again after a restart. Redis timers, if "
            "you use them, would be lost",
        )


def judge_timer_redis(
    information: Mapping[str, object], policy: str | None, *, hash_tags: bool
) -> Iterator[Finding]:
    """Role, cluster, eviction and persistence. Timers are nowhere else."""
    if information.get("role") == "slave":
        yield problem(
            "timers", "the server is a replica: no timer can be armed", "name the primary"
        )
    if _is_on(information, "cluster_enabled") and not hash_tags:
        yield problem(
            "timers",
            "the server is a cluster, where the keys of a topic have to lie on one node",
            "set timer_hash_tags for everybody who uses these timers",
        )
    if policy is not None and policy != "noeviction" and not policy.startswith("volatile"):
        yield problem(
            "timers",
            f"maxmemory-policy is {policy}: timers may vanish at any moment",
            "set maxmemory-policy to noeviction",
        )
    if not _is_on(information, "aof_enabled"):
        yield warning(
            "timers", "no append-only file: a restart may lose timers", "set appendonly to yes"
        )


def _is_on(information: Mapping[str, object], name: str) -> bool:
    return bool(int(str(information.get(name) or 0)))


# ── settings ───────────────────────────────────────────────────────────────────────────────────


def judge_lease(lease_seconds: float) -> Finding:
    """Whether leases outlive a hiccup."""
    if lease_seconds >= LEASE_SECONDS_MIN:
        return good("leases", f"lease_seconds is {lease_seconds:g}")
    return warning(
        "leases",
        f"lease_seconds is {lease_seconds:g}: a pause of the network hands streams over",
        f"use {LEASE_SECONDS_MIN:g} or more; the default is 30",
    )
