"""Keys of another service's stream: whichever place has them, whatever is wrong with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from penstock.app.hot_logs import HotLogs
from penstock.app.key_sources import KeySources
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.errors import KeyUnavailable
from penstock.ops.policy_keys import copy_keys
from penstock.stores.data_keys import DataKeys
from penstock.stores.mac_keys import MacKeyTable
from penstock.stores.servers import Servers
from penstock.telemetry import signals
from tests.databases import new_database
from tests.proxy import Proxy
from tests.test_confidential_history import noting
from tests.test_consumer import heard
from tests.vault import STREAM, Vault, new_key_file
from tests.waiting import wait_until

KEYS = f"penstock:{{{STREAM}}}:keys"
Spoil = Callable[[Any], object]
SPOILS: dict[str, Spoil] = {
    "foreign": lambda client: (client.delete(KEYS), client.lpush(KEYS, "x")),
    "forged": lambda client: client.set(KEYS, '{"signature": "- -", "keys": "[]"}'),
    "no copy": lambda client: client.set(KEYS, "x"),
}


@pytest.fixture
def client(redis_url: str) -> Iterator[Any]:
    with closing(redis.Redis.from_url(redis_url)) as opened:
        yield opened


@pytest.fixture
def vault(database_url: str, redis_url: str, client: Any, tmp_path: Path) -> Iterator[Vault]:
    """Two events are in its hot log, with their key, and nobody publishes."""
    vault = Vault(database_url, redis_url, new_key_file(tmp_path))
    vault.make_confidential()
    vault.send("one", "two")
    with vault.working():
        wait_until(
            lambda: (
                vault.row("SELECT max(published) FROM events.stream") == (2,)
                and client.exists(KEYS)
            ),
            what="they are published",
        )
    yield vault
    vault.close()


@pytest.fixture
def elsewhere(vault: Vault, servers: Servers, template_database: str) -> Iterator[Vault]:
    with (
        new_database(servers.database_url, template_database) as url,
        closing(Vault(url, vault.redis_url, vault.kms_key_id)) as opened,
    ):
        yield opened


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_copy_beside_the_hot_log_that_is_none_is_passed_over(
    vault: Vault, elsewhere: Vault, client: Any, spoil: str
) -> None:
    SPOILS[spoil](client)
    seen: list[str] = []
    source = {"source_url": vault.database_url}
    with elsewhere.working(noting(seen), roles=(), source=source, start="earliest"):
        elsewhere.wait_for_outcomes("handled", "handled")
    assert seen == ["one", "two"]


@pytest.mark.parametrize("place", ["archive", "database"])
def test_while_redis_is_away_the_keys_are_found_elsewhere(
    vault: Vault, elsewhere: Vault, tmp_path: Path, place: str
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    source: dict[str, Any] = {"brownout": True, "source_url": vault.database_url}
    if place == "archive":
        source |= {"archive_url": str(archive)}
        settings = Settings(**vault.settings | {"archive_url": str(archive)})
        assert all(copy.problem is None for copy in copy_keys(vault.connection, settings, STREAM))
    seen: list[str] = []
    with Proxy.to(str(vault.redis_url)) as proxy, proxy.refusing():
        source |= {"redis_url": proxy.url(str(vault.redis_url))}
        with elsewhere.working(noting(seen), roles=(), source=source, start="earliest"):
            elsewhere.wait_for_outcomes("handled", "handled")
    assert seen == ["one", "two"]


def test_a_key_that_the_copy_has_not_yet_is_read_in_the_database(
    vault: Vault, elsewhere: Vault
) -> None:
    late = DataKeys().rotate(vault.connection, STREAM)
    (key_id,) = vault.row("SELECT key_id FROM events.data_key WHERE version = %s", late)
    settings = Settings(**elsewhere.settings)
    source = Source(
        stream_name=STREAM,
        redis_url=vault.redis_url,
        redis_prefix="penstock",
        mac_key=None,
        source_url=vault.database_url,
        source_schema="events",
        brownout=False,
    )
    keys = KeySources(settings, HotLogs(settings)).of_source(source)
    assert keys.find({key_id})[key_id].version == late
    with pytest.raises(KeyUnavailable, match="v9-unknown"):
        keys.find({"v9-unknown"})


def test_a_consumer_that_finds_its_keys_nowhere_waits_and_says_why(
    vault: Vault, elsewhere: Vault, client: Any
) -> None:
    client.delete(KEYS)
    client.lpush(KEYS, "x")
    source = {"mac_key": MacKeyTable().read(vault.connection).as_setting()}
    seen: list[str] = []
    with (
        heard(signals.ConsumerBlocked) as blocked,
        elsewhere.working(noting(seen), roles=(), source=source, start="earliest"),
    ):
        wait_until(lambda: bool(blocked), what="the consumer says that it waits")
        assert "is not Penstock's" in blocked[0].reason
        client.delete(KEYS)
        copy_keys(vault.connection, Settings(**vault.settings), STREAM)
        elsewhere.wait_for_outcomes("handled", "handled")
    assert seen == ["one", "two"]
