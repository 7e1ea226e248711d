"""`penstock doctor` finds what is wrong around a pipeline, and says how to mend it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest
import redis

from penstock.core.diagnosis import (
    Level,
    expected_indexes,
    judge_clock,
    judge_connections,
    judge_lease,
    judge_parameters,
    judge_redis,
    judge_timer_redis,
)
from penstock.core.redis_acl import reader_line
from penstock.stores.migrations import migrations
from tests.test_cli import Penstock
from tests.test_janitor import Books


@pytest.fixture
def penstock(
    tmp_path: Path, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    variables = {"PENSTOCK_DATABASE_URL": database_url, "PENSTOCK_REDIS_URL": redis_url}
    return Penstock(tmp_path, variables, capsys)


def troubles(penstock: Penstock, code: int = 0) -> list[tuple[str, str]]:
    found: list[dict[str, Any]] = json.loads(penstock("doctor", "--json", code=code).stdout)
    assert all(finding["fix"] for finding in found if finding["level"] != "good")
    return [(each["check"], each["what"]) for each in found if each["level"] != "good"]


def others(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without what is true of the tests' own server, which runs without fsync."""
    return [(check, what) for check, what in found if check != "durability"]


def test_a_sound_place_has_nothing_but_good_findings(penstock: Penstock) -> None:
    found = troubles(penstock, code=1)
    assert others(found) == []
    assert {check for check, _ in found} == {"durability"}
    printed = penstock("doctor", code=1).stdout
    assert "ok    migrations" in printed
    assert "FAIL  durability" in printed
    assert "→ set fsync = on" in printed


