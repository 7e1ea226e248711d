"""The verdict on a change of a class, held against pydantic: what was sent is read, or refused."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from itertools import permutations
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from pydantic import (
    UUID4,
    AnyHttpUrl,
    AnyUrl,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FtpUrl,
    FutureDate,
    HttpUrl,
    MongoDsn,
    NaiveDatetime,
    PastDate,
    PastDatetime,
    PositiveInt,
    PostgresDsn,
    RedisDsn,
    StrictInt,
    StringConstraints,
    ValidationError,
    WebsocketUrl,
    create_model,
)

from penstock import Event
from penstock.core.contract_schema import contract_of, json_schema_of
from penstock.core.encoding import encode_typed
from penstock.core.schema import Rule, can_read, check, schema_hash
from penstock.core.schema.catalogue import comparable
from penstock.core.schema.documents import contract_in, document_of
from penstock.core.schema.nodes import DEMANDS, KEYS, without_demands
from penstock.errors import RegistrationError


class Suit(Enum):
    CLUBS = "a"
    SPADES = "b"


class Rank(IntEnum):
    LOW = 1
    HIGH = 2


class Line(BaseModel):
    a: int = 0


class Point(BaseModel):
    model_config = ConfigDict(frozen=True)

    x: int = 0
    y: int = 0


class Narrow(BaseModel):
    model_config = ConfigDict(frozen=True)

    x: int = 0


class Stripped(BaseModel):
    model_config = ConfigDict(str_strip_whitespace=True)

    a: str = Field("x", min_length=1)


class Filled(BaseModel):
    a: str = Field("x", min_length=1)


class InHex(BaseModel):
    model_config = ConfigDict(val_json_bytes="hex", ser_json_bytes="hex")

    a: bytes = b""


class InSeconds(BaseModel):
    model_config = ConfigDict(ser_json_timedelta="float")

    a: timedelta = timedelta()


class Measured(BaseModel):
    a: float = 0


class InBytes(BaseModel):
    a: bytes = b""


@dataclass(frozen=True)
class Kind:
    """The type of a field, and values of it that are sent."""

    annotation: Any
    values: tuple[Any, ...]


LOWER = Annotated[str, StringConstraints(to_lower=True)]
MOMENT = datetime(2020, 1, 1, 1, 2, 3, tzinfo=UTC)
ID = UUID("5dd0dd8a-9c0c-4a4e-9a5b-7f6a3a0a0f11")


def kind(annotation: Any, *values: Any) -> Kind:
    return Kind(annotation, values)


# Classes that a release must describe as the one before did, since their hashes are recorded.
ORDINARY = {
    "text": kind(str, "", "a", " ", "1", "true", "2020-01-01", "ééé"),
    "filled text": kind(Annotated[str, Field(min_length=1)], "a", " ", "1"),
    "short text": kind(Annotated[str, Field(max_length=3)], "ééé", ""),
    "letters": kind(Annotated[str, Field(pattern="^[a-z]+$")], "a"),
    "integer": kind(int, 0, -1, 2**70),
    "strict integer": kind(StrictInt, 0, 2**70),
    "number": kind(float, 0.5, 1.0, -2.0, 1e300),
    "boolean": kind(bool, True, False),
    "decimal": kind(Decimal, Decimal("1.5"), Decimal("-123456789.123456789"), Decimal("1E+5")),
    "decimal ≥ 0": kind(Annotated[Decimal, Field(ge=0)], Decimal(0), Decimal("1.5")),
    "moment": kind(datetime, MOMENT, MOMENT.replace(tzinfo=None), MOMENT.replace(year=2900)),
    "day": kind(date, date(2020, 1, 1), date(2900, 1, 1)),
    "time": kind(time, time(1, 2, 3), time(1, 2, 3, tzinfo=UTC)),
    "duration": kind(timedelta, timedelta(0), timedelta(-5), timedelta(400, 3, 7)),
    "uuid": kind(UUID, ID, UUID(int=1)),
    "uuid4": kind(UUID4, ID),
    "bytes": kind(bytes, b"", b"abc", b"zz"),
    "suit": kind(Suit, *Suit),
    "rank": kind(Rank, *Rank),
    "a or b": kind(Literal["a", "b"], "a", "b"),
    "optional": kind(int | None, None, 1),
    "list": kind(list[int], [], [1, 1]),
    "set": kind(set[str], set(), {"a", "A"}),
    "two": kind(Annotated[set[str], Field(min_length=2)], {"a", "A"}),
    "anything": kind(Any, 1, "a", None, [1], {"a": 1}),
    "model": kind(Line, Line(a=1)),
    "models": kind(list[Line], [Line()]),
    "by text": kind(dict[str, int], {}, {"a": 1}, {"1": 1}, {"": 2}),
    "by uuid": kind(dict[UUID, int], {ID: 1}),
    "by suit": kind(dict[Suit, int], {Suit.CLUBS: 1}),
    "by letters": kind(dict[Annotated[str, Field(pattern="^[a-z]+$")], int], {"a": 1}),
    "by long text": kind(dict[Annotated[str, Field(min_length=2)], int], {"aa": 1}),
    "by rank": kind(dict[Rank, int], {Rank.LOW: 1}),
    "any url": kind(AnyUrl, AnyUrl("ftp://a.b/c"), AnyUrl("foo:bar")),
    "filled": kind(Filled, Filled(a=" ")),
    "in bytes": kind(InBytes, InBytes(a=b"zz")),
    "measured": kind(Measured, Measured(a=1e300)),
}
DEMANDING = {
    "with zone": kind(AwareDatetime, MOMENT),
    "without zone": kind(NaiveDatetime, MOMENT.replace(tzinfo=None)),
    "past moment": kind(PastDatetime, MOMENT),
    "late moment": kind(
        Annotated[datetime, Field(ge=MOMENT.replace(year=2021))], MOMENT.replace(year=2022)
    ),
    "past day": kind(PastDate, date(2000, 1, 1)),
    "future day": kind(FutureDate, date(2900, 1, 1)),
    "long duration": kind(Annotated[timedelta, Field(ge=timedelta(1))], timedelta(2)),
    "in seconds": kind(InSeconds, InSeconds(a=timedelta(1))),
    "five digits": kind(
        Annotated[Decimal, Field(max_digits=5, decimal_places=2)], Decimal("123.45"), Decimal(0)
    ),
    "two decimals": kind(Annotated[Decimal, Field(decimal_places=2)], Decimal("12345678.1")),
    "complex": kind(complex, 1 + 2j),
    "stripped text": kind(
        Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)], "a"
    ),
    "stripped": kind(Stripped, Stripped(a="a")),
    "in hex": kind(InHex, InHex(a=b"\x01")),
    "two lower": kind(Annotated[set[LOWER], Field(min_length=2)], {"a", "b"}),
    "two points": kind(Annotated[frozenset[Point], Field(min_length=2)], {Point(y=1), Point(y=2)}),
    "two narrow": kind(Annotated[frozenset[Narrow], Field(min_length=2)], {Narrow(x=1), Narrow()}),
    "by integer": kind(dict[int, int], {}, {-1: 1}),
    "by positive": kind(dict[PositiveInt, int], {3: 1}),
    "by number": kind(dict[float, int], {1.5: 1}),
    "by boolean": kind(dict[bool, int], {True: 1}),
    "by decimal": kind(dict[Decimal, int], {Decimal("1.5"): 1}),
    "http url": kind(HttpUrl, HttpUrl("http://a.b")),
    "any http url": kind(AnyHttpUrl, AnyHttpUrl("https://a.b")),
    "ftp url": kind(FtpUrl, FtpUrl("ftp://a.b")),
    "websocket": kind(WebsocketUrl, WebsocketUrl("ws://a.b")),
    "redis": kind(RedisDsn, RedisDsn("redis://a")),
    "postgres": kind(PostgresDsn, PostgresDsn("postgresql://a/b")),
    "mongo": kind(MongoDsn, MongoDsn("mongodb://a/b")),
}
# Described as ever, and their lengths or their steps mean something else than JSON Schema says.
TREACHEROUS = {
    "few bytes": kind(Annotated[bytes, Field(max_length=3)], b"abc"),
    "two bytes": kind(Annotated[bytes, Field(min_length=2)], "é".encode()),
    "é or è": kind(Literal["éé", "èè"], "éé", "èè"),
    "two characters": kind(Annotated[str, Field(min_length=2)], "ab"),
    "whole number": kind(Annotated[float, Field(multiple_of=1)], 1.0, 1e19),
}
KINDS = ORDINARY | DEMANDING | TREACHEROUS


def event_class(annotation: Any) -> type[Event]:
    return create_model("Changed", __base__=Event, x=(annotation, ...))


def sent(event_class: type[Event], value: Any) -> bytes:
    return encode_typed(event_class.model_validate({"x": value}), "changed")


CLASSES = {name: event_class(kind.annotation) for name, kind in KINDS.items()}
SCHEMAS = {name: json_schema_of(one) for name, one in CLASSES.items()}
SENT = {name: [sent(CLASSES[name], value) for value in kind.values] for name, kind in KINDS.items()}


def is_read(by: str, payload: bytes) -> bool:
    try:
        CLASSES[by].model_validate_json(payload, extra="allow")
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name", KINDS)
def test_a_class_reads_what_it_sends_and_breaks_nobody(name: str) -> None:
    assert all(is_read(name, payload) for payload in SENT[name])
    assert check(SCHEMAS[name], SCHEMAS[name], Rule.FULL) == []


def test_a_change_that_is_called_compatible_is_read() -> None:
    lost = [
        f"{reader} does not read {payload.decode()} of {writer}"
        for writer, reader in permutations(KINDS, 2)
        if not can_read(SCHEMAS[writer], SCHEMAS[reader])
        for payload in SENT[writer]
        if not is_read(reader, payload)
    ]
    assert lost == []


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("with zone", "moment"),
        ("past day", "day"),
        ("stripped text", "filled text"),
        ("http url", "any http url"),
        ("ftp url", "any url"),
        ("by positive", "by integer"),
        ("by integer", "by number"),
        ("by integer", "by decimal"),
        ("by integer", "by text"),
        ("by rank", "by text"),
        ("complex", "text"),
        ("bytes", "text"),
        ("text", "bytes"),
        ("integer", "decimal"),
        ("two lower", "two"),
    ],
)
def test_what_demands_less_is_compatible(writer: str, reader: str) -> None:
    assert can_read(SCHEMAS[writer], SCHEMAS[reader]) == []


def test_a_demand_is_told_in_words() -> None:
    (found,) = check(SCHEMAS["moment"], SCHEMAS["with zone"], Rule.BACKWARD)
    assert (found.path, found.rule) == ("x", "format-tightened")
    assert "not with a time zone, which the reader demands" in found.reason


# ── what former releases recorded ──────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_class_is_described_without_a_word_of_our_own(name: str) -> None:
    assert SCHEMAS[name] == without_demands(SCHEMAS[name])


@pytest.mark.parametrize("name", DEMANDING)
def test_a_class_that_a_former_release_described_breaks_nobody(name: str) -> None:
    now = contract_of(CLASSES[name])
    document = document_of(now)
    del document["x-penstock"]["names_demands"]
    former = contract_in(without_demands(document))
    assert schema_hash(former.json_schema) != schema_hash(now.json_schema)
    assert check(*comparable(former, now), Rule.FULL) == []
    assert check(*comparable(contract_in(document_of(now)), now), Rule.FULL) == []


def test_demands_are_kept_in_a_document() -> None:
    old, new = contract_of(CLASSES["moment"]), contract_of(CLASSES["with zone"])
    locked = contract_in(document_of(old))
    assert check(*comparable(locked, new), Rule.BACKWARD)
    assert new.json_schema["properties"]["x"][DEMANDS] == ["with a time zone"]
    assert contract_of(CLASSES["by integer"]).json_schema["properties"]["x"][KEYS] == {
        "type": "integer"
    }


def test_a_type_that_is_no_text_has_no_contract() -> None:
    class Half(Event, type="half \ud800", version=1):
        a: int

    with pytest.raises(RegistrationError, match="half a surrogate pair"):
        contract_of(Half)
