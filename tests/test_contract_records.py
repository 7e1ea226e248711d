"""What is sent is recorded with the first event, and what breaks a promise is not sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb
from pydantic import AwareDatetime
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock import ContractError, Event, Pipeline
from penstock.core.contract_schema import contract_of, json_schema_of
from penstock.core.contracts import Promise
from penstock.core.schema import schema_hash
from penstock.core.schema.catalogue import Contract
from penstock.core.schema.documents import document_of
from penstock.core.schema.nodes import without_demands
from penstock.stores import contracts
from penstock.stores.postgres import sqlalchemy_url
from tests.test_seams import working
from tests.waiting import SOON_SECONDS, wait_until


class Paid(Event, type="records.paid", version=1):
    """A payment."""

    cents: int
    note: str | None = None


class Told(Event, type="records.told", version=1):
    cents: int


class Timed(Event, type="records.timed", version=1):
    at: AwareDatetime


class Unversioned(Event):
    n: int


@pytest.fixture(autouse=True)
def nothing_seen() -> Iterator[None]:
    contracts._seen.clear()
    yield
    contracts._seen.clear()


@pytest.fixture
def pipeline(database_url: str, redis_url: str) -> Iterator[Pipeline]:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=redis_url)
    yield pipeline
    pipeline.engine.dispose()


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection


def through_session(pipeline: Pipeline, event: Event) -> None:
    pipeline.send_now("payments", event)


def through_psycopg(pipeline: Pipeline, event: Event) -> None:
    # Whatever rows look like on the application's connection.
    with psycopg.connect(pipeline.settings.database_url, row_factory=dict_row) as connection:
        pipeline.send(connection, "payments", event)


def through_async_session(pipeline: Pipeline, event: Event) -> None:
    async def run() -> None:
        try:
            async with AsyncSession(pipeline.async_engine) as session, session.begin():
                pipeline.send(session, "payments", event)
        finally:
            await pipeline.async_engine.dispose()

    asyncio.run(run())


def through_async_psycopg(pipeline: Pipeline, event: Event) -> None:
    async def run() -> None:
        url = pipeline.settings.database_url
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await pipeline.send_async(connection, "payments", event)

    asyncio.run(run())


WAYS = [through_session, through_psycopg, through_async_session, through_async_psycopg]


def recorded(connection: psycopg.Connection[Any]) -> list[Any]:
    return connection.execute(
        "SELECT c.event_type, c.version, c.schema_hash, c.registered_by, p.stream_name "
        "FROM events.contract c JOIN events.contract_producer p USING (event_type, version) "
        "ORDER BY 1, 2, 3"
    ).fetchall()


def sent(connection: psycopg.Connection[Any]) -> int:
    row = connection.execute("SELECT count(*) FROM events.outbox_event").fetchone()
    assert row is not None
    return int(row[0])


def record(connection: psycopg.Connection[Any], event: type[Event], schema: dict[str, Any]) -> None:
    """As if another producer had sent it before."""
    record_contract(connection, replace(contract_of(event), json_schema=schema))


def record_contract(connection: psycopg.Connection[Any], contract: Contract) -> None:
    """The same for one that another release may have described."""
    found = (contract.event_type, contract.version, schema_hash(contract.json_schema))
    connection.execute(
        "SELECT events.record_contract('payments', %s, %s, %s, %s, 'elsewhere', "
        "ARRAY(SELECT schema_hash FROM events.contract))",
        (*found, Jsonb(document_of(contract))),
    )


def changed(event: type[Event], **properties: Any) -> dict[str, Any]:
    schema = json_schema_of(event)
    return {**schema, "properties": {**schema["properties"], **properties}}


@pytest.mark.parametrize("send", WAYS)
def test_the_first_event_records_its_contract(
    pipeline: Pipeline, connection: psycopg.Connection[Any], send: Any
) -> None:
    for _ in range(3):
        send(pipeline, Paid(cents=1))
    expected = ("records.paid", 1, schema_hash(json_schema_of(Paid)), "shop", "payments")
    assert recorded(connection) == [expected]
    assert sent(connection) == 3


@pytest.mark.parametrize("send", WAYS)
def test_what_breaks_a_recorded_contract_is_not_sent(
    pipeline: Pipeline, connection: psycopg.Connection[Any], send: Any
) -> None:
    record(connection, Paid, changed(Paid, cents={"type": "string"}))
    with pytest.raises(ContractError) as caught:
        send(pipeline, Paid(cents=1))
    message = str(caught.value)
    assert "Paid is not what elsewhere has recorded as version 1 of 'records.paid'" in message
    assert "cents" in message
    assert "Write version=2 and an upcaster from version 1" in message
    assert sent(connection) == 0


def test_business_data_goes_with_the_event_that_was_refused(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE payment (cents integer)")
    record(connection, Paid, changed(Paid, cents={"type": "string"}))
    with Session(pipeline.engine) as session:
        session.connection().exec_driver_sql("INSERT INTO payment VALUES (1)")
        pipeline.send(session, "payments", Paid(cents=1))
        with pytest.raises(ContractError):
            session.commit()
    assert connection.execute("SELECT count(*) FROM payment").fetchone() == (0,)
    # The connection went back to its pool as it should.
    pipeline.send_now("payments", Told(cents=1))
    assert sent(connection) == 1


def test_an_optional_field_may_come_and_go_but_not_come_back_as_another(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    record(connection, Paid, changed(Paid, extra={"type": "integer"}))
    pipeline.send_now("payments", Paid(cents=1))
    assert len({row[2] for row in recorded(connection)}) == 2
    record(connection, Told, changed(Told, extra={"type": "integer"}))
    record(connection, Told, json_schema_of(Told))
    other = changed(Told, extra={"type": "string"})
    with pytest.raises(ContractError, match="extra"):
        contracts._require_compatible(
            Promise("payments", Told, "shop"),
            contracts.Described(replace(contract_of(Told), json_schema=other), "other"),
            [
                contracts.Variant(*row)
                for row in connection.execute(
                    "SELECT schema_hash, json_schema::text, registered_by, first_seen_at, true "
                    "FROM events.contract WHERE event_type = 'records.told'"
                ).fetchall()
            ],
        )


def test_what_a_former_release_recorded_of_the_same_class_stands_against_nobody(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    former = replace(
        contract_of(Timed),
        json_schema=without_demands(json_schema_of(Timed)),
        names_demands=False,
    )
    record_contract(connection, former)
    pipeline.send_now("payments", Timed(at=datetime(2020, 1, 1, tzinfo=UTC)))
    assert sent(connection) == 1
    assert len({row[2] for row in recorded(connection)}) == 2


def test_what_another_producer_does_not_demand_is_not_demanded_of_its_readers(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    record(connection, Timed, without_demands(json_schema_of(Timed)))
    with pytest.raises(ContractError, match="not with a time zone"):
        pipeline.send_now("payments", Timed(at=datetime(2020, 1, 1, tzinfo=UTC)))


def test_words_about_a_contract_are_no_part_of_it(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    record(connection, Paid, {**json_schema_of(Paid), "description": "In other words."})
    pipeline.send_now("payments", Paid(cents=1))
    assert len({row[2] for row in recorded(connection)}) == 1


def test_a_record_that_was_rolled_back_is_made_again(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    with Session(pipeline.engine) as session:
        pipeline.send(session.connection(), "payments", Paid(cents=1))
        session.rollback()
    with psycopg.connect(pipeline.settings.database_url) as own:
        pipeline.send(own, "payments", Paid(cents=1))
        own.rollback()
    assert recorded(connection) == []
    pipeline.send_now("payments", Paid(cents=1))
    assert len(recorded(connection)) == 1


def test_nobody_waits_for_somebody_elses_record(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    with psycopg.connect(pipeline.settings.database_url) as slow:
        pipeline.send(slow, "payments", Paid(cents=1))
        quick = threading.Thread(target=pipeline.send_now, args=("payments", Paid(cents=2)))
        quick.start()
        quick.join(SOON_SECONDS)
        assert not quick.is_alive()
        assert sent(connection) == 1
        slow.rollback()
    pipeline.send_now("payments", Paid(cents=3))
    assert len(recorded(connection)) == 1


def test_what_was_recorded_in_between_is_compared_before_anything_else_is_recorded(
    pipeline: Pipeline, connection: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = contracts._require_compatible

    def compare_too_early(*arguments: Any) -> None:
        compare(*arguments)
        record(connection, Paid, changed(Paid, cents={"type": "string"}))

    monkeypatch.setattr(contracts, "_require_compatible", compare_too_early)
    pipeline.send_now("payments", Paid(cents=1))
    assert [row[3] for row in recorded(connection)] == ["elsewhere"]
    with pytest.raises(ContractError, match="cents"):
        pipeline.send_now("payments", Paid(cents=2))


def test_a_handlers_events_are_promised_too(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    def tell(event: Paid, session: Session) -> None:
        pipeline.send(session, "told", Told(cents=event.cents))

    pipeline.consumer("payments", name="tell")(tell)
    pipeline.send_now("payments", Paid(cents=1))
    with working(pipeline, "publisher", "consumer:tell"):
        wait_until(lambda: sent(connection) == 2, what="the handler has sent its event")
    assert [(row[0], row[4]) for row in recorded(connection)] == [
        ("records.paid", "payments"),
        ("records.told", "told"),
    ]


def test_events_without_a_class_or_a_version_promise_nothing(
    database_url: str, connection: psycopg.Connection[Any]
) -> None:
    pipeline = Pipeline("shop", database_url=database_url, redis_url=None, strict=False)
    pipeline.send_now("payments", Unversioned(n=1))
    assert (recorded(connection), sent(connection)) == ([], 1)
    pipeline.engine.dispose()


def test_declared_streams_are_registered_at_start(
    pipeline: Pipeline, connection: psycopg.Connection[Any]
) -> None:
    pipeline.stream("payments", Paid, Told)
    pipeline.register_contracts()
    assert [row[0] for row in recorded(connection)] == ["records.paid", "records.told"]
    record(connection, Paid, changed(Paid, cents={"type": "string"}))
    contracts._seen.clear()
    # Both are in use; that it came to this is nobody's fault who starts now.
    pipeline.register_contracts()


def test_two_databases_in_one_process_each_have_their_records(
    pipeline: Pipeline, connection: psycopg.Connection[Any], servers: Any, template_database: str
) -> None:
    from tests.databases import new_database

    pipeline.send_now("payments", Paid(cents=1))
    pipeline.send_now("payments", Paid(cents=1))
    with new_database(servers.database_url, template_database) as url:
        engine = create_engine(sqlalchemy_url(url))
        with Session(engine) as session, session.begin():
            pipeline.send(session, "payments", Paid(cents=1))
        engine.dispose()
        with psycopg.connect(url) as other:
            assert len(recorded(other)) == 1
    assert len(recorded(connection)) == 1
