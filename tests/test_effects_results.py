"""What a call gives back is the same whether it was called or remembered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field, SecretStr, field_serializer

from penstock.core.effects import RESULT_BYTES_MAX
from penstock.errors import ContractError, FatalError
from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.effects_at_work import EffectBench, Outside

AN_ID = UUID("00000000-0000-7000-8000-000000000007")


class Colour(Enum):
    RED = "red"


class Receipt(BaseModel):
    """With everything that JSON does not know by itself."""

    number: int = Field(alias="receiptNumber")
    amount: Decimal
    sent_at: datetime
    id: UUID
    colour: Colour = Colour.RED
    notes: tuple[str, ...] = ()


class ReceiptOfTomorrow(Receipt):
    """Demands what no recorded result has."""

    carrier: str


@dataclass(frozen=True)
class Label:
    """A plain dataclass."""

    parcel: UUID
    day: date
    takes: timedelta


RECEIPT = Receipt(
    receiptNumber=7,
    amount=Decimal("10.10"),
    sent_at=datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC),
    id=AN_ID,
    notes=("a", "b"),
)
LABEL = Label(AN_ID, date(2026, 1, 2), timedelta(minutes=90))


@pytest.fixture(scope="module")
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """One for all tests of this file: each has an event of its own."""
    with new_database(servers.database_url, template_database) as url:
        yield url


@pytest.fixture
def bench(database_url: str) -> Iterator[EffectBench]:
    made = EffectBench(database_url)
    yield made
    made.close()


def twice(bench: EffectBench, value: Any, returns: Any = None) -> tuple[Any, Any]:
    """As the caller gets it, and as a retry does."""
    outside = Outside(value)
    fresh = bench.process().once(bench.event, "receipt", outside, returns=returns)
    recorded = bench.process().once(bench.event, "receipt", outside, returns=returns)
    assert outside.calls == 1
    return fresh, recorded


@pytest.mark.parametrize(
    ("value", "returns"),
    [
        (RECEIPT, Receipt),
        ([RECEIPT], list[Receipt]),
        ({AN_ID: LABEL}, dict[UUID, Label]),
        (LABEL, Label),
        (Decimal("1.10"), Decimal),
        ((1, "a"), tuple[int, str]),
        ({3, 1, 2}, set[int]),
        (None, Receipt | None),
        (b"text", bytes),
        (1e16, float),
        (5, Annotated[int, Field(gt=0, json_schema_extra={"not": ["hashable"]})]),
        (None, type(None)),
    ],
)
def test_a_result_comes_back_as_its_type(bench: EffectBench, value: Any, returns: Any) -> None:
    fresh, recorded = twice(bench, value, returns)
    assert fresh == recorded == value
    assert type(fresh) is type(recorded) is type(value)


@pytest.mark.parametrize(
    ("value", "returns", "expected"),
    [
        (RECEIPT.model_dump(by_alias=True), Receipt, RECEIPT),
        ([RECEIPT.model_dump(mode="json", by_alias=True)], list[Receipt], [RECEIPT]),
        ("5", int, 5),
        (str(AN_ID), UUID, AN_ID),
    ],
)
def test_what_can_be_read_as_the_type_need_not_be_of_it(
    bench: EffectBench, value: Any, returns: Any, expected: Any
) -> None:
    fresh, recorded = twice(bench, value, returns)
    assert fresh == recorded == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("ä \U0001f600", "ä \U0001f600"),
        ((1, 2), [1, 2]),
        ({"b": 1, "a": {"c": [True, None]}}, {"a": {"c": [True, None]}, "b": 1}),
        ({1: "one"}, {"1": "one"}),
        (AN_ID, str(AN_ID)),
        (Decimal("1.10"), "1.10"),
        (Colour.RED, "red"),
        (LABEL, {"parcel": str(AN_ID), "day": "2026-01-02", "takes": "PT1H30M"}),
        # PostgreSQL prints these in another way than they were written.
        (1e300, 1e300),
        (1e16, 10**16),
        (-0.0, 0.0),
    ],
)
def test_without_a_type_a_result_comes_back_as_plain_json(
    bench: EffectBench, value: Any, expected: Any
) -> None:
    fresh, recorded = twice(bench, value)
    assert fresh == recorded == expected
    assert repr(fresh) == repr(recorded)


class Unwilling(BaseModel):
    """Fails whoever writes it."""

    word: str = "secret"

    @field_serializer("word")
    def refuse(self, word: str) -> str:
        raise ZeroDivisionError(word)


@pytest.mark.parametrize(
    ("value", "returns", "says"),
    [
        (object(), None, "object cannot be written as JSON"),
        (Unwilling(), None, "Unwilling cannot be written as JSON"),
        (Unwilling(), Unwilling, "Unwilling cannot be written as JSON"),
        ({"a": "secret\0"}, None, r"NUL character at result\.a"),
        ({"a": [float("nan")]}, None, r"NaN or an infinity at result\.a\[0\]"),
        (float("inf"), float | None, "NaN or an infinity"),
        ("secret", int, "str cannot be written as JSON and read back as int"),
        (0, Annotated[int, Field(gt=0)], "int cannot be written as JSON and read back"),
        (2**70, int, "cannot be written as JSON"),
        ("\ud800", str, "cannot be written as JSON"),
        ("x" * RESULT_BYTES_MAX, None, f"the limit is {RESULT_BYTES_MAX}"),
        (b"\xff", None, "bytes cannot be written as JSON"),
    ],
)
def test_a_result_that_cannot_be_kept_is_no_reason_to_call_again(
    bench: EffectBench, value: Any, returns: Any, says: str
) -> None:
    outside = Outside(value)
    with pytest.raises(FatalError, match=says) as first:
        bench.process().once(bench.event, "receipt", outside, returns=returns)
    assert "secret" not in str(first.value)
    for interrupted in ("retry", "bury"):
        either = f"has happened.* no JSON .* or more than {RESULT_BYTES_MAX} bytes"
        with pytest.raises(FatalError, match=either):
            bench.process().once(
                bench.event,
                "receipt",
                outside,
                interrupted=interrupted,
                returns=returns,
            )
    assert outside.calls == 1
    assert bench.rows() == [("receipt", True, 1)]


def test_the_largest_result_fits(bench: EffectBench) -> None:
    value = "x" * (RESULT_BYTES_MAX - len('""'))
    assert twice(bench, value) == (value, value)


def test_a_type_that_no_longer_fits_the_record_says_so_and_calls_nothing(
    bench: EffectBench,
) -> None:
    outside = Outside(RECEIPT)
    bench.process().once(bench.event, "receipt", outside, returns=Receipt)
    with pytest.raises(ContractError, match="does not fit ReceiptOfTomorrow"):
        bench.process().once(bench.event, "receipt", outside, returns=ReceiptOfTomorrow)
    assert outside.calls == 1


class Charge(BaseModel):
    token: SecretStr


@pytest.mark.parametrize(
    ("value", "returns"),
    [(Charge(token=SecretStr("t")), Charge), (Charge(token=SecretStr("t")), None)],
)
def test_a_secret_is_not_kept_as_asterisks(bench: EffectBench, value: Any, returns: Any) -> None:
    with pytest.raises(FatalError, match="asterisks"):
        bench.process().once(bench.event, "receipt", Outside(value), returns=returns)
