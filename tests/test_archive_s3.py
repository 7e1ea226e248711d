"""The archive in a store that speaks S3, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import boto3
import pytest
import urllib3
from moto.server import ThreadedMotoServer

from penstock.errors import ServerUnavailable
from penstock.stores.cold_tier import source_cold_tier
from penstock.stores.objects import ObjectStore, open_store
from penstock.telemetry import signals
from tests.archiving import (
    STREAM,
    ArchiveWorker,
    archiver,
    publish,
    ranges,
    settings_for,
    warm_rows,
)
from tests.proxy import Proxy
from tests.publishing import Crash, at, crash, told

BUCKET = "penstock-test"
URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket that the usual variables lead to."""
    for name, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "test"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=endpoint)
    with suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=BUCKET)
    for found in client.list_objects_v2(Bucket=BUCKET).get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=found["Key"])
    return URL


def names(store: ObjectStore) -> list[str]:
    return sorted(found.name for found in store.names(STREAM))


def test_a_second_object_of_the_same_name_is_refused(s3: str) -> None:
    store = open_store(s3)
    assert store.put_if_absent("orders/x", b"1")
    assert not store.put_if_absent("orders/x", b"2")
    assert store.get("orders/x") == b"1"
    store.require_put_if_absent("token")
    store.move_aside("orders/x", "orders/superseded/x")
    assert (store.get("orders/x"), store.get("orders/superseded/x")) == (None, b"1")
    assert [found.name for found in store.names("orders")] == ["orders/superseded/x"]


def test_a_crash_behind_the_store_is_survived(s3: str, database_url: str) -> None:
    settings = settings_for(database_url, s3)
    publish(settings, 30)
    dying = ArchiveWorker(settings)
    with at(signals.ObjectStored, crash), pytest.raises(Crash):
        dying.step()
    dying.die()
    with archiver(settings) as running:
        running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 20), (21, 30)]
    assert len(names(open_store(s3))) == 4
    tier = source_cold_tier(s3, STREAM)
    rows = [row for after in (0, 10, 20) for row in tier.read(after, 100)]
    assert rows == warm_rows(database_url)


def test_a_store_that_takes_rights_away_is_waited_for(
    s3: str, endpoint: str, database_url: str
) -> None:
    def let_in(requests: str) -> None:
        urllib3.request("POST", f"{endpoint}/moto-api/reset-auth", body=requests)

    settings = settings_for(database_url, s3)
    publish(settings, 20)
    with told(signals.ServerLost) as lost, archiver(settings) as running:
        assert running.step() == 10
        let_in("0")
        try:
            for _ in range(3):
                assert running.step() == 0
                running.archiver._outage._retry_at = 0.0
        finally:
            let_in("inf")
        running.archive_all()
    assert ["rights" in signal.error for signal in lost] == [True]
    assert ranges(settings) == [(1, 10), (11, 20)]


def test_a_bucket_that_is_not_there_is_no_missing_object(s3: str) -> None:
    assert open_store(s3).get("orders/x") is None
    with pytest.raises(ServerUnavailable, match="bucket"):
        open_store("s3://penstock-nobodys/x").get("orders/x")


def test_a_store_behind_a_broken_network_is_waited_for(
    s3: str, endpoint: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_for(database_url, s3)
    publish(settings, 20)
    with Proxy.to(endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url(endpoint))
        with archiver(settings) as running:
            assert running.step() == 10
            with proxy.refusing():
                assert running.step() == 0
                with pytest.raises(ServerUnavailable, match="archive_url"):
                    source_cold_tier(s3, STREAM).bounds()
            running.archiver._outage._retry_at = 0.0
            running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 20)]
