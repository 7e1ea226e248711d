"""What can be sent comes back as it was; what cannot is refused before anything is written."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID, uuid4

import orjson
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, Secret, SecretBytes, SecretStr, field_serializer

from penstock.core.encoding import DEPTH_MAX
from penstock.core.events import Event, RawEvent
from penstock.core.outgoing import (
    BATCH_BYTES_MAX,
    KEY_LENGTH_MAX,
    UNSET,
    Limits,
    OutgoingEvent,
    batch_json,
    encode_event,
)
from penstock.errors import InvalidEvent
from penstock.stores.outbox_writer import insert

LIMITS = Limits(payload_bytes_max=1024 * 1024, metadata_bytes_max=64 * 1024)
SECRET = "a text that no error may quote"  # noqa: S105
NAN = float("nan")


class OrderPlaced(Event, type="encoding.placed", version=3, key="order_id"):
    order_id: int | str | UUID | None = None
    cents: float = 0.0
    note: Any = None


class Line(BaseModel):
    price: float


class OrderWithLines(Event, type="orders.lines", version=1):
    lines: list[Line]
    comment: str | None = None


class Renamed(Event, type="renamed", version=1):
    order_id: int = Field(alias="orderId")


@dataclass
class Point:
    x: float


def encode(event: Any, *, stream: Any = "orders", **options: Any) -> OutgoingEvent:
    if "event_uuid" not in options:
        options["event_uuid"] = uuid4()
    return encode_event(stream, event, **{"limits": LIMITS, **options})


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


# ── what goes in comes out ─────────────────────────────────────────────────────────────────────

texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=30)
payloads = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


def is_same(stored: Any, sent: Any) -> bool:
    """Equal; jsonb prints a large float as an integer, which reads back as the same float."""
    match sent:
        case float():
            return float(stored) == sent
        case list():
            return len(stored) == len(sent) and all(map(is_same, stored, sent))
        case dict():
            return stored.keys() == sent.keys() and all(is_same(stored[k], sent[k]) for k in sent)
        case _:
            return type(stored) is type(sent) and bool(stored == sent)


@pytest.fixture
def connection(database_url: str) -> Any:
    with psycopg.connect(database_url) as connection:
        yield connection
        connection.rollback()


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    payload=payloads,
    metadata=st.dictionaries(texts, payloads, max_size=3),
    key=st.none() | texts,
    event_type=st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20),
)
def test_any_json_survives_the_outbox(
    connection: psycopg.Connection[Any],
    payload: Any,
    metadata: dict[str, Any],
    key: str | None,
    event_type: str,
) -> None:
    outgoing = encode(RawEvent(event_type, payload, key=key), metadata=metadata)
    insert(connection, "events", [outgoing])
    row = connection.execute(
        "SELECT event_type, key, payload::text, metadata::text FROM events.outbox_event"
        " WHERE event_uuid = %s",
        [outgoing.event_uuid],
    ).fetchone()
    connection.rollback()
    assert row is not None
    stored = orjson.loads(row[3])
    stored.pop("__creation_timestamp_ms__")
    metadata.pop("__creation_timestamp_ms__", None)
    assert (row[0], row[1]) == (event_type, key)
    assert is_same(orjson.loads(row[2]), payload)
    assert is_same(stored, metadata)


@given(payload=payloads)
def test_payloads_are_spliced_into_the_batch_as_they_are(payload: Any) -> None:
    events = [encode(RawEvent("t", payload), metadata={"n": n}) for n in range(2)]
    batch = orjson.loads(batch_json(events))
    assert [item["payload"] for item in batch] == [payload, payload]
    assert [item["metadata"] for item in batch] == [{"n": 0}, {"n": 1}]


def test_a_typed_event_brings_its_type_version_key_and_payload() -> None:
    outgoing = encode(OrderPlaced(order_id=7, cents=9.5))
    assert (outgoing.event_type, outgoing.version, outgoing.key) == ("encoding.placed", 3, "7")
    assert orjson.loads(outgoing.payload) == {"order_id": 7, "cents": 9.5, "note": None}
    assert outgoing.metadata == "{}"


def test_an_event_class_reads_back_what_it_wrote_also_with_aliases() -> None:
    event = Renamed(orderId=5)
    assert Renamed.model_validate_json(encode(event).payload) == event


def test_text_that_only_looks_dangerous_is_sent() -> None:
    for harmless in ("\\u0000", "NaN", "-Infinity", "null", "\\\\u0000 \\", "\\\\\\u0000"):
        assert orjson.loads(encode(RawEvent("t", harmless)).payload) == harmless
        assert orjson.loads(encode(OrderPlaced(note=harmless)).payload)["note"] == harmless


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


class Colour(StrEnum):
    RED = "red"


class OldColour(str, Enum):  # noqa: UP042 - whose str() is not its value
    RED = "red"


class OldNumber(int, Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (None, None),
        ("a", "a"),
        ("", ""),
        (12, "12"),
        (UUID(int=1), str(UUID(int=1))),
        (Colour.RED, "red"),
        (OldColour.RED, "red"),
        (OldNumber.ONE, "1"),
        (-(10**998), f"-1{'0' * 998}"),
        ("k" * KEY_LENGTH_MAX, "k" * KEY_LENGTH_MAX),
    ],
)
def test_keys_are_text_numbers_or_uuids(key: Any, expected: str | None) -> None:
    assert encode(OrderPlaced(order_id=1), key=key).key == expected
    assert encode(RawEvent("t", {}, key=key)).key == expected


def test_the_key_of_the_class_holds_unless_another_is_given() -> None:
    assert encode(OrderPlaced(order_id="mine"), key=UNSET).key == "mine"
    assert encode(OrderPlaced(order_id="mine"), key=None).key is None


@pytest.mark.parametrize("key", [True, 1.5, b"a", ["a"], Decimal(1), "k" * 1001, "a\0b", "\ud800"])
def test_other_keys_are_refused(key: Any) -> None:
    with pytest.raises(InvalidEvent, match=r"key .*sent"):
        encode(RawEvent("t", {}), key=key)


@pytest.mark.parametrize("digits", [1001, 5000])
def test_numbers_of_thousands_of_digits_are_refused_like_anything_else(digits: int) -> None:
    # Python itself refuses to write the longer one out.
    number = 10 ** (digits - 1)
    for key in (number, -number):
        with pytest.raises(InvalidEvent, match=r"key .*sent"):
            encode(RawEvent("t", {}), key=key)
    with pytest.raises(InvalidEvent, match="version"):
        encode(RawEvent("t", {}, version=number))


# ── refusals ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        (NAN, "payload"),
        ({"a": [1, None, float("inf")]}, r"payload\.a\[2\]"),
        ({"a": {"b": float("-inf")}}, r"payload\.a\.b"),
        ({"p": Point(NAN)}, r"payload\.p\.x"),
    ],
)
def test_numbers_that_json_cannot_express_are_refused_with_their_place(
    payload: Any, where: str
) -> None:
    with pytest.raises(InvalidEvent, match=rf"NaN or an infinity at {where}, "):
        encode(RawEvent("t", payload))


@pytest.mark.parametrize(
    ("event", "where"),
    [
        (OrderPlaced(cents=NAN), r"payload\.cents"),
        (OrderPlaced(note=[float("inf")]), r"payload\.note\[0\]"),
        # Line has its own configuration, with which pydantic prints NaN as null.
        (OrderWithLines(lines=[Line(price=1.0), Line(price=NAN)]), r"payload\.lines\[1\]\.price"),
    ],
)
def test_typed_events_are_no_exception(event: Event, where: str) -> None:
    with pytest.raises(InvalidEvent, match=rf"NaN or an infinity at {where}, "):
        encode(event)


@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ({"a": f"{SECRET}\0"}, r" at payload\.a,"),
        ({"a\0": SECRET}, r" at payload,"),
        ("\\\0", " at payload,"),
        (["\\\\\0"], r" at payload\[0\],"),
    ],
)
def test_nul_characters_are_refused_with_their_place(payload: Any, where: str) -> None:
    for event in (RawEvent("t", payload), OrderPlaced(note=payload)):
        with pytest.raises(InvalidEvent, match="NUL character") as refusal:
            encode(event)
        assert SECRET not in str(refusal.value)
    with pytest.raises(InvalidEvent, match=where):
        encode(RawEvent("t", payload))


@pytest.mark.parametrize(
    "payload",
    [
        {"a": object(), "b": SECRET},
        {"a": Decimal("1.5")},
        {"a": {1, 2}},
        {"a": b"\xff"},
        {1: SECRET},
        {"a": 2**64},
        {"a": f"{SECRET}\ud800"},
        {"a\ud800": SECRET},
    ],
)
def test_values_without_a_json_form_are_refused_without_being_quoted(payload: Any) -> None:
    with pytest.raises(InvalidEvent, match="cannot be written as JSON") as refusal:
        encode(RawEvent("t", payload))
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


def test_a_typed_event_names_the_field_that_fails() -> None:
    for bad in (object(), "\ud800"):
        with pytest.raises(InvalidEvent, match=r"JSON at payload\.note "):
            encode(OrderPlaced(note=bad))
    values: dict[str, Any] = {"cents": SECRET}
    built = OrderPlaced.model_construct(**values)
    with pytest.raises(InvalidEvent, match=r"JSON at payload\.cents ") as refusal:
        encode(built)
    assert SECRET not in str(refusal.value)


def test_depth_is_limited_to_what_readers_accept() -> None:
    deepest = OrderPlaced(note=nested(DEPTH_MAX - 1))
    assert OrderPlaced.model_validate_json(encode(deepest).payload) == deepest
    encode(RawEvent("t", [[]] * 10 * DEPTH_MAX))
    for levels in (DEPTH_MAX + 10, 300, 100_000):
        with pytest.raises(InvalidEvent):
            encode(RawEvent("t", nested(levels)))
        with pytest.raises(InvalidEvent):
            encode(OrderPlaced(note=nested(levels)))


def test_circular_values_are_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for event in (RawEvent("t", circle), OrderPlaced(note=circle)):
        with pytest.raises(InvalidEvent):
            encode(event)


def test_sizes_are_limited_in_bytes_of_the_encoded_text() -> None:
    limits = Limits(payload_bytes_max=10, metadata_bytes_max=10)
    encode(RawEvent("t", "ääää"), limits=limits)
    with pytest.raises(InvalidEvent, match=r"has 12 bytes, the limit is 10.*payload_bytes_max"):
        encode(RawEvent("t", "äääää"), limits=limits)
    with pytest.raises(InvalidEvent, match="raise metadata_bytes_max"):
        encode(RawEvent("t", 1), metadata={"a": "aaaaa"}, limits=limits)


def test_a_batch_that_postgresql_would_refuse_is_refused() -> None:
    event = encode(RawEvent("t", "x" * 1_000_000))
    with pytest.raises(InvalidEvent, match="smaller portions"):
        batch_json([event] * (BATCH_BYTES_MAX // 1_000_000 + 1))


@pytest.mark.parametrize("metadata", [[], "text", 5, ["a"]])
def test_metadata_is_a_dict(metadata: Any) -> None:
    with pytest.raises(InvalidEvent, match="Pass a dict"):
        encode(RawEvent("t", {}), metadata=metadata)


@pytest.mark.parametrize("metadata", [{"a": NAN}, {"a": "\0"}, {"a": "\ud800"}, {"a": object()}])
def test_metadata_follows_the_rules_of_payloads(metadata: Any) -> None:
    with pytest.raises(InvalidEvent, match=r"metadata of t .*metadata\.a"):
        encode(RawEvent("t", {}), metadata=metadata)


STREAMS = ["", "-a", "a b", "a\n", "ä", "a" * 201, None, 5]
TYPES = ["", "a\n", "a\0", "a\x85", "\u2028", "\ud800", "a" * 201, None, 5]
VERSIONS = [0, -1, True, 1.0, "1", None, 2**31]


@pytest.mark.parametrize("stream", STREAMS)
def test_bad_stream_names_are_refused(stream: Any) -> None:
    with pytest.raises(InvalidEvent, match="cannot name a stream"):
        encode(RawEvent("t", {}), stream=stream)


@pytest.mark.parametrize("event_type", TYPES)
def test_bad_event_types_are_refused(event_type: Any) -> None:
    with pytest.raises(InvalidEvent, match="cannot be an event type"):
        encode(RawEvent(event_type, {}))


@pytest.mark.parametrize("version", VERSIONS)
def test_bad_versions_are_refused(version: Any) -> None:
    with pytest.raises(InvalidEvent, match="version"):
        encode(RawEvent("t", {}, version=version))


def test_what_the_table_accepts_is_accepted(connection: psycopg.Connection[Any]) -> None:
    insert(
        connection,
        "events",
        [
            encode(RawEvent("ü" * 200, None, version=2**31 - 1), stream="a" * 200),
            encode(RawEvent("a b", {}, key="ü" * KEY_LENGTH_MAX), stream="0a.b_c:d/e-f"),
            encode(RawEvent("t", nested(DEPTH_MAX))),
        ],
    )


@pytest.mark.parametrize(
    "not_an_event", [{"a": 1}, "orders.placed", None, OrderPlaced, Event(), Line(price=1.0)]
)
def test_only_events_are_sent(not_an_event: Any) -> None:
    with pytest.raises(InvalidEvent):
        encode(not_an_event)


def test_an_event_uuid_is_a_uuid() -> None:
    with pytest.raises(InvalidEvent, match=r"uuid\.UUID"):
        encode(RawEvent("t", {}), event_uuid=str(uuid4()))


# ── speed ──────────────────────────────────────────────────────────────────────────────────────


def typed() -> Event:
    return OrderPlaced(order_id=5, cents=9.9, note="a note of ordinary length")


def raw() -> RawEvent:
    moment = datetime(2024, 1, 1, tzinfo=UTC)
    return RawEvent("t", {"id": 5, "at": moment, "items": list(range(10)), "none": None})


@pytest.mark.parametrize("make", [typed, raw])
def test_a_thousand_events_are_encoded_in_milliseconds(make: Callable[[], Any]) -> None:
    events = [make() for _ in range(1000)]
    uuids = [uuid4() for _ in events]
    gc.collect()
    times = []
    for _ in range(5):
        began = time.thread_time()  # of this thread alone, however busy the machine is
        batch_json([encode(e, event_uuid=u, key="k") for e, u in zip(events, uuids, strict=True)])
        times.append(time.thread_time() - began)
    assert min(times) < 0.05  # it takes some 10 ms


# ── secrets, of which pydantic writes asterisks ────────────────────────────────────────────────


class Account(BaseModel):
    password: SecretStr


class Opened(Event, type="encoding.opened", version=1):
    accounts: tuple[Account, ...] = ()
    pin: SecretBytes | None = None
    born: Secret[datetime] | None = None


class Revealed(Event, type="encoding.revealed", version=1):
    password: SecretStr

    @field_serializer("password")
    def reveal(self, password: SecretStr) -> str:
        return password.get_secret_value()


@pytest.mark.parametrize(
    ("event", "where"),
    [
        (Opened(accounts=(Account(password=SecretStr(SECRET)),)), "payload.accounts[0].password"),
        (Opened(pin=SecretBytes(b"1234")), "payload.pin"),
        (Opened(born=Secret(datetime(2026, 1, 1, tzinfo=UTC))), "payload.born"),
    ],
)
def test_a_secret_is_not_sent_as_asterisks(event: Event, where: str) -> None:
    with pytest.raises(InvalidEvent, match="asterisks") as refused:
        encode(event)
    assert where in str(refused.value)
    assert SECRET not in str(refused.value)


def test_a_secret_that_is_written_is_sent_and_so_are_asterisks() -> None:
    assert SECRET in encode(Revealed(password=SecretStr(SECRET))).payload
    assert encode(OrderPlaced(note="**********")).payload.endswith('"**********"}')
