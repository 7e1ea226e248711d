"""Confidential streams from end to end: ciphertext everywhere, plain in the handler's hands."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.core.events import StreamEvent
from penstock.errors import KeyRefused, StreamConfidential
from penstock.stores.data_keys import DataKeys
from penstock.stores.sealing import forget
from tests.vault import STREAM, Admitted, Vault, new_key_file


@pytest.fixture
def vault(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(database_url, redis_url, new_key_file(tmp_path))
    yield vault
    vault.close()


def test_a_handler_gets_what_was_sent_and_nobody_else_does(vault: Vault) -> None:
    vault.make_confidential()
    sent = {"ward": "north", "note": "cañón ☃", "n": 12345678901234567}
    with psycopg.connect(vault.database_url) as connection:
        event = Admitted(patient="Ada", diagnosis="measles")
        vault.pipeline.send(connection, STREAM, event, metadata=sent)
    stored = str(vault.row("SELECT o::text FROM events.outbox_event o"))
    assert not any(word in stored for word in ("Ada", "measles", "north"))
    seen: list[StreamEvent[Admitted]] = []

    def handler(event: StreamEvent[Admitted]) -> None:
        seen.append(event)

    with vault.working(handler):
        vault.wait_for_outcomes("handled")
    (event_seen,) = seen
    assert event_seen.payload == event
    assert event_seen.key == "Ada"
    created_at_ms = int(event_seen.created_at.timestamp() * 1000)
    assert event_seen.metadata == {**sent, "__creation_timestamp_ms__": created_at_ms}


def test_every_kind_of_connection_seals(vault: Vault) -> None:
    vault.make_confidential()
    send, event = vault.pipeline, Admitted(patient="Ada", diagnosis="measles")
    with psycopg.connect(vault.database_url) as connection:
        send.send(connection, STREAM, event)
    with Session(send.engine) as session, session.begin():
        send.send(session, STREAM, event)
    with send.engine.begin() as plain:
        send.send(plain, STREAM, event)

    async def send_asynchronously() -> None:
        async with await psycopg.AsyncConnection.connect(vault.database_url) as connection:
            await send.send_async(connection, STREAM, event)
        async with AsyncSession(send.async_engine) as session, session.begin():
            send.send(session, STREAM, event)
        await send.async_engine.dispose()

    asyncio.run(send_asynchronously())
    rows = vault.connection.execute("SELECT key, payload, key_id FROM events.outbox_event")
    keys, payloads, key_ids = zip(*rows, strict=True)
    # One key, so that the order holds; no two ciphertexts alike, though all say the same.
    assert (len(keys), len(set(keys)), len(set(payloads)), len(set(key_ids))) == (5, 1, 5, 1)


def test_what_a_handler_sends_is_sealed_and_what_it_was_told_stays_there(vault: Vault) -> None:
    vault.make_confidential()
    trace = {"traceparent": "00-1-2-01", "correlation_id": "about Ada"}
    with psycopg.connect(vault.database_url) as connection:
        event = Admitted(patient="Ada", diagnosis="measles")
        vault.pipeline.send(connection, STREAM, event, metadata=trace)

    def handler(event: Admitted, session: Session) -> None:
        if event.diagnosis == "measles":
            later = Admitted(patient=event.patient, diagnosis="recovered")
            vault.pipeline.send(session, STREAM, later)
            vault.pipeline.send(session, "wards", Admitted(patient="", diagnosis=""))

    with vault.working(handler):
        vault.wait_for_outcomes("handled", "handled")
    assert vault.row("SELECT count(*), count(key_id) FROM events.outbox_event") == (3, 2)
    (inherited,) = vault.row("SELECT metadata FROM events.outbox_event WHERE key_id IS NULL")
    assert "traceparent" in inherited
    assert "correlation_id" not in inherited


def test_a_sender_that_has_not_heard_of_the_policy_sends_nothing_in_plain_text(
    vault: Vault,
) -> None:
    vault.send("before")
    vault.make_confidential()
    with pytest.raises(StreamConfidential, match="send again"):
        vault.send("measles")
    assert vault.row("SELECT count(*) FROM events.outbox_event") == (1,)
    vault.send("measles")
    assert vault.row("SELECT count(*), count(key_id) FROM events.outbox_event") == (2, 1)


def test_without_its_key_file_nothing_is_sent(vault: Vault) -> None:
    vault.make_confidential()
    Path(vault.kms_key_id.removeprefix("file:")).unlink()
    with pytest.raises(KeyRefused, match=f"Nothing was sent to '{STREAM}'"):
        vault.send("measles")
    assert vault.row("SELECT count(*) FROM events.outbox_event") == (0,)


def test_events_of_every_key_version_are_handled_in_order(vault: Vault) -> None:
    vault.make_confidential()
    vault.send("one", "two")
    assert DataKeys().rotate(vault.connection, STREAM) == 2
    forget()
    vault.send("three")
    seen: list[str] = []
    with vault.working(_noting(seen)):
        vault.wait_for_outcomes(*["handled"] * 3)
    assert seen == ["one", "two", "three"]
    keys = vault.row("SELECT count(DISTINCT key_id), count(DISTINCT key) FROM events.outbox_event")
    assert keys == (2, 1)


def _noting(seen: list[str]) -> Any:
    def handler(event: Admitted) -> None:
        seen.append(event.diagnosis)

    return handler
