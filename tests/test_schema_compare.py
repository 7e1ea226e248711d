"""Every ordinary change of an event has the right verdict, and says where, why and for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple
from uuid import UUID

import pytest
from pydantic import UUID4, BaseModel, ConfigDict, Field, SecretStr, create_model

from penstock.core.schema import (
    Break,
    Cause,
    Difference,
    Rule,
    can_read,
    canonical,
    check,
    differences,
    schema_hash,
)
from penstock.core.schema.breaks import READERS_ON_NEW_CODE, READERS_ON_OLD_CODE
from penstock.errors import ContractError

Schema = dict[str, Any]
FINE = ""
BOOLEAN = {"type": "boolean"}
# A dictionary whose keys have a pattern refuses other keys, too.
OWN_NAMES = {"properties", "patternProperties"}


class Change(NamedTuple):
    """A change and its first break in each direction, as `path: rule`; FINE where there is none."""

    name: str
    old: Schema
    new: Schema
    backward: str
    forward: str


def closed(node: Any) -> Any:
    """The schema as an event writes it: models have no fields besides their own."""
    if isinstance(node, list):
        return [closed(member) for member in node]
    if not isinstance(node, dict):
        return node
    inner = {key: closed(value) for key, value in node.items()}
    if inner.get("type") == "object" and not inner.keys().isdisjoint(OWN_NAMES):
        inner.setdefault("additionalProperties", False)
    return inner


def schema_of(model: type[BaseModel]) -> Schema:
    schema: Schema = closed(model.model_json_schema())
    return schema


def event(**fields: Any) -> Schema:
    """The schema of an event with these fields: a type, or a type with a default."""
    definitions: Any = {
        name: field if isinstance(field, tuple) else (field, ...) for name, field in fields.items()
    }
    model: type[BaseModel] = create_model("Placed", **definitions)
    return schema_of(model)


def open_event(**fields: Any) -> Schema:
    """An event whose writers may add fields of their own."""
    return {**event(**fields), "additionalProperties": True}


def value(schema: Any) -> Schema:
    """An event with one required field of that schema."""
    return {
        "type": "object",
        "properties": {"v": schema},
        "required": ["v"],
        "additionalProperties": False,
    }


def union(*branches: Schema, **more: Any) -> Schema:
    return {"anyOf": list(branches), **more}


def with_aliases(schema: Schema, name: str, *aliases: str) -> Schema:
    properties = dict(schema["properties"])
    properties[name] = {**properties[name], "x-penstock-aliases": list(aliases)}
    return {**schema, "properties": properties}


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class MoreColours(Enum):
    RED = "red"
    BLUE = "blue"
    GREEN = "green"


class Line(BaseModel):
    amount: int
    note: str = ""


class NotedLine(BaseModel):
    amount: int
    note: str


class ExactLine(BaseModel):
    amount: float
    note: str = ""
    taxed: bool = False


class ReferredLine(Line):
    """Has one more field, which is required."""

    reference: str


class Card(BaseModel):
    kind: Literal["card"]
    number: str


class LongerCard(Card):
    expires: str = ""


class DatedCard(Card):
    expires: str


class Cash(BaseModel):
    kind: Literal["cash"]


class Cheque(BaseModel):
    kind: Literal["cheque"]
    bank: str


class Paper(BaseModel):
    kind: Literal["cash", "voucher"]


class Voucher(BaseModel):
    kind: Literal["voucher"]


class TaggedCard(BaseModel):
    kind: Literal["card"] = "card"
    number: str = ""


class TaggedCash(BaseModel):
    kind: Literal["cash"] = "cash"
    till: int = 0


class LongerTaggedCash(TaggedCash):
    coins: int = 0


class Tree(BaseModel):
    size: int
    children: list[Tree] = []


class WideTree(BaseModel):
    size: float
    children: list[WideTree] = []
    colour: str | None = None


class NarrowTree(BaseModel):
    size: Annotated[int, Field(ge=0)]
    children: list[NarrowTree] = []


class Folder(BaseModel):
    files: list[File]


class File(BaseModel):
    parent: Folder | None = None
    size: int


class WideFolder(BaseModel):
    files: list[WideFile]


class WideFile(BaseModel):
    parent: WideFolder | None = None
    size: int | str


class Tagged(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


def tagged(*variants: Any) -> Any:
    union_of: Any = variants[0]
    for variant in variants[1:]:
        union_of |= variant
    return Annotated[union_of, Field(discriminator="kind")]


def field_changes() -> Iterator[Change]:
    a = event(a=int)
    yield Change("nothing", a, event(a=int), FINE, FINE)
    yield Change("required field added", a, event(a=int, b=str), "b: required-added", FINE)
    yield Change("required field removed", event(a=int, b=str), a, FINE, "b: required-removed")
    yield Change("optional field added", a, event(a=int, b=(str, "")), FINE, FINE)
    yield Change("optional field removed", event(a=int, b=(str, "")), a, FINE, FINE)
    yield Change(
        "default added", a, event(a=(int, 1)), FINE, "a: required-to-optional"
    )  # fmt: skip
    yield Change("default removed", event(a=(int, 1)), a, "a: optional-to-required", FINE)
    yield Change("default changed", event(a=(int, 1)), event(a=(int, 2)), FINE, FINE)
    yield Change(
        "renamed", a, event(b=int), "b: required-added", "a: required-removed"
    )  # fmt: skip
    renamed = with_aliases(event(b=int), "b", "a")
    yield Change("renamed with an alias", a, renamed, FINE, "a: required-removed")
    yield Change("alias added", event(b=int), renamed, FINE, FINE)
    yield Change(
        "renamed with an alias to another type",
        event(a=str),
        renamed,
        "a: type-changed",
        "a: required-removed",
    )
    yield Change(
        "renamed twice", a, with_aliases(event(c=int), "c", "b", "a"), FINE, "a: required-removed"
    )
    yield Change(
        "optional renamed with an alias",
        event(a=(int, 1)),
        with_aliases(event(b=(int, 1)), "b", "a"),
        FINE,
        FINE,
    )
    yield Change(
        "optional becomes required under a new name",
        event(a=(int, 1)),
        renamed,
        "b: optional-to-required",
        FINE,
    )
    yield Change(
        "alias is another field",
        event(a=int, b=int),
        with_aliases(event(a=int, b=int), "b", "a"),
        FINE,
        FINE,
    )
    yield Change(
        "alias of an optional field is another field",
        event(a=int, b=(int, 0)),
        with_aliases(event(a=int, b=(int, 0)), "b", "a"),
        "a: not-provable",
        FINE,
    )
    described = event(a=Annotated[int, Field(description="How many.", examples=[1], title="N")])
    yield Change("described", a, described, FINE, FINE)


def type_changes() -> Iterator[Change]:
    def change(name: str, old: Any, new: Any, backward: str, forward: str) -> Change:
        return Change(name, event(a=old), event(a=new), backward, forward)

    yield change("int to str", int, str, "a: type-changed", "a: type-changed")
    yield change("int to float", int, float, FINE, "a: type-widened")
    yield change("float to int", float, int, "a: type-narrowed", FINE)
    yield change("bool to int", bool, int, "a: type-changed", "a: type-changed")
    yield change("str to optional", str, str | None, FINE, "a: type-widened")
    yield change("optional to str", str | None, str, "a: type-narrowed", FINE)
    yield change("int to int or str", int, int | str, FINE, "a: type-widened")
    yield change("int or str to str", int | str, str, "a: type-narrowed", FINE)
    yield change("int or str to float or str", int | str, float | str, FINE, "a: type-widened")
    yield change(
        "int or str to bool or str", int | str, bool | str, "a: type-changed", "a: type-changed"
    )
    yield change("union in another order", int | str | None, None | str | int, FINE, FINE)
    yield change(
        "optional int to optional str", int | None, str | None, "a: type-changed", "a: type-changed"
    )
    yield change("int to anything", int, Any, FINE, "a: type-widened")
    yield change("anything to int", Any, int, "a: type-narrowed", FINE)
    yield change("int to decimal", int, Decimal, FINE, "a: type-widened")
    yield change("list to str", list[str], str, "a: type-changed", "a: type-changed")
    yield change("model to str", Line, str, "a: type-changed", "a: type-changed")
    yield change(
        "scalar to list", int, list[int], "a: type-changed", "a: type-changed"
    )  # fmt: skip
    text = {"type": "string"}
    nothing = {"type": "null"}
    listed = value({"type": ["string", "null"]})
    yield Change("type list to union", listed, value(union(text, nothing)), FINE, FINE)
    yield Change("type list loses null", listed, value(text), "v: type-narrowed", FINE)
    numbers = value(union({"type": "integer"}, {"type": "number"}))
    yield Change("integer or number to number", numbers, value({"type": "number"}), FINE, FINE)
    yield Change(
        "number to integer or string",
        value({"type": "number"}),
        value(union({"type": "integer"}, text)),
        "v: type-changed",
        "v: type-changed",
    )


def value_changes() -> Iterator[Change]:
    def change(name: str, old: Any, new: Any, backward: str, forward: str) -> Change:
        return Change(name, event(a=old), event(a=new), backward, forward)

    yield change("enum gains a value", Colour, MoreColours, FINE, "a: enum-widened")
    yield change("enum loses a value", MoreColours, Colour, "a: enum-narrowed", FINE)
    yield change("enum to literal", Colour, Literal["blue", "red"], FINE, FINE)
    yield change("literal gains a value", Literal["a"], Literal["a", "b"], FINE, "a: enum-widened")
    yield change(
        "literal changes", Literal["a"], Literal["b"], "a: enum-narrowed", "a: enum-widened"
    )
    yield change("literal to str", Literal["a"], str, FINE, "a: enum-widened")
    yield change("str to enum", str, Colour, "a: enum-narrowed", FINE)
    yield change("enum to optional enum", Colour, Colour | None, FINE, "a: type-widened")
    yield change(
        "literal of two types", Literal["a", 1], Literal["a", 1, 2], FINE, "a: enum-widened"
    )
    yield change(
        "literal of two types to a union", Literal["a", 1], int | str, FINE, "a: enum-widened"
    )
    yield change("literal string to int", Literal["a"], int, "a: type-changed", "a: type-changed")
    yield change("bool to a literal", bool, Literal[True], "a: enum-narrowed", FINE)
    yield Change(
        "a value shared by two variants",
        value({"enum": ["a", "b"]}),
        value(union({"const": "a"}, {"const": "b"})),
        FINE,
        FINE,
    )
    yield Change(
        "a range to its values",
        value({"type": "integer", "minimum": 1, "maximum": 3}),
        value({"enum": [1, 2, 3]}),
        FINE,
        FINE,
    )
    yield Change("1 is 1.0", value({"const": 1}), value({"const": 1.0}), FINE, FINE)
    yield Change(
        "1 is not true",
        value({"const": 1}),
        value({"const": True}),
        "v: type-changed",
        "v: type-changed",
    )


def model_changes() -> Iterator[Change]:
    def change(name: str, old: Any, new: Any, backward: str, forward: str) -> Change:
        return Change(name, event(a=old), event(a=new), backward, forward)

    yield change("nested field required", Line, NotedLine, "a.note: optional-to-required", FINE)
    yield change("nested field added", Line, ReferredLine, "a.reference: required-added", FINE)
    yield change("nested fields widened", Line, ExactLine, FINE, "a.amount: type-widened")
    yield change(
        "nested in a list", list[Line], list[NotedLine], "a[].note: optional-to-required", FINE
    )
    yield change(
        "nested in a dict", dict[str, Line], dict[str, ExactLine], FINE, "a.*.amount: type-widened"
    )
    yield change(
        "nested and optional", Line | None, NotedLine | None, "a.note: optional-to-required", FINE
    )
    cards: Any = tagged(Card, Cash)
    more_cards: Any = tagged(Card, Cash, Cheque)
    yield change("variant added", list[cards], list[more_cards], FINE, "a[]: union-widened")
    yield change(
        "variant removed", tagged(Card, Cash, Cheque), tagged(Card, Cash), "a: union-narrowed", FINE
    )
    yield change("variants in another order", tagged(Card, Cash), tagged(Cash, Card), FINE, FINE)
    yield change(
        "variant gains an optional field", tagged(Card, Cash), tagged(LongerCard, Cash), FINE, FINE
    )
    yield change(
        "variant gains a required field",
        tagged(Card, Cash),
        tagged(DatedCard, Cash),
        "a.expires: required-added",
        FINE,
    )
    yield change(
        "variant with two tags is divided",
        tagged(Card, Paper),
        tagged(Card, Cash, Voucher),
        FINE,
        FINE,
    )
    yield change(
        "tagged with defaults",
        tagged(TaggedCard, TaggedCash),
        tagged(TaggedCard, LongerTaggedCash),
        FINE,
        FINE,
    )
    yield change("tagged to plain union", tagged(Card, Cash), Card | Cash, FINE, FINE)
    yield change(
        "plain union gains a variant", Card | Cash, Card | Cash | Cheque, FINE, "a: union-widened"
    )
    yield change("model to a tagged union", Card, cards, FINE, "a.number: required-removed")
    yield Change("recursive, the same", schema_of(Tree), event_tree(Tree), FINE, FINE)
    yield Change(
        "recursive and wider", schema_of(Tree), schema_of(WideTree), FINE, "size: type-widened"
    )
    yield Change(
        "recursive and narrower",
        schema_of(Tree),
        schema_of(NarrowTree),
        "size: minimum-raised",
        FINE,
    )
    yield change("recursive, nested", Tree, NarrowTree, "a.size: minimum-raised", FINE)
    yield Change(
        "mutually recursive",
        schema_of(Folder),
        schema_of(WideFolder),
        FINE,
        "files[].size: type-widened",
    )


def event_tree(model: type[BaseModel]) -> Schema:
    """The same schema, with its definition under another name."""
    text = str(schema_of(model)).replace("Tree", "Wood")
    schema: Schema = eval(text)  # noqa: S307 - it is our own schema
    return schema


def container_changes() -> Iterator[Change]:
    def change(name: str, old: Any, new: Any, backward: str, forward: str) -> Change:
        return Change(name, event(a=old), event(a=new), backward, forward)

    few = Annotated[list[int], Field(max_length=3)]
    some = Annotated[list[int], Field(min_length=1)]
    yield change("members widened", list[int], list[float], FINE, "a[]: type-widened")
    yield change("members optional", list[int], list[int | None], FINE, "a[]: type-widened")
    yield change("list may not be empty", list[int], some, "a: min-items-raised", FINE)
    yield change("list is bounded", list[int], few, "a: max-items-lowered", FINE)
    yield change("list to set", list[int], set[int], "a: unique-items-added", FINE)
    yield change(
        "dict values widened", dict[str, int], dict[str, int | str], FINE, "a.*: type-widened"
    )
    yield change(
        "dict values changed",
        dict[str, int],
        dict[str, str],
        "a.*: type-changed",
        "a.*: type-changed",
    )
    yield change(
        "dict keys restricted",
        dict[str, int],
        dict[Colour, int],
        "a: property-names-narrowed",
        FINE,
    )
    yield change(
        "dict keys gain a value",
        dict[Colour, int],
        dict[MoreColours, int],
        FINE,
        "a: property-names-widened",
    )
    short = Annotated[str, Field(max_length=3)]
    patterned = Annotated[str, Field(pattern="^x")]
    yield change(
        "dict keys get a pattern",
        dict[str, int],
        dict[patterned, int],
        "a: property-names-narrowed",
        FINE,
    )
    yield change(
        "dict with a pattern, values widened",
        dict[patterned, int],
        dict[patterned, float],
        FINE,
        "a.*: type-widened",
    )
    yield change(
        "dict bounded",
        dict[str, int],
        Annotated[dict[str, int], Field(max_length=2)],
        "a: max-properties-lowered",
        FINE,
    )
    yield change(
        "dict not empty",
        dict[str, int],
        Annotated[dict[str, int], Field(min_length=1)],
        "a: min-properties-raised",
        FINE,
    )
    yield change("model to dict", Line, dict[str, int | str], FINE, "a.amount: required-removed")
    yield change(
        "tuple place widened", tuple[int, str], tuple[float, str], FINE, "a[0]: type-widened"
    )
    yield change(
        "tuple grows",
        tuple[int, str],
        tuple[int, str, bool],
        "a: min-items-raised",
        "a: max-items-raised",
    )
    yield change(
        "tuple place changes",
        tuple[int, str],
        tuple[int, int],
        "a[1]: type-changed",
        "a[1]: type-changed",
    )
    yield change("tuple to list", tuple[int, int], list[int], FINE, "a: min-items-lowered")
    yield change("open tuple", tuple[int, ...], tuple[int | str, ...], FINE, "a[]: type-widened")
    yield change("list members shorter", list[str], list[short], "a[]: max-length-lowered", FINE)
    ends = {"type": "array", "prefixItems": [{"type": "integer"}], "items": False}
    goes_on = {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"type": "string"}}
    yield Change("tuple without an end", value(ends), value(goes_on), FINE, "v: max-items-raised")


def limit_changes() -> Iterator[Change]:
    def change(name: str, kind: type, old: Schema, new: Schema, *verdicts: str) -> Change:
        backward, forward = verdicts
        limited = [event(a=Annotated[kind, Field(**limits)]) for limits in (old, new)]
        return Change(name, limited[0], limited[1], backward, forward)

    yield change("minimum raised", int, {"ge": 1}, {"ge": 2}, "a: minimum-raised", FINE)
    yield change("minimum dropped", int, {"ge": 1}, {}, FINE, "a: minimum-lowered")
    yield change("minimum excluded", float, {"ge": 1}, {"gt": 1}, "a: minimum-raised", FINE)
    yield change("the same integers", int, {"ge": 1}, {"gt": 0}, FINE, FINE)
    yield change("maximum lowered", int, {"le": 9}, {"le": 8}, "a: maximum-lowered", FINE)
    yield change("maximum excluded", float, {"le": 9}, {"lt": 9}, "a: maximum-lowered", FINE)
    yield change(
        "multiple of more",
        int,
        {"multiple_of": 2},
        {"multiple_of": 4},
        "a: multiple-of-narrowed",
        FINE,
    )
    yield change(
        "multiple of another",
        int,
        {"multiple_of": 2},
        {"multiple_of": 3},
        "a: multiple-of-narrowed",
        "a: multiple-of-widened",
    )
    yield change("longer", str, {"min_length": 1}, {"min_length": 2}, "a: min-length-raised", FINE)
    yield change(
        "shorter", str, {"max_length": 9}, {"max_length": 8}, "a: max-length-lowered", FINE
    )
    yield change("length freed", str, {"max_length": 9}, {}, FINE, "a: max-length-raised")
    yield change("pattern added", str, {}, {"pattern": "^a"}, "a: pattern-tightened", FINE)
    yield change(
        "pattern changed",
        str,
        {"pattern": "^b"},
        {"pattern": "^a"},
        "a: pattern-tightened",
        "a: pattern-loosened",
    )
    yield Change(
        "literal fits a pattern",
        event(a=Literal["ab", "ac"]),
        event(a=Annotated[str, Field(pattern="^a[bc]$")]),
        FINE,
        "a: enum-widened",
    )
    yield Change(
        "literal does not fit a length",
        event(a=Literal["a", "abc"]),
        event(a=Annotated[str, Field(min_length=2)]),
        "a: min-length-raised",
        "a: enum-widened",
    )
    yield Change(
        "impossible range",
        value({"type": "integer", "minimum": 3, "maximum": 2}),
        value({"type": "string"}),
        FINE,
        "v: type-changed",
    )


def format_changes() -> Iterator[Change]:
    def change(name: str, old: Any, new: Any, backward: str, forward: str) -> Change:
        return Change(name, event(a=old), event(a=new), backward, forward)

    yield change("format added", str, UUID, "a: format-tightened", FINE)
    yield change("format removed", datetime, str, FINE, "a: format-loosened")
    yield change("format changed", datetime, UUID, "a: format-tightened", "a: format-loosened")
    yield change("date to date-time", date, datetime, "a: format-tightened", "a: format-loosened")
    yield change("any version of uuid", UUID4, UUID, FINE, "a: format-loosened")
    yield change("secret", str, SecretStr, FINE, FINE)
    yield change("optional format", datetime | None, str | None, FINE, "a: format-loosened")
    yield Change(
        "email added",
        value({"type": "string"}),
        value({"type": "string", "format": "email"}),
        "v: format-tightened",
        FINE,
    )


def openness_changes() -> Iterator[Change]:
    yield Change("opened", event(a=int), open_event(a=int), FINE, FINE)
    yield Change(
        "field added to an open object",
        open_event(a=int),
        open_event(a=int, b=(str, "")),
        "b: field-typed-in-open-object",
        FINE,
    )
    yield Change(
        "untyped field added to an open object",
        open_event(a=int),
        open_event(a=int, b=(Any, None)),
        FINE,
        FINE,
    )
    yield Change(
        "field removed from an open object",
        open_event(a=int, b=(str, "")),
        open_event(a=int),
        FINE,
        "b: field-untyped-in-open-object",
    )
    yield Change(
        "nested object opened",
        event(a=Tagged),
        event(a=create_model("Named", name=(str, ...))),
        FINE,
        FINE,
    )
    typed = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": {"type": "integer"},
    }
    yield Change("unknown fields get a type", open_event(a=int), typed, "*: type-narrowed", FINE)
    yield Change("a field for a typed rest", typed, event(a=int, b=(int, 0)), FINE, FINE)
    yield Change(
        "another type than the rest had",
        typed,
        event(a=int, b=(str, "")),
        "b: type-changed",
        "b: type-changed",
    )
    unevaluated = {**event(a=int), "additionalProperties": True, "unevaluatedProperties": False}
    yield Change("closed in other words", event(a=int), unevaluated, FINE, FINE)


def combined_changes() -> Iterator[Change]:
    low = {"type": "integer", "minimum": 0}
    high = {"type": "integer", "maximum": 9}
    yield Change("allOf in one", value({"allOf": [low, high]}), value({**low, **high}), FINE, FINE)
    yield Change(
        "allOf tightened", value(low), value({"allOf": [low, high]}), "v: maximum-lowered", FINE
    )
    text = {"type": "string"}
    yield Change(
        "not what is written",
        value(text),
        value({"not": {"type": "integer"}}),
        FINE,
        "v: type-widened",
    )
    yield Change(
        "not provable",
        value(text),
        value({**text, "not": {"minLength": 3}}),
        "v: not-provable",
        FINE,
    )
    yield Change("nothing allowed any more", value(text), value(False), "v: forbidden", FINE)
    yield Change("anything", value(text), value(True), FINE, "v: type-widened")
    odd = {**text, "isPalindrome": True}
    yield Change("unknown keyword added", value(text), value(odd), "v: not-provable", FINE)
    yield Change(
        "unknown keyword kept",
        value({**odd, "minLength": 2}),
        value(odd),
        FINE,
        "v: min-length-lowered",
    )
    one_of = {"oneOf": [low, high]}
    yield Change(
        "exactly one",
        value({"type": "integer", "minimum": 10}),
        value(one_of),
        FINE,
        "v: minimum-lowered",
    )
    yield Change(
        "both of one", value({"const": 5}), value(one_of), "v: not-provable", "v: enum-widened"
    )
    yield Change(
        "one of to any of", value(one_of), value(union(low, high)), FINE, "v: not-provable"
    )
    yield Change(
        "definitions by another name",
        {"$ref": "#/$defs/A", "$defs": {"A": value(text)}},
        value(text),
        FINE,
        FINE,
    )
    depends = {**event(a=(int, 0), b=(int, 0)), "dependentRequired": {"a": ["b"]}}
    yield Change(
        "fields needed together", event(a=(int, 0), b=(int, 0)), depends, "a: not-provable", FINE
    )
    some = {"type": "array", "contains": {"const": 1}}
    yield Change("contains added", value({"type": "array"}), value(some), "v: not-provable", FINE)
    yield Change(
        "contains kept", value({**some, "minItems": 2}), value(some), FINE, "v: min-items-lowered"
    )


def exact_changes() -> Iterator[Change]:
    """Limits that leave just one possibility leave one, not none."""
    changed = "v: type-changed"
    one_field = {**open_event(a=int), "maxProperties": 1}
    for name, exact in (
        ("a string of one length", {"type": "string", "minLength": 2, "maxLength": 2}),
        ("one number", {"type": "number", "minimum": 1.5, "maximum": 1.5}),
        ("one integer", {"type": "integer", "exclusiveMinimum": 1, "maximum": 2}),
        ("a list of one", {"type": "array", "minItems": 1, "maxItems": 1}),
        ("an object of one field", one_field),
    ):
        yield Change(f"{name} to a boolean", value(exact), value(BOOLEAN), changed, changed)


CHANGES = [
    *exact_changes(),
    *field_changes(),
    *type_changes(),
    *value_changes(),
    *model_changes(),
    *container_changes(),
    *limit_changes(),
    *format_changes(),
    *openness_changes(),
    *combined_changes(),
]


def first(found: list[Break]) -> str:
    return f"{found[0].place}: {found[0].rule}" if found else FINE


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_breaks_whom_it_should(change: Change) -> None:
    backward = check(change.old, change.new, Rule.BACKWARD)
    forward = check(change.old, change.new, Rule.FORWARD)
    assert (first(backward), first(forward)) == (change.backward, change.forward)
    assert check(change.old, change.new, Rule.FULL) == backward + forward
    assert (can_read(change.old, change.new) == []) == (backward == [])
    assert (can_read(change.new, change.old) == []) == (forward == [])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_every_break_tells_who_why_and_what_to_do(change: Change) -> None:
    for rule, who in ((Rule.BACKWARD, READERS_ON_NEW_CODE), (Rule.FORWARD, READERS_ON_OLD_CODE)):
        for found in check(change.old, change.new, rule):
            assert found.who == who
            assert found.rule in set(Cause)
            assert found.fix.endswith(".")
            assert found.fix.count(".") == 1
            assert found.reason
            assert found.before
            assert found.after


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_what_is_not_editorial_is_a_difference_and_changes_the_hash(change: Change) -> None:
    told = differences(change.old, change.new)
    assert told == sorted(told)
    is_same = schema_hash(change.old) == schema_hash(change.new)
    assert is_same == all(one.is_editorial for one in told)
    assert differences(change.old, change.old) == []
    if check(change.old, change.new, Rule.FULL):
        assert not is_same


def test_the_table_is_as_large_as_promised() -> None:
    assert len(CHANGES) >= 100
    assert len({change.name for change in CHANGES}) == len(CHANGES)
    verdicts = {(change.backward == FINE, change.forward == FINE) for change in CHANGES}
    assert len(verdicts) == 4


def test_a_break_is_told_from_the_old_schema_to_the_new_one_in_both_directions() -> None:
    old, new = event(a=int, b=str), event(a=float, c=str)
    forward, _ = check(old, new, Rule.FORWARD)[:2]
    backward = check(old, new, Rule.BACKWARD)
    assert (forward.path, forward.rule) == ("b", "required-removed")
    assert (forward.before, forward.after) == ("required, string", "absent")
    assert backward == [
        Break(
            path="c",
            rule="required-added",
            before="absent",
            after="required, string",
            reason="the reader needs the field, and what is written need not have it",
            who="consumers on the new code, reading events that are already written",
            fix="Give it a default, or raise the version and write an upcaster.",
        )
    ]
    widened = next(one for one in check(old, new, Rule.FORWARD) if one.path == "a")
    assert (widened.before, widened.after) == ("integer", "number")


def test_all_breaks_are_listed_not_only_the_first() -> None:
    old = event(a=int, lines=list[Line])
    new = event(a=str, lines=list[NotedLine], c=int)
    paths = [found.path for found in check(old, new, Rule.BACKWARD)]
    assert sorted(paths) == ["a", "c", "lines[].note"]


def test_what_cannot_be_proved_says_which_keyword_stopped_it() -> None:
    (found,) = can_read(value({"type": "array"}), value({"type": "array", "contains": {}}))
    assert found.rule == "not-provable"
    assert "`contains`" in found.reason


def test_the_event_itself_has_a_name() -> None:
    (found,) = can_read({"type": "object"}, {"type": "object", "maxProperties": 3})
    assert (found.path, found.place) == ("", "the event")


def test_a_comparison_that_would_not_end_is_a_break() -> None:
    letters = [
        {"anyOf": [{"required": [f"{group}{letter}"]} for letter in "abcdefgh"]}
        for group in "uvwxyz"
    ]
    (found,) = can_read({"allOf": letters}, {"required": ["other"]})
    assert found.rule == "not-provable"
    assert "too many" in found.reason


def test_a_reference_that_leads_nowhere_else_is_a_break() -> None:
    loop: Schema = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}}
    assert can_read(loop, loop) == []
    assert can_read(value({"type": "string"}), loop)
    elsewhere = value({"$ref": "https://example.com/schema"})
    assert can_read(elsewhere, {**elsewhere, "title": "Placed"}) == []
    assert can_read(value(True), elsewhere)[0].rule == "not-provable"


def test_a_schema_that_is_none_is_refused() -> None:
    with pytest.raises(ContractError, match="where a JSON Schema is expected"):
        canonical({"properties": {"a": 3}})


def test_the_hash_ignores_order_names_and_editorial_words() -> None:
    first_way: Schema = {
        "title": "Placed",
        "type": "object",
        "required": ["b", "a"],
        "properties": {
            "a": {"$ref": "#/$defs/Colour", "default": "red"},
            "b": {"anyOf": [{"type": "null"}, {"type": "string"}], "description": "B"},
            "title": {"type": "string", "minLength": 0},
        },
        "$defs": {"Colour": {"enum": ["red", "blue"], "title": "Colour"}},
    }
    second_way: Schema = {
        "properties": {
            "title": {"type": ["string"]},
            "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "a": {"enum": ["blue", "red"]},
        },
        "required": ["a", "b"],
        "additionalProperties": True,
        "type": "object",
    }
    assert canonical(first_way) == canonical(second_way)
    assert schema_hash(first_way) == schema_hash(second_way)
    del second_way["properties"]["title"]
    assert schema_hash(first_way) != schema_hash(second_way)


def test_the_hash_ignores_the_names_of_recursive_definitions_and_keeps_aliases() -> None:
    assert schema_hash(schema_of(Tree)) == schema_hash(event_tree(Tree))
    assert schema_hash(schema_of(Tree)) != schema_hash(schema_of(WideTree))
    assert schema_hash(with_aliases(event(a=int), "a", "b")) != schema_hash(event(a=int))


def test_differences_name_every_change_at_its_place() -> None:
    old = event(a=int, b=(str, ""), lines=list[Line], colour=Colour)
    new = event(a=(int, 1), c=str, lines=list[ExactLine], colour=MoreColours)
    told = [
        replace(one, is_editorial=False) for one in differences(old, new) if not one.is_editorial
    ]
    assert told == [
        Difference("a", "changed", "required", "optional"),
        Difference("b", "removed", "optional, string", "absent"),
        Difference("c", "added", "absent", "required, string"),
        Difference("colour", "changed", 'enum ["blue","red"]', 'enum ["blue","green","red"]'),
        Difference("lines[].amount", "changed", "integer", "number"),
        Difference("lines[].taxed", "added", "absent", "optional, boolean"),
    ]


def test_differences_in_words_alone_are_editorial() -> None:
    told = differences(event(a=int), event(a=Annotated[int, Field(description="How many.")]))
    assert told == [
        Difference("a", "changed", "no description", 'description "How many."', is_editorial=True)
    ]


def test_differences_inside_unions_and_recursive_models_are_found() -> None:
    assert [
        one.path
        for one in differences(schema_of(Tree), schema_of(NarrowTree))
        if not one.is_editorial
    ] == ["size"]
    cards = differences(event(a=tagged(Card, Cash)), event(a=tagged(LongerCard, Cash, Cheque)))
    assert [(one.path, one.kind) for one in cards if not one.is_editorial] == [
        ("a", "added"),
        ("a.expires", "added"),
    ]
