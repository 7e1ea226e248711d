from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NotRequired, TypeAlias
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import AliasChoices, AnyUrl, BaseModel, ConfigDict, Field, SecretStr, create_model
from typing_extensions import TypedDict

from penstock import Event
from penstock.core.contract_schema import json_schema_of
from penstock.core.schema.catalogue import Contract
from penstock.core.schema.codegen import render_module
from penstock.core.schema.codegen_names import field_names, member_names
from penstock.core.schema.codegen_source import docstring, quoted

_numbers = itertools.count()
Load: TypeAlias = Callable[[str], ModuleType]
HEADER = "The events of a test."


class Colour(StrEnum):
    RED = "r"
    DARK_GREEN = "dark green"


class Level(IntEnum):
    LOW = 1
    HIGH = -2


class Mixed(Enum):
    ONE = 1
    TWO = "two"


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    zip_code: Annotated[str, Field(pattern=r"^\d{5}$")] | None = None


class Card(BaseModel):
    kind: Literal["card"]
    digits: str


class Cash(BaseModel):
    kind: Literal["cash", "coins"]


class LooseCard(BaseModel):
    kind: Literal["card"] = "card"
    digits: str


class Tree(BaseModel):
    name: str
    children: list[Tree] = Field(default_factory=list)


class Left(BaseModel):
    right: Right | None = None


class Right(BaseModel):
    left: Left | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

    known: int


class Empty(BaseModel):
    pass


class Options(TypedDict):
    verbose: bool
    depth: NotRequired[int]


UUID_ONE = UUID("0b8d3c1e-4a55-4d6c-9f0a-0123456789ab")
NOON = datetime(2024, 5, 6, 12, 0, tzinfo=UTC)
# Whether the generated class has the same schema, a type, and values of it.
FEATURES: dict[str, tuple[bool, Any, list[Any]]] = {
    "string": (True, str, ["", "Größe 雪 \U0001f600 \\ ' \""]),
    "integer": (True, int, [0, -5, 10**30]),
    "number": (True, float, [0.1, -1e300]),
    "boolean": (True, bool, [True, False]),
    "null": (True, None, [None]),
    "any": (False, Any, [None, 1, "x", [1, {"a": None}]]),
    "optional": (True, int | None, [None, 3]),
    "bounded integer": (True, Annotated[int, Field(ge=1, lt=10)], [1, 9]),
    "bounded number": (True, Annotated[float, Field(gt=0.5, le=2.5)], [0.6, 2.5]),
    "multiple": (True, Annotated[int, Field(multiple_of=5)], [0, 15]),
    "bounded string": (True, Annotated[str, Field(min_length=1, max_length=3)], ["a", "雪雪雪"]),
    "pattern": (True, Annotated[str, Field(pattern=r'^[a-z"]+\.\d$')], ['a".1']),
    "optional with bounds": (True, Annotated[int, Field(ge=0)] | None, [None, 0]),
    "uuid": (True, UUID, [UUID_ONE]),
    "datetime": (True, datetime, [NOON, NOON.replace(tzinfo=None)]),
    "date": (True, date, [NOON.date()]),
    "time": (True, time, [time(12, 30), time(1, 2, 3, 4, tzinfo=UTC)]),
    "duration": (True, timedelta, [timedelta(days=3, microseconds=5), -timedelta(hours=1)]),
    "decimal": (True, Decimal, [Decimal("1.10"), Decimal("-0.001"), Decimal(7)]),
    "url": (False, AnyUrl, [AnyUrl("https://example.org/a?b=c")]),
    "bytes": (False, bytes, [b"abc"]),
    "secret": (False, SecretStr, [SecretStr("x")]),
    "list": (True, list[int], [[], [1, 2, 2]]),
    "bounded list": (True, Annotated[list[str], Field(min_length=1, max_length=2)], [["a"]]),
    "list of lists": (True, list[list[int | None]], [[[], [1, None]]]),
    "set": (True, set[str], [set(), {"a"}]),
    "bounded set": (True, Annotated[set[int], Field(min_length=1)], [{4}]),
    "frozen set": (True, frozenset[UUID], [frozenset({UUID_ONE})]),
    "tuple": (True, tuple[int, str, None], [(1, "a", None)]),
    "endless tuple": (True, tuple[int, ...], [(), (1, 2)]),
    "empty tuple": (False, tuple[()], [()]),
    "dictionary": (True, dict[str, int], [{}, {"a b": 1, "class": 2}]),
    "bounded dictionary": (True, Annotated[dict[str, int], Field(min_length=1)], [{"a": 1}]),
    "dictionary of models": (True, dict[str, Address], [{"x": Address(street="s")}]),
    "dictionary with keys of a type": (False, dict[UUID, int], [{UUID_ONE: 1}]),
    "dictionary with keys of a pattern": (
        False,
        dict[Annotated[str, Field(pattern="^a")], int],
        [{"a": 1}],
    ),
    "plain dictionary": (True, dict[str, Any], [{"a": [1, None]}]),
    "union": (True, int | str | bool, [1, "1", True]),
    "union of formats": (True, UUID | date | None, [UUID_ONE, NOON.date(), None]),
    "number or text": (True, float | str, [1.5, "1.5", "x"]),
    "const": (True, Literal["a"], ["a"]),
    "const number": (True, Literal[3], [3]),
    "literals": (True, Literal["a", 'b"', "c\n"], ["a", 'b"', "c\n"]),
    "literals of many kinds": (False, Literal["a", 1, True, None], ["a", 1, True, None]),
    "literals or more": (False, Literal["a"] | Literal["b"] | int, ["a", "b", 1]),
    "enumeration": (True, Colour, list(Colour)),
    "enumeration of integers": (True, Level, list(Level)),
    "enumeration of both": (False, Mixed, list(Mixed)),
    "optional enumeration": (True, Colour | None, [None, Colour.RED]),
    "model": (True, Address, [Address(street="s"), Address(street="s", zip_code="12345")]),
    "optional model": (True, Address | None, [None, Address(street="s")]),
    "union of models": (True, Card | Address, [Address(street="s"), Card(kind="card", digits="1")]),
    "discriminated union": (
        True,
        Annotated[Card | Cash, Field(discriminator="kind")],
        [Card(kind="card", digits="1"), Cash(kind="coins")],
    ),
    "optional discriminated union": (
        True,
        list[Annotated[Card | Cash, Field(discriminator="kind")] | None],
        [[Card(kind="card", digits="1"), None]],
    ),
    "discriminated union without need of a tag": (
        False,
        Annotated[LooseCard | Cash, Field(discriminator="kind")],
        [LooseCard(digits="1"), Cash(kind="cash")],
    ),
    "recursion": (True, Tree, [Tree(name="a", children=[Tree(name="b")])]),
    "recursion of two": (True, Left, [Left(right=Right(left=Left()))]),
    "open model": (True, Open, [Open.model_validate({"known": 1, "more": [2]})]),
    "empty model": (True, Empty, [Empty()]),
    "typed dictionary": (False, Options, [{"verbose": True}, {"verbose": True, "depth": 2}]),
}


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    loaded: list[str] = []

    def load(source: str) -> ModuleType:
        module_name = f"generated_{next(_numbers)}"
        path = tmp_path / f"{module_name}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        loaded.append(module_name)
        spec.loader.exec_module(module)
        return module

    yield load
    for module_name in loaded:
        del sys.modules[module_name]


