"""What `pipeline.source` refuses, and the sentence that says what to write."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from penstock import Pipeline, RawEvent
from penstock.core.events import StreamEvent
from penstock.errors import RegistrationError, SettingsError, UsageError

KEY = "k1:" + "ab" * 32
CANARY = "canary"
DATABASE = f"postgresql://reader:{CANARY}@db/shop"


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline("billing", database_url="postgresql://localhost/none", redis_url=None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({}, r"Write mac_key=…"),
        ({"mac_key": KEY, "archive_url": f"ftp://{CANARY}"}, "archive_url cannot be used"),
        ({"mac_key": KEY, "redis_url": None}, "nothing is left to read from"),
        ({"mac_key": KEY, "redis_url": f"http://{CANARY}"}, "redis_url cannot be used"),
        ({"mac_key": CANARY}, "mac_key cannot be used"),
        ({"source_url": f"mysql://u:{CANARY}@x/y"}, "source_url cannot be used"),
        ({"source_url": 4711}, "source_url cannot be used"),
        ({"source_url": DATABASE, "source_schema": "No Name"}, "source_schema"),
        ({"mac_key": KEY, "brownout": True}, "leave brownout out"),
        ({"mac_key": KEY, "redis_prefix": ""}, "redis_prefix is empty"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    pipeline: Pipeline, arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RegistrationError, match=sentence) as refused:
        pipeline.source("orders", **arguments)
    assert CANARY not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_source_has_a_streams_name(pipeline: Pipeline) -> None:
    with pytest.raises(RegistrationError, match="cannot name a stream"):
        pipeline.source("or ders", mac_key=KEY)


def test_nothing_is_sent_to_another_services_stream(pipeline: Pipeline) -> None:
    pipeline.source("orders", mac_key=KEY)
    connection: Any = psycopg.Connection.__new__(psycopg.Connection)
    with pytest.raises(UsageError, match="belongs to another service"):
        pipeline.send(connection, "orders", RawEvent("placed", {}))


def test_a_stream_has_one_owner(pipeline: Pipeline) -> None:
    pipeline.source("orders", mac_key=KEY)
    with pytest.raises(RegistrationError, match="keep one of the two"):
        pipeline.stream("orders")
    with pytest.raises(RegistrationError, match="written twice"):
        pipeline.source("orders", source_url=DATABASE)
    pipeline.stream("bills")
    with pytest.raises(RegistrationError, match="keep one of the two"):
        pipeline.source("bills", mac_key=KEY)


def test_strict_mode_knows_sources(pipeline: Pipeline) -> None:
    pipeline.stream("bills")
    pipeline.source("orders", mac_key=KEY)

    def handle(event: StreamEvent[Any]) -> None: ...

    pipeline.consumer("orders", name="bill")(handle)
    with pytest.raises(RegistrationError, match="did you mean 'orders'"):
        pipeline.consumer("order", name="other")(handle)


def test_a_source_does_not_print_its_secrets(pipeline: Pipeline) -> None:
    pipeline.source("orders", mac_key=KEY, source_url=DATABASE, redis_url=f"redis://:{CANARY}@r/0")
    shown = repr(pipeline._registry.sources["orders"])
    assert CANARY not in shown
    assert KEY.partition(":")[2] not in shown


def test_dead_letters_are_not_told_to_another_service() -> None:
    pipeline = Pipeline(
        "billing", database_url="postgresql://localhost/none", dead_letter_stream="orders"
    )
    pipeline.source("orders", mac_key=KEY)
    with pytest.raises(SettingsError, match="dead_letter_stream"):
        pipeline._workers()
