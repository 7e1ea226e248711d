"""An event goes to its sender's schema, in the database of its connection, as that one wants it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from penstock import Pipeline, RawEvent, Retry, StreamEvent
from penstock.stores.migrations import migrate
from penstock.stores.questions import place_under
from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.test_seams import working
from tests.vault import STREAM, Admitted, Vault, new_key_file
from tests.waiting import wait_until

OTHER = "elsewhere"


# ── schemas ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def pipelines(database_url: str, *schemas: str) -> Iterator[list[Pipeline]]:
    made = [
        Pipeline(name, database_url=database_url, redis_url=None, strict=False, schema=name)
        for name in schemas
    ]
    yield made
    for each in made:
        each.engine.dispose()


def outboxes(connection: psycopg.Connection[Any]) -> dict[str, list[str]]:
    query = "SELECT event_type FROM {}.outbox_event WHERE stream_name = 'out' ORDER BY id"
    return {
        schema: [row[0] for row in connection.execute(query.format(schema).encode())]
        for schema in ("events", OTHER)
    }


@pytest.mark.parametrize("order", ["EO", "O", "OEO", "EOE"])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_handler_sends_goes_to_the_outbox_of_the_pipeline_that_sends_it(
    database_url: str, order: str, is_async: bool
) -> None:
    migrate(database_url, OTHER)
    with pipelines(database_url, "events", OTHER) as (own, other):

        def send(session: Any) -> None:
            for number, letter in enumerate(order):
                sender = own if letter == "E" else other
                sender.send(session, "out", RawEvent(f"{letter}{number}", {}, key="k"))

        def tell(_event: StreamEvent[Any], session: Session) -> None:
            send(session)

        async def tell_async(_event: StreamEvent[Any], session: AsyncSession) -> None:
            send(session)

        own.consumer("in", name="tell")(tell_async if is_async else tell)
        own.send_now("in", RawEvent("asked", {}))
        expected = {
            schema: [f"{letter}{n}" for n, letter in enumerate(order) if letter == mine]
            for schema, mine in (("events", "E"), (OTHER, "O"))
        }
        with psycopg.connect(database_url, autocommit=True) as connection:
            with working(own, "publisher", "consumer:tell"):
                wait_until(lambda: any(outboxes(connection).values()), what="events were sent")
            assert outboxes(connection) == expected


def test_a_handler_that_sends_to_a_schema_that_is_not_there_sends_nothing(
    database_url: str,
) -> None:
    with pipelines(database_url, "events", "nowhere") as (own, other):

        def tell(_event: StreamEvent[Any], session: Session) -> None:
            own.send(session, "out", RawEvent("E", {}))
            other.send(session, "out", RawEvent("O", {}))

        own.consumer("in", name="tell", retry=Retry.none())(tell)
        own.send_now("in", RawEvent("asked", {}))
        with psycopg.connect(database_url, autocommit=True) as connection:

            def error() -> str:
                row = connection.execute("SELECT error_message FROM events.dead_letter").fetchone()
                return "" if row is None else str(row[0])

            with working(own, "publisher", "consumer:tell"):
                wait_until(lambda: bool(error()), what="the event was buried")
            assert "penstock migrate" in error()
            assert "nowhere" in error()
            query = "SELECT count(*) FROM events.outbox_event WHERE stream_name = 'out'"
            assert connection.execute(query).fetchone() == (0,)


# ── databases ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def vaults(servers: Servers, template_database: str, tmp_path: Path) -> Iterator[list[Vault]]:
    """Two databases with the same confidential stream."""
    with ExitStack() as stack:
        made = []
        for name in ("first", "second"):
            url = stack.enter_context(new_database(servers.database_url, template_database))
            (tmp_path / name).mkdir()
            vault = Vault(url, None, new_key_file(tmp_path / name))
            stack.callback(vault.close)
            vault.make_confidential()
            made.append(vault)
        yield made


def engine_by_creator(url: str) -> Engine:
    """One whose URL does not tell where it goes."""
    return create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))


def send_twice(vault: Vault) -> None:
    """Twice, so that something is remembered."""
    engine = engine_by_creator(vault.database_url)
    for diagnosis in ("measles", "recovered"):
        with Session(engine) as session, session.begin():
            vault.pipeline.send(session, STREAM, Admitted(patient="Ada", diagnosis=diagnosis))
    engine.dispose()


async def send_twice_asynchronously(vault: Vault) -> None:
    async def connect() -> psycopg.AsyncConnection[Any]:
        return await psycopg.AsyncConnection.connect(vault.database_url)

    engine = create_async_engine("postgresql+psycopg://", async_creator=connect)
    for diagnosis in ("measles", "recovered"):
        async with AsyncSession(engine) as session, session.begin():
            vault.pipeline.send(session, STREAM, Admitted(patient="Ada", diagnosis=diagnosis))
    await engine.dispose()


@pytest.mark.parametrize("is_async", [False, True])
def test_databases_whose_urls_are_alike_have_their_own_keys_and_contracts(
    vaults: list[Vault], is_async: bool
) -> None:
    for vault in vaults:
        if is_async:
            asyncio.run(send_twice_asynchronously(vault))
        else:
            send_twice(vault)
    for vault in vaults:
        with vault.connection.cursor() as cursor:
            sealed = cursor.execute("SELECT DISTINCT key_id FROM events.outbox_event").fetchall()
            keys = cursor.execute("SELECT key_id FROM events.data_key").fetchall()
            contracts = cursor.execute("SELECT event_type FROM events.contract").fetchall()
        assert len(sealed) == 1
        assert sealed[0] in keys
        assert contracts == [("patients.admitted",)]


def test_a_timer_is_sealed_with_a_key_of_its_own_database(vaults: list[Vault]) -> None:
    for vault in vaults:
        engine = engine_by_creator(vault.database_url)
        with Session(engine) as session, session.begin():
            event = Admitted(patient="Ada", diagnosis="measles")
            vault.pipeline.schedule(session, STREAM, event, delay=timedelta(days=1))
        engine.dispose()
        (sealed,) = vault.row("SELECT key_id FROM events.timer")
        known = vault.connection.execute("SELECT key_id FROM events.data_key").fetchall()
        assert (sealed,) in known


def test_engines_of_other_drivers_are_told_apart_and_not_kept_alive() -> None:
    engines = [create_engine("sqlite://", poolclass=NullPool) for _ in range(2)]
    places, remembered = [], set()
    for engine in engines:
        with engine.connect() as first, engine.connect() as second:
            assert place_under(first) == place_under(second)
            places.append(place_under(first))
            remembered.add((place_under(first), "orders"))
    assert places[0] != places[1]
    gone = weakref.ref(engines.pop())
    del engine, first, second
    gc.collect()
    assert gone() is None
    assert (places[0], "orders") in remembered
    remembered.update((number, "orders") for number in range(100))
    assert len(remembered) == 102
