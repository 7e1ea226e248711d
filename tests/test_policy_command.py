"""`penstock policy`: what it prints, what it changes, and that Redis keeps to it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock import Pipeline, RawEvent
from penstock.core.wrapped_keys import decode_keys
from penstock.errors import ServerUnsuitable
from penstock.stores.data_keys import DataKeys
from penstock.stores.redis_log import RedisLog
from penstock.stores.sealing import forget
from tests.bench_of_one import Workbench
from tests.roles import Roles, new_roles
from tests.signing import keys_of
from tests.test_cli import Penstock

CANARY = "canary-4711"


@pytest.fixture
def penstock(
    tmp_path: Path, database_url: str, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    variables = {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_ARCHIVE_URL": str(tmp_path / "archive"),
    }
    (tmp_path / "archive").mkdir()
    return Penstock(tmp_path, variables, capsys)


@pytest.fixture
def roles(database_url: str) -> Iterator[Roles]:
    with new_roles(database_url, "worker", "web", "billing") as made:
        yield made


def restrict(penstock: Penstock, roles: Roles, stream: str = "orders") -> str:
    return penstock(
        *("policy", "set", stream, "restricted"),
        *("--producer", f"shop={roles.name('web')}"),
        *("--consumer", f"billing.bill={roles.name('billing')}"),
    ).stdout


# ── restricted ─────────────────────────────────────────────────────────────────────────────────


def test_a_policy_is_set_shown_and_recorded(penstock: Penstock, roles: Roles) -> None:
    Workbench(roles.database_url, None).close()
    roles.owner.execute(
        "INSERT INTO events.contract_producer VALUES ('orders', 'T', 1, 'h', 'legacy')"
    )
    said = penstock("policy", "set", "orders", "restricted", "--producer", "shop")
    assert "orders is restricted --producer shop." in said.stdout
    assert "the producer legacy" in said.stderr
    assert "Without a role: shop" in said.stderr
    restrict(penstock, roles)
    shown = json.loads(penstock("policy", "show", "orders", "--json").stdout)
    assert shown["policy"]["producers"] == [
        {"kind": "producer", "name": "shop", "role_name": roles.name("web")}
    ]
    assert len(shown["changes"]) == 2
    assert "orders" in penstock("policy", "show").stdout
    assert roles.name("billing") in penstock("policy", "show", "orders").stdout
    assert json.loads(penstock("policy", "show", "--json").stdout)["passing"]["workers"] == []
    grants = penstock("policy", "show", "--grants", "--worker", roles.name("worker")).stdout
    roles.run([line for line in grants.splitlines() if not line.startswith("--")])
    passing = json.loads(penstock("policy", "show", "--json").stdout)["passing"]
    assert passing == {"workers": [roles.name("worker")], "administrators": []}


@pytest.mark.parametrize(
    "arguments",
    [
        ("set", "orders", "restricted"),
        ("set", "orders", "confidential"),
        ("set", "orders", "confidential", "--kms", "vault:x"),
        ("set", "orders", "open", "--producer", "shop"),
        ("acl",),
    ],
)
def test_what_makes_no_sense_changes_nothing(penstock: Penstock, arguments: Any) -> None:
    penstock("policy", *arguments, code=2)
    assert json.loads(penstock("policy", "show", "--json").stdout)["policies"] == []


def test_redis_keeps_to_the_printed_users(penstock: Penstock, roles: Roles, redis_url: str) -> None:
    for stream in ("orders", "payments"):
        restrict(penstock, roles, stream)
    penstock("policy", "set", "salaries", "restricted", "--producer", "shop")
    printed = penstock("policy", "acl", "orders", "--worker", roles.name("worker")).stdout
    lines = [line for line in printed.splitlines() if line.startswith("ACL ")]
    admin: Any
    with closing(redis.Redis.from_url(redis_url)) as admin:
        for line in lines:
            admin.execute_command(*line.replace("…", roles.password).split())
        try:
            check_users(roles, redis_url)
        finally:
            admin.acl_deluser(roles.name("worker"), roles.name("billing"))


def check_users(roles: Roles, redis_url: str) -> None:
    bench = Workbench(roles.database_url, roles.on_server(redis_url, "worker"))
    try:
        for stream in ("orders", "salaries"):
            bench.send(3, stream=stream)
        bench.publish()
    finally:
        bench.close()
    log = RedisLog(roles.on_server(redis_url, "worker"))
    log.write_keys("orders", b"copy")
    log.write_keys("salaries", b"copy")
    assert log.trim("orders", through=1) == 1
    log.close()
    reader = RedisLog(roles.on_server(redis_url, "billing"))
    assert [at for at, _ in reader.read("orders", after=0, count=9, wait_seconds=0)] == [2, 3]
    assert reader.last("orders") == 3
    assert reader.read_keys("orders") == b"copy"
    for forbidden in (
        lambda: reader.read("salaries", after=0, count=9, wait_seconds=0),
        lambda: reader.last("salaries"),
        lambda: reader.read_keys("salaries"),
        lambda: reader.write_keys("orders", b""),
        lambda: reader.trim("orders", through=3),
    ):
        with pytest.raises(ServerUnsuitable, match="refuses this user"):
            forbidden()
    reader.close()
    raw: Any
    with closing(redis.Redis.from_url(roles.on_server(redis_url, "billing"))) as raw:
        key = "penstock:{orders}:log"
        for command in (
            ("XADD", key, "*", "e", "x"),
            ("DEL", key),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("FLUSHDB",),
            ("CONFIG", "GET", "*"),
            ("ACL", "LIST"),
            ("EVAL", "return redis.call('DEL', KEYS[1])", "1", key),
            ("SUBSCRIBE", "x"),
            ("DUMP", "penstock:{salaries}:log"),
        ):
            with pytest.raises(redis.exceptions.NoPermissionError):
                raw.execute_command(*command)


# ── confidential ───────────────────────────────────────────────────────────────────────────────


def wrapped(database_url: str) -> dict[int, bytes | None]:
    query = "SELECT version, wrapped_key FROM events.data_key WHERE stream_name = 'orders'"
    with psycopg.connect(database_url) as connection:
        return dict(connection.execute(query).fetchall())


def test_a_key_is_made_rotated_wrapped_anew_and_shredded(
    penstock: Penstock, database_url: str, redis_url: str
) -> None:
    first, second = (f"file:{penstock.folder / name}" for name in ("first", "second"))
    bench = Workbench(database_url, None)
    bench.send(2)
    bench.close()
    said = penstock("policy", "set", "orders", "confidential", "--kms", first)
    assert "2 events in the outbox" in said.stderr
    penstock("policy", "rotate", "orders")
    before = wrapped(database_url)
    assert sorted(before) == [0, 1, 2]
    assert "3 keys" in penstock("policy", "rewrap", "orders", "--kms", second).stdout
    after = wrapped(database_url)
    assert not set(before.values()) & set(after.values())
    (penstock.folder / "first").unlink()
    penstock("policy", "rotate", "orders")
    penstock("policy", "shred", "orders", "1", code=2)
    penstock("policy", "shred", "orders", "1", "--yes=other", code=1)
    # The one that seals now stays.
    penstock("policy", "shred", "orders", "3", "--yes=orders", code=1)
    assert all(wrapped(database_url).values())
    for word in ("is", "was already"):
        done = penstock("policy", "shred", "orders", "1", "--yes=orders")
        assert f"{word} shredded" in done.stdout
        assert "backups taken earlier" in done.stderr
    assert wrapped(database_url)[1] is None
    log = RedisLog(redis_url)
    copies = [log.read_keys("orders"), *(read(penstock.folder / "archive"))]
    log.close()
    assert len(copies) == 2
    for copy in copies:
        assert copy is not None
        kept = decode_keys("orders", copy, keys_of(database_url))
        assert [key.version for key in kept if key.is_shredded] == [1]
    shown = json.loads(penstock("policy", "show", "orders", "--json").stdout)
    assert [bool(key["shredded_at"]) for key in shown["keys"]] == [False, True, False, False]
    assert shown["changes"][0]["change"] == "shred version 1"


def test_with_the_printed_grants_workers_rotate_and_producers_seal(
    penstock: Penstock, roles: Roles
) -> None:
    restrict(penstock, roles)
    key = f"file:{penstock.folder / 'key'}"
    penstock("policy", "set", "orders", "confidential", "--kms", key)
    grants = penstock("policy", "show", "--grants", "--worker", roles.name("worker")).stdout
    roles.run([line for line in grants.splitlines() if not line.startswith("--")])
    with roles.connected("worker") as worker:
        assert DataKeys().rotate(worker, "orders") == 2
    shop = Pipeline("shop", database_url=roles.url("web"), redis_url=None)
    forget()
    with closing(psycopg.connect(roles.url("web"))) as connection:
        shop.send(connection, "orders", RawEvent("T", {"card": CANARY}), key=CANARY)
        connection.commit()
    row = roles.owner.execute("SELECT o::text FROM events.outbox_event AS o").fetchone()
    assert row is not None
    assert CANARY not in row[0]
    assert "v2-" in row[0]


def test_with_the_printed_grants_producers_send_and_see_timers_by_command(
    tmp_path: Path, penstock: Penstock, roles: Roles, capsys: pytest.CaptureFixture[str]
) -> None:
    restrict(penstock, roles)
    grants = penstock("policy", "show", "--grants").stdout
    of_web = f" TO {roles.name('web')};"
    roles.run([line for line in grants.splitlines() if line.endswith(of_web)])
    web = Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": roles.url("web")}, capsys)
    web("send", "--stream", "mails", "--event-type", "T")
    web("timers", "list")


def read(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.rglob("keys.json")]


def test_a_copy_that_cannot_be_removed_is_told(penstock: Penstock) -> None:
    key = f"file:{penstock.folder / 'key'}"
    penstock("policy", "set", "orders", "confidential", "--kms", key)
    penstock("policy", "rotate", "orders")
    shredding = ("policy", "shred", "orders", "1", "--yes=orders")
    away = "redis://127.0.0.1:1/0"
    done = penstock(*shredding, code=1, REDIS_URL=away)
    assert "Not up to date: beside the hot log" in done.stderr
    assert "Say it again" in done.stderr
    penstock(*shredding)


def test_going_back_to_plain_text_has_to_be_forced(penstock: Penstock) -> None:
    key = f"file:{penstock.folder / 'key'}"
    penstock("policy", "set", "orders", "confidential", "--kms", key)
    assert "--force" in penstock("policy", "set", "orders", "open", code=1).stderr
    penstock("policy", "set", "orders", "open", "--force")
    # Shredded meanwhile, the last key is not used again.
    penstock("policy", "shred", "orders", "1", "--yes=orders")
    penstock("policy", "set", "orders", "confidential", "--purge-hot-log")
    shown = json.loads(penstock("policy", "show", "orders", "--json").stdout)
    assert shown["policy"]["active_key_version"] == 2
