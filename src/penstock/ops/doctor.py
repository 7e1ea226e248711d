"""Looks at the surroundings of a pipeline: servers, rights, schema, clocks, who is in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg

from penstock.core.diagnosis import (
    Finding,
    expected_indexes,
    good,
    judge_clock,
    judge_connections,
    judge_indexes,
    judge_lease,
    judge_parameters,
    judge_redis,
    judge_timer_redis,
    problem,
    warning,
)
from penstock.core.masking import masked_url
from penstock.core.settings import DAY_SECONDS, Settings
from penstock.errors import PenstockError, SchemaMismatch, ServerUnavailable, ServerUnsuitable
from penstock.stores.migrations import migrations, require_current
from penstock.stores.postgres import connect, limit
from penstock.stores.queries import Queries
from penstock.stores.redis_server import RedisLook, look_at
from penstock.stores.wakeup import Wakeup

LONG_SECONDS = 300.0
STATEMENT_SECONDS = 10.0
ABANDONED_SECONDS = 1.0 * DAY_SECONDS

Connection = psycopg.Connection[Any]


def examine(settings: Settings) -> Iterator[Finding]:
    """One finding after the other. What one check needs and has not got is that check's finding."""
    yield judge_lease(settings.lease_seconds)
    yield from _redis(settings)
    try:
        connection = connect(settings.database_url, "penstock doctor")
    except (ServerUnavailable, ServerUnsuitable) as error:
        yield problem("postgresql", str(error), "start it, or set PENSTOCK_DATABASE_URL")
        return
    with connection:
        yield from _Examination(settings, connection).run()


class _Examination:
    """The checks that PostgreSQL answers."""

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._sql = Queries("doctor.sql", settings.schema)

    def run(self) -> Iterator[Finding]:
        # Whoever looks must not become the load.
        limit(self._connection, statement_seconds=STATEMENT_SECONDS)
        for check in (self._server, self._pooler, self._transactions):
            yield from self._guarded(check)
        try:
            require_current(self._connection, self._settings.schema)
        except SchemaMismatch as error:
            yield problem("migrations", str(error), "run `penstock migrate`")
            return
        yield good("migrations", f"the schema {self._settings.schema} is this release's")
        for check in (self._rights, self._indexes, self._abandoned):
            yield from self._guarded(check)

    def _guarded(self, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
        try:
            yield from check()
        except (psycopg.Error, PenstockError) as error:
            name = check.__name__.strip("_")
            yield warning(name, f"could not be looked at: {str(error).strip()}", "ask a superuser")

    def _rows(self, name: str, **parameters: Any) -> list[Any]:
        return self._connection.execute(self._sql[name], parameters).fetchall()

    def _server(self) -> Iterator[Finding]:
        [(version, now, is_standby, used)] = self._rows("surroundings")
        if is_standby:
            yield problem("postgresql", "the server is a standby", "name the primary")
        else:
            yield good("postgresql", f"version {version}")
        yield judge_clock("PostgreSQL", (now - datetime.now(UTC)).total_seconds())
        parameters = dict(self._rows("parameters"))
        yield from judge_parameters(parameters)
        reserved = int(parameters.get("superuser_reserved_connections", "0"))
        yield judge_connections(used, int(parameters["max_connections"]) - reserved)

    def _pooler(self) -> Iterator[Finding]:
        if self._settings.wakeup == "poll":
            yield good("pooler", "wakeup is poll: nothing is asked of a pooler")
            return
        wakeup = Wakeup(self._settings.database_url, self._settings.schema)
        try:
            hears = wakeup.hears(self._connection, threading.Event())
        finally:
            wakeup.close()
        if hears:
            yield good("pooler", "notifications arrive: a direct connection, or a session pool")
            return
        yield warning(
            "pooler",
            "notifications do not arrive, as behind pgbouncer in transaction mode: publishers "
            "poll twenty times a second",
            "give workers a direct connection (PENSTOCK_DATABASE_URL), or set wakeup=poll",
        )

    def _transactions(self) -> Iterator[Finding]:
        long = self._rows("long_transactions", seconds=LONG_SECONDS)
        for pid, application, state, seconds in long:
            yield warning(
                "transactions",
                f"{application or 'somebody'} (pid {pid}, {state}) has had one open for "
                f"{seconds:,.0f} s: vacuum and pruning wait for it",
                f"find out what it does; pg_terminate_backend({pid}) ends it",
            )
        forgotten = self._rows("prepared_transactions", seconds=LONG_SECONDS)
        for name, seconds in forgotten:
            yield warning(
                "transactions",
                f"{name} has been prepared for {seconds:,.0f} s and holds its locks",
                "COMMIT PREPARED or ROLLBACK PREPARED",
            )
        if not long and not forgotten:
            yield good("transactions", f"none is older than {LONG_SECONDS:g} s")

    def _rights(self) -> Iterator[Finding]:
        missing = [name for (name,) in self._rows("privileges", schema=self._settings.schema)]
        if missing:
            yield warning(
                "rights",
                f"this role cannot: {', '.join(missing)}",
                "workers need all of them (docs/POLICY.md); whoever only sends needs less",
            )
        else:
            yield good("rights", "this role may do what workers do")

    def _indexes(self) -> Iterator[Finding]:
        there = dict(self._rows("indexes", schema=self._settings.schema))
        expected = expected_indexes(migration.sql for migration in migrations())
        yield from judge_indexes(expected, there)

    def _abandoned(self) -> Iterator[Finding]:
        found = self._rows("abandoned", seconds=ABANDONED_SECONDS)
        for name, behind, seconds, is_remote in found:
            option = " --remote" if is_remote else ""
            yield warning(
                "consumers",
                f"{name} is {behind:,} events behind and was last seen "
                f"{seconds / DAY_SECONDS:,.1f} days ago: the outbox is kept for it",
                f"start it, or `penstock consumers forget{option} {name}`",
            )
        if not found:
            yield good("consumers", "none is abandoned")


def _redis(settings: Settings) -> Iterator[Finding]:
    if settings.redis_url is None:
        yield good("redis", "none is used: PostgreSQL alone serves the reads")
    else:
        look = yield from _looked("redis", settings.redis_url, "until then PostgreSQL serves reads")
        if look is not None:
            limit = settings.hot_log_bytes_max
            yield from judge_redis(look.information, look.eviction, limit)
    if settings.timer_redis_url not in (None, settings.redis_url):
        look = yield from _looked("timers", str(settings.timer_redis_url), "timers wait in it")
        if look is not None:
            tags = settings.timer_hash_tags
            yield from judge_timer_redis(look.information, look.eviction, hash_tags=tags)


def _looked(check: str, url: str, meanwhile: str) -> Generator[Finding, None, RedisLook | None]:
    """What can be said of any server; returns what it said, or nothing."""
    variable = "PENSTOCK_REDIS_URL" if check == "redis" else "PENSTOCK_TIMER_REDIS_URL"
    try:
        look = look_at(url)
    except ServerUnavailable as error:
        fix = f"start it, or correct {variable}; {meanwhile}"
        yield problem(check, f"{masked_url(url)}: {error}", fix)
        return None
    except ServerUnsuitable as error:
        fix = f"correct {variable}: address, user, password; {meanwhile}"
        yield problem(check, f"{masked_url(url)}: {error}", fix)
        return None
    yield good(check, look.server)
    if look.now is not None:
        yield judge_clock("Redis", (look.now - datetime.now(UTC)).total_seconds())
    return look