def fresh_type() -> str:
    return f"codegen.t{next(_numbers)}"


def event_of(**fields: Any) -> type[Event]:
    keywords = {"type": fresh_type(), "version": 1}
    return create_model("Sample", __base__=Event, __cls_kwargs__=keywords, **fields)


def contract(schema: dict[str, Any], **more: Any) -> Contract:
    details: dict[str, Any] = {"event_type": fresh_type(), "version": 1, **more}
    return Contract(json_schema=schema, **details)


def object_of(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "title": "Sample", "properties": properties, **more}


def rendered(schema: dict[str, Any], **more: Any) -> str:
    return render_module([contract(schema, **more)], header=HEADER)


def bare(schema: Any) -> Any:
    """A schema without titles, and with its lists of names in order."""
    if isinstance(schema, dict):
        kept = {key: bare(value) for key, value in schema.items() if key != "title"}
        return kept | {"required": sorted(kept["required"])} if "required" in kept else kept
    return [bare(one) for one in schema] if isinstance(schema, list) else schema


def _optional(annotation: Any) -> Any:
    return annotation if annotation is None else annotation | None


def event_class_in(module: ModuleType) -> type[Event]:
    classes = [one for one in vars(module).values() if isinstance(one, type)]
    (event_class,) = [one for one in classes if issubclass(one, Event) and one is not Event]
    return event_class


def read(event_class: type[Event], payload: Any) -> Any:
    event = event_class.model_validate_json(json.dumps(payload), extra="allow")
    return json.loads(event.model_dump_json(by_alias=True, exclude_unset=True))


