"""A confidential stream takes ciphertext only: nothing else is stored, quoted or logged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from penstock.core.policy import SecurityLevel, StreamPolicy
from penstock.stores.policies import Policies
from tests.bench_of_one import Workbench

CANARY = "canary-4711"
SEALED = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVphYmNkZWZnaGlq"
INSERT = (
    "INSERT INTO events.{table} (event_uuid, stream_name, event_type, key, key_id, payload,"
    " metadata) VALUES (%(event_uuid)s, %(stream_name)s, 'T', %(key)s, %(key_id)s, %(payload)s,"
    " %(metadata)s)"
)


@pytest.fixture
def owner(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def make_confidential(owner: psycopg.Connection[Any]) -> None:
    """The policy and a key's row, without any KMS: what is stored is all that matters here."""
    policies = Policies()
    policy = StreamPolicy(stream_name="orders", security_level=SecurityLevel.CONFIDENTIAL)
    with owner.transaction():
        policies.write(owner, policy)
        owner.execute(
            "INSERT INTO events.data_key (key_id, stream_name, version, wrapped_key, kms_key_id)"
            " VALUES ('v1', 'orders', 1, 'x', 'k')"
        )
        policies.enforce(owner)


def insert(owner: psycopg.Connection[Any], **values: Any) -> None:
    row = {
        "event_uuid": uuid4(),
        "stream_name": "orders",
        "key": "ab" * 32,
        "key_id": "v1",
        "payload": Jsonb(SEALED),
        "metadata": Jsonb({"__creation_timestamp_ms__": 1}),
        **values,
    }
    owner.execute(INSERT.format(table="outbox_event").encode(), row)


@pytest.mark.parametrize(
    "values",
    [
        {"key_id": None},
        {"payload": Jsonb({"card": CANARY})},
        {"payload": Jsonb(CANARY)},
        {"payload": Jsonb(SEALED + CANARY + "-")},
        {"payload": None},
        {"metadata": Jsonb({"trace": CANARY})},
        {"metadata": None, "payload": Jsonb(CANARY)},
        {"key": CANARY},
    ],
)
def test_plaintext_is_refused_without_a_word_of_it(
    owner: psycopg.Connection[Any], values: dict[str, Any]
) -> None:
    make_confidential(owner)
    with pytest.raises(psycopg.Error) as refused:
        insert(owner, **values)
    assert refused.value.sqlstate == "PS020"
    told = refused.value.diag
    assert told.message_detail is None
    assert CANARY not in f"{refused.value} {told.context} {told.message_hint}"
    assert owner.execute("SELECT count(*) FROM events.outbox_event").fetchone() == (0,)


def test_ciphertext_and_other_streams_pass(owner: psycopg.Connection[Any]) -> None:
    make_confidential(owner)
    insert(owner)
    insert(owner, key=None, metadata=Jsonb({}))
    insert(owner, stream_name="news", key_id=None, key="k", payload=Jsonb({"a": 1}))
    with pytest.raises(psycopg.Error, match="confidential"):
        owner.execute("UPDATE events.outbox_event SET payload = '{}'")
    with pytest.raises(psycopg.Error, match="confidential"):
        owner.execute("UPDATE events.outbox_event SET stream_name = 'orders'")
    with pytest.raises(psycopg.Error, match="confidential"):
        owner.execute("SELECT events.send('orders', 'T', '{}')")
    with pytest.raises(psycopg.Error, match="confidential"):
        owner.execute(
            "INSERT INTO events.timer (timer_id, stream_name, event_type, payload, due_at)"
            " VALUES ('t', 'orders', 'T', '{}', now())"
        )


def test_plaintext_from_before_is_published_all_the_same(
    owner: psycopg.Connection[Any], database_url: str
) -> None:
    bench = Workbench(database_url, None)
    try:
        bench.send(3)
        make_confidential(owner)
        bench.publish()
        assert bench.head() == 3
    finally:
        bench.close()
