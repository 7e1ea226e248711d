"""Examples for JSON Schemas: found, and accepted by what they are examples of."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from penstock.core.schema.examples import NOTHING, example_of
from penstock.core.schema.instances import Judge
from penstock.core.schema.samples import text_like
from tests.documented import Placed

NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}
ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

FOUND: list[tuple[Any, Any]] = [
    ({}, "anything"),
    ({"type": "integer", "examples": [5], "default": 4}, 5),
    ({"type": "integer", "examples": ["wrong"], "default": 4}, 4),
    ({"type": "integer", "examples": {"an": "OpenAPI habit"}}, 1),
    ({"type": "string", "default": "x"}, "x"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, "text"),
    ({"anyOf": [{"type": "null"}, {"type": "integer"}]}, 1),
    ({"type": "number", "default": float("inf")}, 1.5),
    ({"const": {"a": 1}}, {"a": 1}),
    ({"enum": ["b", "a"]}, "b"),
    ({"enum": ["b", 2], "type": "integer"}, 2),
    ({"type": "boolean"}, True),
    ({"type": "null"}, None),
    ({"type": "string", "format": "date"}, "2024-01-31"),
    ({"type": "string", "format": "date", "maxLength": 3}, "tex"),
    ({"type": "string", "minLength": 6}, "text t"),
    ({"type": "string", "maxLength": 2}, "te"),
    ({"type": "string", "pattern": "^ORD-[0-9]{6}$"}, "ORD-123456"),
    ({"type": "integer", "minimum": 10}, 10),
    ({"type": "integer", "exclusiveMinimum": 10, "multipleOf": 4}, 12),
    ({"type": "integer", "maximum": -3, "multipleOf": 2}, -4),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5),
    ({"type": "array", "items": {"type": "integer"}}, [1]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 3}, [1, 1, 1]),
    ({"type": "array", "items": {"type": "integer"}, "maxItems": 0}, []),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": 2}, [1, 2]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "minItems": 2},
     ["text", "text2"]),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"const": "a"}], "items": False,
      "minItems": 2}, [1, "a"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, {"key": 1}),
    ({"type": "object", "additionalProperties": {"const": 1}, "minProperties": 2},
     {"key": 1, "key2": 1}),
    ({"type": "object", "additionalProperties": {"const": 1}, "propertyNames": {"enum": ["a"]}},
     {"a": 1}),
    ({"type": "object", "patternProperties": {"^[A-C]{2}$": {"const": 1}}}, {"AB": 1}),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"multipleOf": 5}]}, 5),
    ({"allOf": [{"required": ["a"]}, {"properties": {"a": {"const": 1}}}], "type": "object"},
     {"a": 1}),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1.5),
    ({"type": "integer", "not": {"const": 1}}, 0),
    ({"$ref": "#/$defs/A", "minimum": 9, "$defs": {"A": {"type": "integer"}}}, 9),
    ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, {}),
    ({"$ref": "#/$defs/A~1b", "$defs": {"A/b": {"const": 1}}}, 1),
    ({"type": "object", "additionalProperties": {}, "propertyNames": False}, {}),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"], "maxProperties": 1},
     {"b": "anything"}),
    ({"type": "array", "items": {"$ref": "#/$defs/E"}, "uniqueItems": True, "minItems": 2,
      "$defs": {"E": {"enum": ["a", "b"]}}}, ["a", "b"]),
    ({"type": "object", "additionalProperties": {"const": 2}, "x-penstock-keys": {"const": 7}},
     {"7": 2}),
    ({"minLength": 5}, "text t"[:4] + "t"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "example"), FOUND)
def test_the_example_of_a_schema(schema: Any, example: Any) -> None:
    found = example_of(schema)
    assert json.dumps(found) == json.dumps(example)
    Draft202012Validator(schema).validate(found)


@pytest.mark.parametrize(
    "schema",
    [
        ENDLESS,
        {"$ref": "#"},
        {"$ref": "https://example.com/elsewhere"},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "string", "pattern": "(unreadable"},
        {"type": "string", "pattern": r"^\p{Greek}$"},
        {"enum": []},
        {"not": {}},
        {"type": "object", "required": ["a"], "properties": {"a": False}},
        {"type": "array", "uniqueItems": True, "items": {"type": "null"}, "minItems": 2},
        {"type": "array", "minItems": 10**9},
        {"type": "string", "minLength": 10**9},
    ],
)
def test_where_there_is_no_example_none_is_shown(schema: Any) -> None:
    assert example_of(schema) is NOTHING


def test_an_event_is_built_from_its_example() -> None:
    schema = Placed.model_json_schema()
    example = example_of(schema)
    Draft202012Validator(schema).validate(example)
    placed = Placed.model_validate_json(json.dumps(example))
    assert placed.lines[0].sku == "ABC-4"
    assert example == example_of(Placed.model_json_schema())


KINDS = [f"A{n}" for n in range(10)]


@pytest.mark.parametrize(("is_required", "other"), [(True, "null"), (False, "null"), (False, None)])
def test_a_wide_schema_has_an_example_soon(is_required: bool, other: str | None) -> None:
    # Ten kinds of objects that all hold each other, or nothing, in more ways than can be tried.
    properties: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{name}"}, *([{"type": other}] if other else [])]}
        for name in KINDS
    }
    node = {
        "type": "object",
        "properties": {**properties, "last": {"const": 1}},
        "required": [*KINDS, "last"] if is_required else ["last"],
    }
    schema = {**node, "$defs": dict.fromkeys(KINDS, node)}
    Draft202012Validator(schema).validate(example_of(schema))


def test_a_search_that_leads_nowhere_ends() -> None:
    options = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in KINDS]}
    assert example_of({**options, "$defs": dict.fromkeys(KINDS, options)}) is NOTHING


def test_true_is_not_one() -> None:
    for schema in ({"const": 1}, {"enum": [[1]]}, {"enum": [{"a": 1}]}, {"type": "integer"}):
        for value in (True, [True], {"a": True}):
            assert not Judge(schema).accepts(schema, value)
    assert Judge({}).accepts({"uniqueItems": True}, [1, True])


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            r"^[A-Z]{3}$",
            r"^\d{4}-\d{2}$",
            r"a|b",
            r"^(?:foo|bar)+\.txt$",
            r"^[^a-z]\w*$",
            r"^\S+$",
        ),
        *(
            r"^(?P<x>\d)\.\d$",
            r"^\$\d+(\.\d{2})?$",
            r"^(?!a)[a-c]$",
            r"^[\]x-]{2}$",
            r"",
            r"^\x41$",
        ),
        *(r"^.{3,}$", r"^a{,2}$", r"\bword\b", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[^]a]$", r"ü"),
    ],
)
def test_a_text_is_found_for_a_pattern(pattern: str) -> None:
    text = text_like(pattern, lambda text: re.search(pattern, text) is not None)
    assert text is not None


def test_a_pattern_that_repeats_repetitions_ends() -> None:
    assert text_like("^" + "(" * 5 + "a{999}" + "){999}" * 5 + "$", lambda _: True) is None


# ── any schema ─────────────────────────────────────────────────────────────────────────────────

SMALL = st.integers(-3, 6)
VALUES = st.recursive(
    st.none() | st.booleans() | SMALL | st.sampled_from(["", "a", "ab", "b1", 1.5, 1.0]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)


def objects_of(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    named = st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    sizes = st.integers(0, 3)
    lists = objects_of(
        type=st.just("array"), items=inner, prefixItems=some, contains=inner,
        minItems=sizes, maxItems=sizes, uniqueItems=st.booleans(),
    )  # fmt: skip
    mappings = objects_of(
        type=st.just("object"), properties=named, additionalProperties=inner, propertyNames=inner,
        patternProperties=st.dictionaries(st.sampled_from(["^a", "b$"]), inner),
        required=st.lists(st.sampled_from("ab"), unique=True),
        minProperties=sizes, maxProperties=sizes,
        dependentRequired=st.just({"a": ["b"]}), dependentSchemas=named,
    )  # fmt: skip
    combined = objects_of(
        allOf=some, anyOf=some, oneOf=some, then=inner, **{"not": inner, "if": inner, "else": inner}
    )
    return lists | mappings | combined


TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
LEAVES = (
    st.booleans()
    | objects_of(
        type=st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, unique=True),
        minimum=SMALL, maximum=SMALL, exclusiveMinimum=SMALL, exclusiveMaximum=SMALL,
        multipleOf=st.sampled_from([2, 3, 0.5]), minLength=st.integers(0, 3),
        maxLength=st.integers(0, 3), pattern=st.sampled_from(["^a", "[0-9]$", "^b?$"]),
    )
    | objects_of(const=VALUES, enum=st.lists(VALUES, min_size=1, max_size=3))
    | st.just({"$ref": "#/$defs/d"})
)  # fmt: skip
SCHEMAS = st.builds(
    lambda schema, definition: {"allOf": [schema], "$defs": {"d": definition}},
    st.recursive(LEAVES, nested, max_leaves=6),
    st.recursive(LEAVES.filter(lambda leaf: "$ref" not in str(leaf)), nested, max_leaves=3),
)


@given(schema=SCHEMAS, value=VALUES)
def test_a_value_is_judged_as_the_standard_says(schema: Any, value: Any) -> None:
    assert Judge(schema).accepts(schema, value) == Draft202012Validator(schema).is_valid(value)


@given(schema=SCHEMAS)
def test_an_example_is_accepted_by_its_schema(schema: Any) -> None:
    example = example_of(schema)
    if example is not NOTHING:
        Draft202012Validator(schema).validate(example)
        json.dumps(example, allow_nan=False)