@pytest.mark.parametrize("feature", FEATURES)
def test_what_the_original_wrote_is_read_and_written_again(feature: str, load: Load) -> None:
    is_same, annotation, values = FEATURES[feature]
    original: Any = event_of(value=(annotation, ...), other=(_optional(annotation), None))
    schema = json_schema_of(original)
    generated = load(rendered(schema)).Sample
    for value in values:
        payload = json.loads(original(value=value, other=value).model_dump_json(by_alias=True))
        assert read(generated, payload) == payload
    if is_same:
        assert bare(json_schema_of(generated)) == bare(schema)


def test_what_has_no_tag_is_read_where_no_member_demands_one(load: Load) -> None:
    union = Annotated[LooseCard | Cash, Field(discriminator="kind")]
    generated = load(rendered(json_schema_of(event_of(value=(union, ...))))).Sample
    assert read(generated, {"value": {"digits": "1"}}) == {"value": {"digits": "1"}}


@pytest.mark.parametrize(
    ("annotation", "default", "code"),
    [
        (int, 3, "3"),
        (float, 1.5, "1.5"),
        (bool, True, "True"),
        (str, 'a"\n', "'a\"\\n'"),
        (int | None, None, "None"),
        (int | str, "x", '"x"'),
        (Any, "x", '"x"'),
        (Literal["a", "b"], "b", '"b"'),
        (Colour, Colour.DARK_GREEN, "Colour.DARK_GREEN"),
        (Level | None, Level.HIGH, "Level.MINUS_2"),
        (UUID, UUID_ONE, f'UUID("{UUID_ONE}")'),
        (date, NOON.date(), 'date.fromisoformat("2024-05-06")'),
        (datetime, NOON, 'datetime.fromisoformat("2024-05-06T12:00:00+00:00")'),
        (time, time(12, 30), 'time.fromisoformat("12:30:00")'),
        (timedelta, timedelta(days=1, seconds=2), "timedelta(days=1, seconds=2)"),
        (list[int], [], "Field(default_factory=list)"),
        (list[int], [1, 2], "Field(default_factory=lambda: [1, 2])"),
        (set[str], {"a"}, 'Field(default_factory=lambda: {"a"})'),
        (dict[str, int], {}, "Field(default_factory=dict)"),
    ],
)
def test_defaults_are_kept(annotation: Any, default: Any, code: str, load: Load) -> None:
    original = event_of(value=(annotation, default))
    source = rendered(json_schema_of(original))
    assert f" = {code}\n" in source
    generated = load(source).Sample
    assert generated().model_dump_json() == original().model_dump_json()


@pytest.mark.parametrize(
    ("described", "line"),
    [
        ({"type": "integer"}, "value: int | None = None"),
        ({"type": "array", "items": {"type": "integer"}}, "value: list[int] = Field("),
        ({"type": "integer", "default": "hostile"}, "value: int | None = None"),
        ({"type": "string", "format": "uuid", "default": "x"}, "value: UUID | None = None"),
        ({"type": "number", "default": float("inf")}, "value: float | None = None"),
        ({"type": "number", "default": float("nan")}, "value: float | None = None"),
        ({"type": "boolean", "default": 1}, "value: bool | None = None"),
        ({"type": "integer", "default": True}, "value: int | None = None"),
        ({"type": "array", "items": {}, "default": [[]]}, "value: list[Any] | None = None"),
        ({"$ref": "#/$defs/A", "default": {"a": 1}}, "value: A | None = None"),
        ({}, "value: Any = None"),
    ],
)
def test_an_absent_value_is_accepted_without_a_usable_default(
    described: dict[str, Any], line: str, load: Load
) -> None:
    source = rendered(object_of({"value": described}, **{"$defs": {"A": object_of({})}}))
    assert f"    {line}" in source.replace("Sample2", "A")
    assert load(source).Sample()


_EXPONENT = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]+"
DECIMAL_PATTERNS = [
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)",
    r"^[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)$",
    rf"^[+-]?(?:0*[0-9]{{1,8}}(?:\.[0-9]{{0,2}}0*)?|0*[0-9]{{0,8}}\.[0-9]{{1,2}}0*|{_EXPONENT})$",
    rf"^[+-]?(?:0*[0-9]{{1,2}}(?:\.0*)?|0*\.[0-9]{{1,2}}0*|0*[0-9]\.[0-9]0*|{_EXPONENT})$",
]


