"""Confidential events on their way into the archive and back, and when their key is shredded."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import zstandard

from penstock.core.settings import Settings
from penstock.ops.policy_keys import rotate, shred
from penstock.stores import sealing
from penstock.stores.data_keys import DataKeys
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.servers import Servers
from penstock.telemetry import signals
from tests import canary
from tests.databases import new_database
from tests.test_cli import Penstock
from tests.test_consumer import heard
from tests.vault import STREAM, Admitted, Vault, new_key_file
from tests.waiting import wait_until

CANARY = "Nebelkraut-3308-VB"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def vault(database_url: str, redis_url: str, tmp_path: Path, archive: Path) -> Iterator[Vault]:
    settings = {"archive_url": str(archive), "archive_age_seconds": 0.1}
    vault = Vault(database_url, redis_url, new_key_file(tmp_path), **settings)
    vault.make_confidential()
    yield vault
    vault.close()


def archived(vault: Vault, count: int) -> None:
    """Publish and archive so many events, and let the outbox and the hot log forget them."""
    with vault.working(roles=("publisher", "archiver")):
        wait_until(lambda: _archived_events(vault) == count, what="everything is archived")
    vault.connection.execute("DELETE FROM events.outbox_event")
    with closing(redis.Redis.from_url(str(vault.redis_url))) as client:
        client.flushdb()


def _archived_events(vault: Vault) -> int:
    (count,) = vault.row(
        "SELECT coalesce(sum(events), 0) FROM events.archive_object WHERE archived_at IS NOT NULL"
    )
    return int(count)


def noting(seen: list[str]) -> Any:
    def handler(event: Admitted) -> None:
        seen.append(event.diagnosis)

    return handler


def unpacked(folder: Path) -> dict[str, bytes]:
    """What lies in an archive, objects decompressed."""
    return {
        path.name: zstandard.ZstdDecompressor().stream_reader(path.read_bytes()).read()
        if path.suffix == ".zst"
        else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_archive_and_dump_hold_ciphertext(vault: Vault, archive: Path) -> None:
    with psycopg.connect(vault.database_url) as connection:
        event = Admitted(patient=f"{CANARY} key", diagnosis=CANARY)
        vault.pipeline.send(connection, STREAM, event, metadata={"about": CANARY})
    with vault.working(roles=("publisher", "archiver")):
        wait_until(lambda: _archived_events(vault) == 1, what="it is archived")
    found = unpacked(archive)
    assert any(b'"event_type":"patients.admitted"' in content for content in found.values())
    assert [name for name, content in found.items() if canary.is_in(CANARY, content)] == []
    with closing(redis.Redis.from_url(str(vault.redis_url))) as client:
        client.config_set("rdbcompression", "no")
        client.save()
        folder, name = (client.config_get(what)[what] for what in ("dir", "dbfilename"))
        dump = Path(str(folder)) / str(name)
    assert STREAM.encode() in dump.read_bytes()
    assert not canary.is_in(CANARY, dump.read_bytes())


def test_a_consumer_reads_and_opens_what_only_the_archive_has(vault: Vault) -> None:
    vault.send("one", "two")
    archived(vault, 2)
    vault.send("three")
    seen: list[str] = []
    with vault.working(noting(seen)):
        vault.wait_for_outcomes(*["handled"] * 3)
    assert seen == ["one", "two", "three"]


def test_keys_beside_the_archive_that_do_not_open_it_are_found(
    vault: Vault, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {
        "PENSTOCK_DATABASE_URL": vault.database_url,
        "PENSTOCK_ARCHIVE_URL": str(archive),
    }
    penstock = Penstock(tmp_path, variables, capsys)
    vault.send("one")
    archived(vault, 1)
    copy = archive / STREAM / "keys.json"
    former = copy.read_bytes()
    # A key that has sealed nothing here may be on its way.
    DataKeys().rotate(vault.connection, STREAM)
    penstock("archive", "verify")
    left = copy.with_name("keys.json#1")
    left.write_bytes(former)
    assert f"{STREAM}/keys.json#1 is left" in penstock("archive", "verify", code=1).stdout
    left.unlink()
    copy.unlink()
    assert "keys.json lacks version 1" in penstock("archive", "verify", code=1).stdout
    copy.write_bytes(b"garbage")
    assert "cannot be read" in penstock("archive", "verify", code=1).stdout
    copy.write_bytes(former)
    vault.connection.execute("UPDATE events.data_key SET wrapped_key = 'x' WHERE version = 1")
    assert "as the database" in penstock("archive", "verify", code=1).stdout
    sealing.forget()
    DataKeys().shred(vault.connection, STREAM, 1)
    assert "shredded" in penstock("archive", "verify", code=1).stdout


@pytest.mark.parametrize("way", [pytest.param("archive", marks=pytest.mark.long), "database"])
def test_a_service_elsewhere_finds_the_keys_without_a_hot_log(
    vault: Vault, servers: Servers, template_database: str, archive: Path, way: str
) -> None:
    vault.send("one", "two")
    mac_key = MacKeyTable().read(vault.connection).as_setting()
    source: Mapping[str, Any] = {"mac_key": mac_key, "redis_url": None}
    if way == "archive":
        archived(vault, 2)
        source = {"mac_key": mac_key, "archive_url": str(archive), "redis_url": vault.redis_url}
    else:
        with vault.working():
            wait_until(
                lambda: vault.row("SELECT max(position) FROM events.outbox_event") == (2,),
                what="they are numbered",
            )
        source = {**source, "source_url": vault.database_url}
    seen: list[str] = []
    with new_database(servers.database_url, template_database) as url:
        elsewhere = Vault(url, None, vault.kms_key_id)
        with elsewhere.working(noting(seen), roles=(), source=source, start="earliest"):
            elsewhere.wait_for_outcomes("handled", "handled")
        elsewhere.close()
    assert seen == ["one", "two"]


def test_a_shredded_key_leaves_tombstones_and_books_that_balance(
    vault: Vault, archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(**vault.settings)
    vault.send("one", "two")
    archived(vault, 2)
    rotate(vault.connection, settings, STREAM, by="test")
    sealing.forget()
    vault.send("three")
    (wrapped,) = vault.row("SELECT wrapped_key FROM events.data_key WHERE version = 1")
    copied = base64.b64encode(wrapped)
    assert any(copied in content for content in unpacked(archive).values())
    assert shred(vault.connection, settings, STREAM, 1, by="test").is_complete
    assert not any(copied in content for content in unpacked(archive).values())
    seen: list[str] = []
    with heard(signals.EventShredded) as tombstones, vault.working(noting(seen)):
        vault.wait_for_outcomes("skipped", "skipped", "handled")
    assert seen == ["three"]
    assert [each.position for each in tombstones] == [1, 2]
    variables = {
        "PENSTOCK_DATABASE_URL": vault.database_url,
        "PENSTOCK_REDIS_URL": str(vault.redis_url),
        "PENSTOCK_ARCHIVE_URL": str(archive),
    }
    penstock = Penstock(tmp_path, variables, capsys)
    assert json.loads(penstock("verify", "--json").stdout)["balance"]
    assert "contiguous" in penstock("archive", "verify").stdout
