"""Behind a pooler another backend may answer each transaction, and others have it in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import text

from penstock import Pipeline
from penstock.stores.async_worker_connection import AsyncWorkerConnection
from penstock.stores.control_connection import ControlConnection
from penstock.stores.postgres import connect_stage, is_pooled
from penstock.stores.worker_connection import SyncWorkerConnection
from tests.proxy import Proxy

LIMITS = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"
KEY_DATA = b"K\x00\x00\x00"
"""How the server begins to say which backend it is; its length and its number follow."""


class Pooler(Proxy):
    """Tells every client of a backend that is none, as poolers do that share theirs."""

    def _pass_on(self, chunk: bytes) -> bytes:
        at = chunk.find(KEY_DATA)
        return chunk if at < 0 else chunk[: at + 5] + b"\x7f\xff\xff\xfe" + chunk[at + 9 :]


@pytest.fixture
def pooled_url(database_url: str) -> Iterator[str]:
    with Pooler.to(database_url) as pooler:
        yield pooler.url(database_url)


def test_a_pooler_is_told_from_a_connection_of_ones_own(database_url: str, pooled_url: str) -> None:
    with psycopg.connect(database_url) as own, psycopg.connect(pooled_url) as pooled:
        assert not is_pooled(own)
        assert is_pooled(pooled)


@pytest.mark.parametrize(
    ("is_behind", "expected"), [(False, [("2s", "7s"), ("5s", "0")]), (True, [("0", "0")] * 2)]
)
def test_limits_are_set_where_no_other_client_inherits_them(
    database_url: str, pooled_url: str, is_behind: bool, expected: list[Any]
) -> None:
    url = pooled_url if is_behind else database_url
    control = ControlConnection(url, "penstock test", statement_seconds=7.0)
    with closing(control), connect_stage(url, "penstock test") as stage:
        found = [connection.execute(LIMITS).fetchone() for connection in (control.get(), stage)]
    assert found == expected


@pytest.mark.parametrize("is_behind", [False, True])
def test_statements_are_prepared_where_the_same_backend_answers(
    database_url: str, pooled_url: str, is_behind: bool
) -> None:
    url = pooled_url if is_behind else database_url
    pipeline = Pipeline("shop", database_url=url, redis_url=None)
    with (
        closing(SyncWorkerConnection(url, "penstock test")) as plain,
        closing(AsyncWorkerConnection(url, "penstock test")) as on_loop,
        closing(pipeline.engine.connect()) as connection,
    ):
        drivers = [plain._driver, on_loop._driver, connection.connection.driver_connection]
        thresholds = [driver.prepare_threshold for driver in drivers if driver is not None]
    pipeline.engine.dispose()

    async def ask() -> Any:
        async with pipeline.async_engine.connect() as asked:
            await asked.execute(text("SELECT 1"))
            raw = await asked.get_raw_connection()
            driver: Any = raw.driver_connection
        await pipeline.async_engine.dispose()
        return driver.prepare_threshold

    thresholds.append(asyncio.run(ask()))
    assert thresholds == [None if is_behind else 5] * 4