@pytest.mark.parametrize("pattern", DECIMAL_PATTERNS)
def test_the_patterns_of_decimals_become_decimals(pattern: str, load: Load) -> None:
    branches = [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]
    described = {"anyOf": [*branches, {"type": "null"}], "default": "1.50"}
    source = rendered(object_of({"value": described}))
    # The bound is one of numbers only: a string below it is valid.
    assert "    # Left out: minimum\n" in source
    assert '    value: Decimal | None = Decimal("1.50")\n' in source
    assert load(source).Sample(value="-1.20").value == Decimal("-1.20")


@pytest.mark.parametrize("pattern", ["^[+-]?(?:e)$", r"^[+-]?(?:[0-9]*)$", r"^[0-9]+$", "^$"])
def test_other_patterns_do_not(pattern: str) -> None:
    branches = [{"type": "number"}, {"type": "string", "pattern": pattern}]
    assert "Decimal" not in rendered(object_of({"value": {"anyOf": branches}}))


@pytest.mark.parametrize(
    ("described", "line", "note"),
    [
        ({"not": {"type": "string"}}, "Any", "not"),
        ({"if": {}, "then": {}, "type": "integer"}, "int", "if, then"),
        ({"minimum": 3}, "Any", "minimum"),
        ({"properties": {"a": {}}}, "Any", "properties"),
        ({"type": "number", "enum": [1.5]}, "float", "enum"),
        ({"enum": [["a"], {}]}, "Any", "enum"),
        ({"type": "string", "enum": []}, "str", "enum"),
        ({"const": 1.5}, "Any", "const"),
        ({"$ref": "https://example.org/x"}, "Any", "$ref"),
        ({"$ref": "#/$defs/Missing"}, "Any", "$ref"),
        ({"$ref": "#/$defs/Alias"}, "list[Any]", "$ref"),
        ({"type": "string", "format": "email"}, "str", "format email"),
        ({"type": "string", "format": "a b\n# noqa"}, "str", "format"),
        ({"type": "string", "pattern": "^(?=a)"}, "str", "pattern"),
        ({"type": "string", "pattern": r"^\D$"}, "str", "pattern"),
        ({"type": "string", "pattern": "[[a]"}, "str", "pattern"),
        ({"type": "string", "pattern": "("}, "str", "pattern"),
        ({"type": "string", "pattern": "\ud800"}, "str", "pattern"),
        ({"type": "string", "minLength": "__import__('os')"}, "str", "minLength"),
        ({"type": "integer", "minimum": "0"}, "int", "minimum"),
        ({"type": "integer", "multipleOf": 0.5}, "int", "multipleOf"),
        ({"type": "array", "uniqueItems": True, "items": {}}, "list[Any]", "uniqueItems"),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "number"}, "minItems": 2},
            "set[float]",
            "minItems",
        ),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "list[Any]", "prefixItems"),
        ({"type": "array", "items": False}, "list[Any]", "items"),
        ({"type": "array", "contains": {}}, "list[Any]", "contains"),
        ({"type": "object", "patternProperties": {}}, "dict[str, Any]", "patternProperties"),
        ({"allOf": [{}, {"type": "integer"}, {"minimum": 3}]}, "int", "allOf"),
        ({"type": "unheard-of"}, "Any", "type"),
        ({"type": 3, "anyOf": "x"}, "Any", "anyOf, type"),
        (False, "Any", "false"),
        ("nonsense", "Any", "false"),
    ],
)
def test_what_cannot_be_said_is_left_out_and_named(
    described: Any, line: str, note: str, load: Load
) -> None:
    alias = {"type": "array", "items": {"$ref": "#/$defs/Alias"}}
    schema = object_of({"value": described}, required=["value"], **{"$defs": {"Alias": alias}})
    source = rendered(schema)
    assert f"    # Left out: {note}\n    value: {line}\n" in source
    load(source)


@pytest.mark.parametrize(
    ("described", "line"),
    [
        ({"type": "integer", "minimum": 0.5, "exclusiveMaximum": 9.5}, "ge=1, lt=10"),
        ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 9.5}, "gt=0, le=9"),
        ({"type": ["integer", "null"]}, "value: int | None\n"),
        ({"type": ["string", "integer"], "minLength": 1, "minimum": 1}, "value: Annotated[str"),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "value: int | str\n"),
        ({"anyOf": [{"type": "integer"}, {}]}, "value: Any\n"),
        ({"anyOf": [{"const": "a"}, {"enum": ["a", "b", None]}]}, 'Literal["a", "b"] | None\n'),
        ({"anyOf": [{"enum": ["a", None]}, {"anyOf": [{"const": 1}, {}]}]}, "value: Any\n"),
        (
            {"anyOf": [{"const": "b"}, {"anyOf": [{"enum": ["a", None]}, {"type": "integer"}]}]},
            'value: Literal["b", "a"] | int | None\n',
        ),
        ({"allOf": [{"$ref": "#/$defs/Inner"}]}, "value: Inner\n"),
        (object_of({"x": {"type": "integer"}}, title="In line"), "value: InLine\n"),
        ({"type": "array", "items": {"type": "object", "properties": {}}}, "list[SampleValueItem]"),
    ],
)
def test_schemas_that_other_tools_wrote_are_read(described: Any, line: str, load: Load) -> None:
    inner = {"Inner": object_of({}, title="Inner")}
    source = rendered(object_of({"value": described}, required=["value"], **{"$defs": inner}))
    assert line in source
    load(source)


