"""The example of a webhook does what it says: every payment is booked once."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psycopg
import pytest

from penstock.inbox import claim
from penstock.stores.servers import Servers
from tests.databases import new_database

EXAMPLE = Path(__file__).parent.parent / "examples" / "webhook.py"
PATH = "/webhooks/payments"
BOOKED = "SELECT order_id, cents FROM payment ORDER BY id"
SENT = (
    "SELECT event_type, key, payload FROM events.outbox_event"
    " WHERE stream_name = 'payments' ORDER BY id"
)


@pytest.fixture(scope="module")
def url(servers: Servers, template_database: str) -> Iterator[str]:
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture(scope="module")
def webhook(url: str) -> Iterator[ModuleType]:
    """The example as its author would import it."""
    spec = importlib.util.spec_from_file_location("webhook", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_DATABASE_URL", url)
        patch.setenv("WEBHOOK_SECRET", "not much of a secret")
        patch.setitem(sys.modules, "webhook", module)
        spec.loader.exec_module(module)
        module.Base.metadata.create_all(module.pipeline.engine)
        yield module
        module.pipeline.engine.dispose()


@pytest.fixture
def books(webhook: ModuleType, url: str) -> Iterator[psycopg.Connection[Any]]:
    """What is committed; empty at first."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("TRUNCATE payment, events.inbox_event, events.outbox_event")
        yield connection


@asynccontextmanager
async def provider(webhook: ModuleType) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=webhook.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        yield client


async def post(
    webhook: ModuleType,
    client: httpx.AsyncClient,
    body: bytes,
    *,
    signed: bytes | None = None,
    age_seconds: int = 0,
    **headers: str | bytes,
) -> httpx.Response:
    timestamp = str(int(time.time()) - age_seconds)
    signature = webhook.signature_of(timestamp, body if signed is None else signed)
    own = {"webhook-timestamp": timestamp, "webhook-signature": signature}
    merged = {name.encode(): _bytes(value) for name, value in {**own, **headers}.items()}
    return await client.post(PATH, content=body, headers=merged)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def delivered(webhook: ModuleType, body: bytes, **options: Any) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with provider(webhook) as client:
            return await post(webhook, client, body, **options)

    return asyncio.run(scenario())


def delivery(event_id: str = "evt_1", order_id: int = 7, cents: int = 990) -> bytes:
    return json.dumps({"id": event_id, "order_id": order_id, "cents": cents}).encode()


def test_a_payment_is_booked_and_told(webhook: ModuleType, books: psycopg.Connection[Any]) -> None:
    response = delivered(webhook, delivery())
    assert (response.status_code, response.json()) == (200, "handled")
    assert books.execute(BOOKED).fetchall() == [(7, 990)]
    told = [("payments.received", "7", {"order_id": 7, "cents": 990})]
    assert books.execute(SENT).fetchall() == told


def test_delivered_twice_it_is_booked_once(
    webhook: ModuleType, books: psycopg.Connection[Any]
) -> None:
    answers = [delivered(webhook, delivery()) for _ in range(2)]
    assert [(each.status_code, each.json()) for each in answers] == [
        (200, "handled"),
        (200, "already handled"),
    ]
    assert len(books.execute(BOOKED).fetchall()) == len(books.execute(SENT).fetchall()) == 1


def test_while_another_delivery_is_at_it_the_provider_is_asked_to_come_back(
    webhook: ModuleType, books: psycopg.Connection[Any], url: str
) -> None:
    with psycopg.connect(url) as rival:
        claim(rival, "payments", "evt_1")
        response = delivered(webhook, delivery())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        rival.rollback()
    assert delivered(webhook, delivery()).json() == "handled"
    assert len(books.execute(BOOKED).fetchall()) == 1


def test_of_deliveries_at_the_same_moment_one_is_booked(
    webhook: ModuleType, books: psycopg.Connection[Any]
) -> None:
    events = [f"evt_{n}" for n in range(10)]

    async def scenario() -> list[httpx.Response]:
        async with provider(webhook) as client:
            return await asyncio.gather(
                *(
                    post(webhook, client, delivery(event_id))
                    for event_id in events
                    for _ in range(5)
                )
            )

    answers = Counter(
        each.json() if each.status_code == 200 else each.status_code
        for each in asyncio.run(scenario())
    )
    assert answers["handled"] == len(events)
    assert answers.keys() <= {"handled", "already handled", 503}
    assert len(books.execute(BOOKED).fetchall()) == len(books.execute(SENT).fetchall()) == 10


def test_a_delivery_that_fails_is_not_claimed(
    webhook: ModuleType, books: psycopg.Connection[Any]
) -> None:
    too_much = delivery(cents=2**40)
    assert delivered(webhook, too_much).status_code == 500
    assert books.execute(BOOKED).fetchall() == books.execute(SENT).fetchall() == []
    assert delivered(webhook, delivery()).json() == "handled"


@pytest.mark.parametrize(
    "options",
    [
        {"signed": delivery(cents=1)},
        {"webhook-signature": ""},
        {"webhook-signature": "grün".encode("latin-1")},
        {"webhook-timestamp": "yesterday"},
        {"age_seconds": 301},
        {"age_seconds": -301},
    ],
)
def test_what_the_provider_has_not_signed_is_refused(
    webhook: ModuleType, books: psycopg.Connection[Any], options: dict[str, Any]
) -> None:
    assert delivered(webhook, delivery(), **options).status_code == 401
    assert books.execute(BOOKED).fetchall() == books.execute(SENT).fetchall() == []


@pytest.mark.parametrize(("body", "code"), [(b"{}", 422), (b"x" * 70_000, 413)])
def test_what_is_no_delivery_is_refused(
    webhook: ModuleType, books: psycopg.Connection[Any], body: bytes, code: int
) -> None:
    assert delivered(webhook, body).status_code == code
    assert books.execute(BOOKED).fetchall() == []
