"""A catalogue with something of everything, for the tests of documents."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field

from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry

WEIRD_TYPE = "störung | 100% `<b>` #1 [x](y)"
HOSTILE = (
    "a | b `c` <script>alert(1)</script> [click](http://evil.example) ![i](x)\n"
    "# heading\n\n- item\n\n1. one\n\n<img src=x>\n\n***\n\n&lt; \\| *_bold_* www.evil.example"
)


class Currency(StrEnum):
    EUR = "EUR"
    USD = "USD"


class Money(BaseModel):
    """An amount."""

    cents: int = Field(ge=0, le=10**9, multiple_of=5)
    currency: Currency = Currency.EUR


class Card(BaseModel):
    kind: Literal["card"]
    number: str = Field(pattern=r"^\d{4}-\d{4}$")


class Transfer(BaseModel):
    kind: Literal["transfer"]
    iban: str = Field(min_length=15, max_length=34)


class Category(BaseModel):
    name: str
    parent: Category | None = None
    children: list[Category] = []


class Line(BaseModel):
    sku: str = Field(pattern=r"^[A-Z]{3}-\d+$", description="What is sold")
    price: Money = Field(description="Price of one, before tax")
    options: dict[str, Money | str] = {}
    categories: list[Category] = []


class Placed(BaseModel):
    order_id: UUID
    placed_at: datetime
    due: date | None = None
    patience: timedelta | None = None
    lines: Annotated[list[Line], Field(min_length=1, max_length=50)]
    payment: Card | Transfer = Field(discriminator="kind")
    origin: tuple[float, float, Literal["N", "S"]]
    tags: set[str] = Field(default_factory=set, max_length=9)
    rates: dict[Currency, Decimal] = {}
    limit: float = Field(default=float("inf"), gt=0)
    note: str | int | None = Field(default=None, validation_alias="remark")
    extra: Any = None


class Node(BaseModel):
    value: int = 7
    next: Node | None = None


PLACED_1 = Contract(
    event_type="orders.placed",
    version=1,
    json_schema={
        "type": "object",
        "title": "Placed",
        "properties": {"order_id": {"type": "string", "format": "uuid"}},
        "required": ["order_id"],
        "additionalProperties": False,
    },
    key="order_id",
)
PLACED_2 = Contract(
    event_type="orders.placed",
    version=2,
    json_schema=Placed.model_json_schema(),
    key="order_id",
    upcasts_from=(1,),
    description="A customer has placed an order.",
)
SHIPPED = Contract(
    event_type="Shipped",
    version=1,
    json_schema={
        "type": "object",
        "properties": {"parcel": {"type": "integer", "x-penstock-aliases": ["box"]}},
        "additionalProperties": False,
    },
)
RECURSIVE = Contract(event_type="tree", version=1, json_schema=Node.model_json_schema())
WEIRD = Contract(
    event_type=WEIRD_TYPE,
    version=3,
    json_schema={
        "type": "object",
        "properties": {
            "a|b`c\n<i>": {"type": "string", "description": HOSTILE, "default": "x|y`<z>"},
            "$ref": {"const": "#/nowhere"},
            "schema": {"enum": ["|", "`", None, 1.5]},
        },
        "required": ["$ref"],
    },
    description=HOSTILE,
)


def rich_catalogue() -> Catalogue:
    return Catalogue(
        title="Shop <b>& more</b>",
        version="2024.1",
        streams=(
            StreamEntry(
                name="orders",
                contracts=(PLACED_2, PLACED_1, SHIPPED),
                producers=("shop",),
                consumers=("mail", "billing.invoices"),
            ),
            StreamEntry(name="orders/EU:1..2", contracts=(SHIPPED, RECURSIVE), producers=("a|b",)),
            StreamEntry(name="orders_x2f_EU", contracts=(WEIRD,), consumers=("x", HOSTILE)),
            StreamEntry(name="empty", contracts=()),
        ),
    )