def test_properties_that_cannot_be_fields_have_an_alias(load: Load) -> None:
    names = [
        *("class", "0abc", "", " ", "_private", "__dunder__", "a-b", "a b", "a_b", "model_config"),
        *("model_fields", "model_validate_x", "model_name", "copy", "json", "schema", "upcast"),
        *("int", "list", "Field", "é", "ﬁ", "l", "None", "self", "雪", "x" * 200, "\u202e", "type"),
        *('"', "\\", "\n", "__import__('os').system('x')", "Event", "Sample", "0", "date", "²"),
    ]
    schema = object_of({name: {"type": "integer"} for name in names}, required=names)
    generated = event_class_in(load(rendered(schema)))
    payload = {name: number for number, name in enumerate(names)}
    assert read(generated, payload) == payload
    kept = {name for name in names if name in generated.model_fields}
    assert kept == {"a_b", "model_name", "é", "self", "雪", "Event", "Sample", "type", "date"}


def test_a_field_does_not_hide_the_type_of_another(load: Load) -> None:
    schema = object_of(
        {
            "date": {"type": "string", "format": "date", "default": "2024-01-01"},
            "day": {"type": "string", "format": "date"},
            "Inner": {"$ref": "#/$defs/Inner"},
        },
        **{"$defs": {"Inner": object_of({}, title="Inner")}},
    )
    source = rendered(schema)
    assert 'date_: date = Field(default=date.fromisoformat("2024-01-01"), alias="date")' in source
    assert "Inner: Inner2 | None = None" in source
    payload = {"date": "2024-02-02", "day": "2024-03-03", "Inner": {}}
    assert read(load(source).Sample, payload) == payload


def test_other_names_are_read_but_not_written(load: Load) -> None:
    class Renamed(Event, type=fresh_type(), version=1):
        amount: int = Field(validation_alias=AliasChoices("amount", "total", "sum"))
        clazz: str = Field(
            validation_alias=AliasChoices("class", "kind"), serialization_alias="class"
        )

    schema = json_schema_of(Renamed)
    schema["properties"]["amount"]["x-penstock-aliases"] += ["class", 3, "\ud800"]
    source = rendered(schema)
    assert 'validation_alias=AliasChoices("amount", "total", "sum")' in source
    generated = load(source).Renamed
    assert read(generated, {"sum": 3, "kind": "x"}) == {"amount": 3, "class": "x"}