def test_a_missing_index_and_a_long_transaction_are_found(
    penstock: Penstock, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.ops.doctor.LONG_SECONDS", 0.0)
    with (
        psycopg.connect(database_url, autocommit=True) as connection,
        psycopg.connect(database_url, application_name="sleepy") as sleeper,
    ):
        connection.execute("DROP INDEX events.dead_letter_group")
        sleeper.execute("SELECT 1")
        found = others(troubles(penstock, code=1))
    assert ("indexes", "missing: dead_letter_group") in found
    assert any(check == "transactions" and "sleepy (pid" in what for check, what in found)


def test_an_abandoned_consumer_is_found(penstock: Penstock, database_url: str) -> None:
    books = Books(database_url)
    books.stream(head=25)
    books.consumer("shop.bill", 5)
    assert others(troubles(penstock, code=1)) == []
    books.connection.execute(
        "UPDATE events.stream_lease SET updated_at = now() - interval '3 days'"
    )
    [(check, what)] = others(troubles(penstock, code=1))
    books.connection.close()
    assert check == "consumers"
    assert what.startswith("shop.bill is 20 events behind and was last seen 3.0 days ago")


def test_a_role_without_rights_is_told_what_it_lacks(penstock: Penstock, database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE doctor_stranger LOGIN")
        connection.execute("GRANT USAGE ON SCHEMA events TO doctor_stranger")
        connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA events TO doctor_stranger")
        try:
            connection.execute("ALTER ROLE doctor_stranger SET statement_timeout = '5s'")
            connection.execute("ALTER ROLE doctor_stranger SET idle_session_timeout = '1h'")
            url = psycopg.conninfo.make_conninfo(database_url, user="doctor_stranger")
            penstock.variables["PENSTOCK_DATABASE_URL"] = _as_url(url)
            found = others(troubles(penstock, code=1))
        finally:
            connection.execute("DROP OWNED BY doctor_stranger")
            connection.execute("DROP ROLE doctor_stranger")
    [rights] = [what for check, what in found if check == "rights"]
    assert "outbox_event INSERT" in rights
    assert any("statement_timeout is 5,000 ms" in what for _, what in found)
    assert any("idle_session_timeout is 3,600,000 ms" in what for _, what in found)


def _as_url(conninfo: str) -> str:
    parts = psycopg.conninfo.conninfo_to_dict(conninfo)
    return (
        f"postgresql://{parts['user']}@/{parts['dbname']}?host={parts['host']}&port={parts['port']}"
    )


def test_servers_that_are_away_are_problems(penstock: Penstock) -> None:
    penstock.variables["PENSTOCK_REDIS_URL"] = "redis://127.0.0.1:1/0"
    assert any(check == "redis" for check, _ in troubles(penstock, code=1))
    penstock.variables["PENSTOCK_DATABASE_URL"] = "postgresql://127.0.0.1:1/none"
    assert any(check == "postgresql" for check, _ in troubles(penstock, code=1))


def test_redis_that_throws_away_is_found(penstock: Penstock, redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            found = others(troubles(penstock, code=1))
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert [check for check, what in found if "allkeys-lru" in what] == ["redis"]


def test_a_wrong_password_is_told_as_one(penstock: Penstock, redis_url: str) -> None:
    penstock.variables["PENSTOCK_REDIS_URL"] = redis_url.replace("//", "//nobody:canary@")
    [(check, what)] = others(troubles(penstock, code=1))
    assert check == "redis"
    assert "refuses this user" in what
    assert "canary" not in what


def test_a_reader_by_policy_may_ask_what_is_asked(penstock: Penstock, redis_url: str) -> None:
    user = f"reader_{uuid4().hex}"
    with redis.Redis.from_url(redis_url) as opened:
        client: Any = opened
        line = reader_line(user, "penstock", ["orders"]).replace("…", "hush")
        client.execute_command(*line.split())
        try:
            url = redis_url.replace("//", f"//{user}:hush@")
            penstock.variables["PENSTOCK_REDIS_URL"] = url
            assert others(troubles(penstock, code=1)) == []
        finally:
            client.acl_deluser(user)


def test_the_server_of_the_timers_is_looked_at_too(penstock: Penstock, redis_url: str) -> None:
    penstock.variables["PENSTOCK_TIMER_REDIS_URL"] = "redis://127.0.0.1:1/0"
    [(check, what)] = others(troubles(penstock, code=1))
    assert check == "timers"
    assert "127.0.0.1:1" in what
    penstock.variables["PENSTOCK_TIMER_REDIS_URL"] = redis_url.replace("/0", "/1")
    assert all(check == "timers" for check, _ in others(troubles(penstock, code=1)))
    assert "ok    timers        valkey" in penstock("doctor", code=1).stdout


def test_judgements() -> None:
    assert judge_clock("x", 1.0).level is Level.GOOD
    assert judge_clock("x", -600.0).level is Level.WARNING
    assert judge_lease(1.0).level is Level.WARNING
    assert judge_connections(90, 100).level is Level.WARNING
    bad = {
        "synchronous_commit": "off",
        "autovacuum": "off",
        "default_transaction_read_only": "on",
        "default_transaction_isolation": "serializable",
        "server_encoding": "SQL_ASCII",
    }
    assert len(list(judge_parameters(bad))) == 5
    replica = {"role": "slave", "maxmemory": 1000, "aof_enabled": 1}
    assert len(list(judge_redis(replica, "volatile-lru", 2000))) == 2
    cluster = {"cluster_enabled": 1, "aof_enabled": 1}
    [found] = judge_redis(cluster, "noeviction", 2000)
    assert "cluster" in found.what
    assert list(judge_timer_redis(cluster, "noeviction", hash_tags=True)) == []
    levels = [each.level for each in judge_timer_redis(cluster, "allkeys-lru", hash_tags=False)]
    assert levels == [Level.PROBLEM, Level.PROBLEM]
    forgetful = {"role": "slave", "aof_enabled": 0}
    levels = [each.level for each in judge_timer_redis(forgetful, None, hash_tags=False)]
    assert levels == [Level.PROBLEM, Level.WARNING]
    indexes = expected_indexes(migration.sql for migration in migrations())
    assert "timer_next" in indexes
    assert "timer_due" not in indexes