def test_versions_of_a_type_share_what_did_not_change(load: Load) -> None:
    def schema(title: str, line: dict[str, Any]) -> dict[str, Any]:
        models = {"Same": object_of({}, title="Same"), "Line": object_of(line, title="Line")}
        properties = {"same": {"$ref": "#/$defs/Same"}, "line": {"$ref": "#/$defs/Line"}}
        return object_of(properties, **{"$defs": models}) | {"title": title}

    text, number = {"type": "string"}, {"type": "integer"}
    event_type, other = fresh_type(), fresh_type()
    contracts = [
        Contract(event_type=event_type, version=1, json_schema=schema("Placed", {"a": text})),
        Contract(event_type=event_type, version=10, json_schema=schema("Placed", {"a": number})),
        Contract(event_type=event_type, version=2, json_schema=schema("Old thing", {"a": text})),
        Contract(event_type=other, version=1, json_schema=schema("Placed", {"a": number})),
    ]
    source = render_module(contracts, header=HEADER)
    assert source == render_module(contracts[::-1], header=HEADER)
    classes = [node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    of_type, of_other = (one.title().replace(".", "") for one in (event_type, other))
    assert classes == ["Same", "Line", "Placed", "LineV2", f"{of_type}V2", "PlacedV1", of_other]
    assert load(source).Placed.__event_version__ == 10


def test_the_key_is_the_field_of_its_property(load: Load) -> None:
    schema = object_of({"order-id": {"type": "string"}, "at": {}})
    generated = load(rendered(schema, key="order-id")).Sample
    assert generated.__event_key__ == "order_id"
    assert "key=" not in rendered(schema, key="nothing")


def test_an_event_may_hold_itself(load: Load) -> None:
    class Folder(Event, type=fresh_type(), version=1):
        name: str
        parts: list[Folder] = Field(default_factory=list)

    generated = load(rendered(json_schema_of(Folder))).Folder
    payload = {"name": "a", "parts": [{"name": "b", "parts": []}]}
    assert read(generated, payload) == payload
    assert generated.model_validate(payload).parts == [generated(name="b")]


def test_the_source_reads_as_if_written_by_hand() -> None:
    class Line(BaseModel):
        """One line of an order."""

        article: str
        quantity: Annotated[int, Field(ge=1)] = 1

    class OrderPlaced(Event, type="orders.placed.by_hand", version=2):
        """A customer has placed an order."""

        order_id: UUID
        placed_at: datetime
        colour: Colour = Colour.RED
        lines: list[Line] = Field(default_factory=list, description="At most a hundred.")
        payment: Annotated[Card | Cash, Field(discriminator="kind")] | None = None

    source = render_module(
        [
            Contract(
                event_type="orders.placed",
                version=2,
                json_schema=json_schema_of(OrderPlaced),
                key="order_id",
            )
        ],
        header="The events of the stream orders.",
    )
    assert source == BY_HAND


BY_HAND = '''"""The events of the stream orders."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal
from uuid import UUID

from penstock import Event
from pydantic import BaseModel, Field


class Colour(StrEnum):
    R = "r"
    DARK_GREEN = "dark green"


class Line(BaseModel):
    """One line of an order."""

    article: str
    quantity: Annotated[int, Field(ge=1)] = 1


class Card(BaseModel):
    kind: Literal["card"]
    digits: str


class Cash(BaseModel):
    kind: Literal["cash", "coins"]


class OrderPlaced(Event, type="orders.placed", version=2, key="order_id"):
    """A customer has placed an order."""

    order_id: UUID
    placed_at: datetime
    colour: Colour = Colour.R
    lines: list[Line] = Field(default_factory=list, description="At most a hundred.")
    payment: Annotated[Card | Cash, Field(discriminator="kind")] | None = None
'''


HOSTILE = [
    '"""', "'''", '"', "'", "\\", '\\"""', 'x"', '"x', "\n", "\r\n", "\0", "\x1b[31m", "\u2028",
    '"""\nimport os\nos.abort()\n"""', "{__import__('os').abort()}", "%s%n", "# type: ignore",
    "\u202eevil\u202c", "\u200b", "\ud800", "\\N{BULLET}", "\\x41", "\\", "a\\", " ", "\t",
    "\U0001d54f",
    "): __import__('os').abort() #", "]; raise SystemExit", "class", "None", "True", "lambda: 0",
    "# coding: utf-7", "\x85", "\x0c", "e\u0301", "\ufeff", "'\"'\"", "x" * 300, "a\n  b\n\tc",
]  # fmt: skip


def hostile_schema(text: str) -> dict[str, Any]:
    inner = object_of({text: {"const": text}}, title=text, description=text)
    return {
        "type": "object",
        "title": text,
        "description": text,
        "properties": {
            text: {"type": "string", "description": text, "default": text, "pattern": text},
            "a": {"enum": [text, "b"], "default": text, "x-penstock-aliases": [text, text + "2"]},
            "b": {"$ref": f"#/$defs/{text}", "description": text, "format": text},
            "c": {"type": text, "format": text, "minimum": text, "required": text},
            "d": {"$ref": "#/$defs/kinds", "default": text},
            "e": {"$ref": text},
            "f": {**inner, "discriminator": {"propertyName": text}, "required": [text]},
            "g": {"oneOf": [{"$ref": "#/$defs/i"}], "discriminator": {"propertyName": text}},
            "h": {"type": "array", "items": {"type": "string"}, "default": [text]},
            "j": {"default": text},
            "k": {"type": "string", "format": "date", "default": text},
        },
        "required": [text, 3, None],
        "$defs": {text: inner, "kinds": {"enum": [text, "x", text], "title": text}, "i": inner},
    }


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_of_another_service_runs(text: str, load: Load) -> None:
    schema = hostile_schema(text)
    event = contract(schema, event_type=f"{fresh_type()}{text}", key=text, description=text)
    source = render_module([event], header=text)
    allowed = (ast.Import, ast.Lambda, ast.FunctionDef, ast.Await, ast.JoinedStr)
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            assert function in {"Field", "AliasChoices", "ConfigDict"}
        assert not isinstance(node, allowed) or isinstance(node, ast.Lambda)
    assert all(isinstance(node, ast.ClassDef | ast.ImportFrom | ast.Expr) for node in tree.body)
    load(source)


def test_hostile_text_leaves_the_source_clean() -> None:
    contracts = [contract(hostile_schema(text), description=text) for text in HOSTILE]
    is_clean(render_module(contracts, header="\n".join(HOSTILE)))
    for text in ('"""', 'x"', "# coding: utf-7", "a\\"):
        is_clean(render_module(contracts[:1], header=text))


def test_literals_and_docstrings_say_what_they_were_given() -> None:
    for text in HOSTILE:
        assert ast.literal_eval(quoted(text)) == text
        assert "\n" not in quoted(text)
    for text in ('"""', 'a "quoted" word"', '"x" \\', "a\n\n  b \\x41", '""""""', "\x00"):
        (statement,) = ast.parse(docstring(text)).body
        assert isinstance(statement, ast.Expr)
        assert ast.literal_eval(statement.value).strip() == text.strip()


def test_what_is_nested_without_end_is_cut() -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        deep = object_of({"inner": deep})
    assert "what is nested too deep" in rendered(object_of({"value": deep}))
    rendered(object_of({"value": {"default": deep, "const": deep}}))
    twice = {
        f"d{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{level + 1}"}] * 2}
        | {"minItems": 2, "maxItems": 2}
        for level in range(39)
    }
    bomb = object_of({"value": {"$ref": "#/$defs/d0"}}, **{"$defs": {**twice, "d39": {}}})
    assert len(rendered(bomb)) < 10_000_000


# ── everything that a schema accepts ───────────────────────────────────────────────────────────

Pair: TypeAlias = tuple[dict[str, Any], Any]
_text = st.text(max_size=5)
_scalars = st.one_of(
    st.tuples(st.just({"type": "string"}), _text),
    st.tuples(st.just({"type": "integer"}), st.integers(-(10**20), 10**20)),
    st.integers(-9, 9).flatmap(
        lambda low: st.tuples(
            st.just({"type": "integer", "minimum": low, "exclusiveMaximum": low + 2.5}),
            st.integers(low, low + 2),
        )
    ),
    st.tuples(st.just({"type": "number"}), st.floats(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just({"type": "boolean"}), st.booleans()),
    st.tuples(st.just({"type": "null"}), st.none()),
    st.tuples(st.just({"type": "string", "format": "uuid"}), st.uuids().map(str)),
    st.tuples(
        st.just({"type": "string", "format": "date-time"}), st.datetimes().map(datetime.isoformat)
    ),
    st.tuples(st.just({"type": "string", "format": "email"}), _text),
    st.tuples(st.just({"type": "string", "pattern": r"^\S*$"}), st.just("\x85")),
    st.tuples(st.just({}), st.recursive(_text | st.none(), st.lists)),
    st.lists(_text | st.integers(0, 5) | st.none() | st.booleans(), min_size=1, max_size=3).flatmap(
        lambda values: st.tuples(st.just({"enum": values}), st.sampled_from(values))
    ),
)


@st.composite
def _list(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    schema, value = draw(inner)
    values = [value] * draw(st.integers(0, 2))
    bounds = {"minItems": len(values), "maxItems": len(values) + draw(st.integers(0, 2))}
    unique = {"uniqueItems": True} if len(values) < 2 else {}
    return {"type": "array", "items": schema, **bounds, **unique}, values


@st.composite
def _tuple(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    pairs = draw(st.lists(inner, min_size=1, max_size=3))
    size = {"minItems": len(pairs), "maxItems": len(pairs)}
    values = [value for _, value in pairs]
    return {"type": "array", "prefixItems": [schema for schema, _ in pairs], **size}, values


@st.composite
def _union(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    pairs = draw(st.lists(inner, min_size=1, max_size=3))
    return {"anyOf": [schema for schema, _ in pairs]}, draw(st.sampled_from(pairs))[1]


@st.composite
def _object(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    pairs = draw(
        st.dictionaries(_text | st.sampled_from(["int", "date", "copy"]), inner, max_size=4)
    )
    present = [name for name in pairs if draw(st.booleans())]
    properties = {
        name: schema | ({"default": draw(_text)} if draw(st.booleans()) else {})
        for name, (schema, _) in pairs.items()
    }
    required = [name for name in present if draw(st.booleans())]
    schema = object_of(properties, required=required, additionalProperties=False)
    return schema, {name: pairs[name][1] for name in present}


@st.composite
def _dictionary(draw: st.DrawFn, inner: st.SearchStrategy[Pair]) -> Pair:
    schema, value = draw(inner)
    keys = draw(st.lists(_text, max_size=2, unique=True))
    bounds = {"minProperties": len(keys)}
    return {"type": "object", "additionalProperties": schema, **bounds}, dict.fromkeys(keys, value)


_pairs = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        _list(inner), _tuple(inner), _union(inner), _object(inner), _dictionary(inner)
    ),
    max_leaves=8,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(pair=_object(_pairs))
def test_whatever_a_schema_accepts_is_read(pair: Pair, load: Load) -> None:
    schema, payload = pair
    event_class = event_class_in(load(rendered(schema)))
    event_class.model_validate_json(json.dumps(payload), extra="allow")


# ── what the tools say ─────────────────────────────────────────────────────────────────────────


def is_clean(source: str) -> None:
    """Fails where ruff would change or refuse the source, under the rules that it begins with."""
    for command in ("format --check --diff", "check --output-format=concise"):
        ended = subprocess.run(
            (
                f"{sys.executable} -m ruff {command} --isolated --line-length=100 --no-cache "
                "--target-version=py311 --stdin-filename=generated.py -"
            ).split(),
            input=source.encode(),
            capture_output=True,
            check=False,
            cwd="/",
        )
        assert ended.returncode == 0, (ended.stdout + ended.stderr).decode()


def every_feature() -> str:
    fields = {
        f"field_{number}": (annotation, ...)
        for number, (_, annotation, _) in enumerate(FEATURES.values())
    }
    optional = {f"{name}_too": (_optional(kind), None) for name, (kind, _) in fields.items()}
    return rendered(json_schema_of(event_of(**fields, **optional)))


def test_the_source_is_clean_under_ruff() -> None:
    is_clean(every_feature())
    is_clean(render_module([], header=""))
    is_clean(rendered(object_of({})))
    is_clean(rendered({}))


def test_long_lines_are_broken_as_ruff_breaks_them(load: Load) -> None:
    schema = object_of(dict(_long_properties()), description="x" * 200)
    source = rendered(schema)
    is_clean(source)
    generated = json_schema_of(load(source).Sample)["properties"]
    for name, described in schema["properties"].items():
        if "items" in described and "default" not in described:
            assert bare(generated[name])["items"] == bare(described["items"])


def _long_properties() -> Iterator[tuple[str, dict[str, Any]]]:
    for length in range(1, 100, 3):
        text = "y" * length
        pattern: dict[str, Any] = {"type": "string", "pattern": text}
        one_word: dict[str, Any] = {"const": text, "type": "string"}
        words: dict[str, Any] = {"enum": [text, "z" * 20, f'"{text}']}
        for number, described in enumerate(
            [
                pattern,
                words,
                {**words, "default": text},
                {"anyOf": [pattern, {"type": "integer", "minimum": 10**20}, {"type": "null"}]},
                {"type": "array", "items": pattern},
                {"type": "array", "items": {"anyOf": [pattern, {"type": "null"}]}},
                {"type": "array", "items": one_word, "maxItems": 3, "description": "d" * 30},
                {"type": "object", "additionalProperties": {"anyOf": [words, pattern]}},
                {"type": "string", "default": text * 2},
                {"type": "string", "description": text * 2},
                {"type": "integer", "description": text, "x-penstock-aliases": [text]},
                {"type": "array", "items": {"type": "string"}, "default": [text]},
                {"type": "array", "prefixItems": [words, pattern], "minItems": 2, "maxItems": 2},
            ]
        ):
            yield f"{text[:40]}{length}x{number}", described
            yield f"{text[:40]}-{length}x{number}", described


@pytest.mark.long
def test_the_source_has_strict_types(tmp_path: Path) -> None:
    (tmp_path / "generated.py").write_text(every_feature())
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir=cache", "generated.py"],
        capture_output=True,
        check=False,
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stdout.decode()


def test_names_are_different_and_can_be_used() -> None:
    words = ["class", "class_", "class__", "a.b", "a b", "a_b", "model_dump_x", "l", "", "\ud800"]
    names = field_names(words, frozenset({"a_b"}))
    assert len(set(names.values())) == len(words)
    assert all(one.isidentifier() and one != "a_b" for one in names.values())
    members = member_names(["a b", "A-B", "ß", "", "0", "ŉ", "mro", "\u017f", "x" * 300, "_a_"])
    assert len(set(members)) == 10
    assert members[:3] == ["A_B", "A_B_", "SS"]
