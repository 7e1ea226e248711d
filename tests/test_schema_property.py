"""Whatever the schemas: a change is called compatible only if every instance can be read."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from penstock.core.schema import Rule, can_read, canonical, check, differences, schema_hash
from penstock.core.schema.opened import Opening
from tests.random_schemas import (
    FORMATS,
    changed,
    document,
    instance,
    plain_document,
    widened,
    with_alias,
)

Schema = dict[str, Any]
INSTANCES = 8

FORMAT_CHECKER = FormatChecker(FORMATS)


def repeatable(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - it guards nothing


# A seed, not a random of Hypothesis's own: that takes minutes to make a failure smaller.
RANDOM = st.integers(min_value=0, max_value=2**40).map(repeatable)


def validator(schema: Schema) -> Draft202012Validator:
    return Draft202012Validator(tags_required(schema), format_checker=FORMAT_CHECKER)


def tags_required(node: Any) -> Any:
    """What a discriminator means: JSON Schema itself does not know it."""
    if isinstance(node, list):
        return [tags_required(member) for member in node]
    if not isinstance(node, dict):
        return node
    inner = {key: tags_required(value) for key, value in node.items()}
    if isinstance(inner.get("discriminator"), dict) and "oneOf" in inner:
        tag = inner["discriminator"]["propertyName"]
        inner["required"] = sorted({*inner.get("required", ()), tag})
    return inner


def opened(schema: Schema) -> Schema:
    """The schema as its reader applies it."""
    root = canonical(schema)
    opening = Opening(root.get("$defs", {}))
    node = opening.opened(root)
    assert node is not False
    return {**(node if isinstance(node, dict) else {}), "$defs": opening.opened_definitions()}


def pair(random: Random) -> tuple[Schema, Schema]:
    """Two schemas: mostly one and a change of it, in either order; sometimes strangers."""
    one = document(random)
    other = changed(random, one) if random.random() < 0.9 else document(random)
    if random.random() < 0.15:
        return one, with_alias(random, one if random.random() < 0.5 else other)
    return (one, other) if random.random() < 0.5 else (other, one)


def instances(random: Random, schema: Schema, other: Schema) -> list[Any]:
    """Valid instances of the schema, some of them looked for with the other one in mind."""
    valid = validator(schema)
    sources = [schema, schema, schema, other]
    made = [
        instance(random, source, source)
        for source in (random.choice(sources) for _ in range(INSTANCES))
    ]
    return [value for value in made if valid.is_valid(value)]


def as_read(value: Any, reader: Schema) -> Any:
    """The value with fields under the names that the reader knows them by."""
    if not isinstance(value, dict):
        return value
    read = dict(value)
    for name, field in reader.get("properties", {}).items():
        aliases = field.get("x-penstock-aliases", ()) if isinstance(field, dict) else ()
        found = next((alias for alias in (name, *aliases) if alias in value), name)
        if found != name:
            read[name] = read.pop(found)
    return read


def assert_readable(random: Random, writer: Schema, reader: Schema) -> int:
    valid = validator(opened(reader))
    found = instances(random, writer, reader)
    for value in found:
        read = as_read(value, reader)
        assert valid.is_valid(read), (
            f"{json.dumps(value)} was written under {json.dumps(writer)} "
            f"and is refused by {json.dumps(reader)}"
        )
    return len(found)


@settings(max_examples=400)
@given(RANDOM)
def test_what_is_called_readable_is_read(random: Random) -> None:
    writer, reader = pair(random)
    if not can_read(writer, reader):
        assert_readable(random, writer, reader)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 20_000, 1_000))
def test_what_is_called_readable_is_read_whatever_the_schemas(first: int) -> None:
    for seed in range(first, first + 1_000):
        random = repeatable(seed)
        writer, reader = pair(random)
        if not can_read(writer, reader):
            assert_readable(random, writer, reader)


@settings(max_examples=80)
@given(RANDOM)
def test_the_rules_speak_of_the_right_readers(random: Random) -> None:
    old, new = pair(random)
    if not check(old, new, Rule.BACKWARD):
        assert_readable(random, old, new)
    if not check(old, new, Rule.FORWARD):
        assert_readable(random, new, old)
    both = check(old, new, Rule.BACKWARD) + check(old, new, Rule.FORWARD)
    assert check(old, new, Rule.FULL) == both


@settings(max_examples=80)
@given(RANDOM)
def test_every_schema_reads_itself(random: Random) -> None:
    schema = document(random)
    assert can_read(schema, schema) == []
    assert differences(schema, schema) == []


@settings(max_examples=200)
@given(RANDOM)
def test_a_change_that_only_allows_more_is_no_break(random: Random) -> None:
    old = plain_document(random)
    new = widened(random, old)
    assert can_read(old, new) == [], f"{json.dumps(old)} became {json.dumps(new)}"


@settings(max_examples=100)
@given(RANDOM)
def test_the_canonical_form_accepts_the_same_and_is_its_own_canonical_form(random: Random) -> None:
    schema, other = pair(random)
    form = canonical(schema)
    assert json.dumps(canonical(form)) == json.dumps(form)
    assert schema_hash(schema) == schema_hash(shuffled(random, schema))
    before, after = validator(schema), validator(form)
    for _ in range(INSTANCES):
        source = random.choice([schema, schema, other])
        value = instance(random, source, source)
        assert before.is_valid(value) == after.is_valid(value), json.dumps([schema, form, value])


@settings(max_examples=120)
@given(RANDOM)
def test_equal_hashes_read_each_other_and_other_hashes_are_told_apart(random: Random) -> None:
    old, new = pair(random)
    is_same = schema_hash(old) == schema_hash(new)
    if is_same:
        assert check(old, new, Rule.FULL) == []
    assert is_same == all(one.is_editorial for one in differences(old, new))


@settings(max_examples=80)
@given(RANDOM)
def test_an_opened_schema_takes_all_that_the_closed_one_takes(random: Random) -> None:
    schema = document(random)
    valid = validator(opened(schema))
    for value in instances(random, schema, schema):
        assert valid.is_valid(value), json.dumps([schema, value])


def test_an_opened_schema_takes_unknown_fields_at_every_depth() -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": False,
    }
    deep = {
        **closed,
        "properties": {
            "list": {"type": "array", "items": closed},
            "tuple": {"type": "array", "prefixItems": [closed]},
            "dict": {"type": "object", "additionalProperties": closed},
            "maybe": {"anyOf": [closed, {"type": "null"}]},
            "either": {"oneOf": [closed, {"type": "string"}]},
            "again": {"$ref": "#/$defs/Again"},
        },
        "$defs": {
            "Again": {
                **closed,
                "properties": {"again": {"$ref": "#/$defs/Again"}},
                "unevaluatedProperties": False,
            }
        },
    }
    more = {"a": 1, "more": 1}
    value = {
        "list": [more],
        "tuple": [more],
        "dict": {"b": more},
        "maybe": more,
        "either": more,
        "again": {"again": {"more": 1}},
        "more": 1,
    }
    assert not validator(deep).is_valid(value)
    assert validator(opened(deep)).is_valid(value)
    assert not validator(opened(deep)).is_valid({"list": [{"a": "text"}]})


def test_opening_does_not_let_a_second_variant_take_what_one_took() -> None:
    one = {"type": "object", "properties": {"a": {"type": "integer"}}}
    two = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
    exact: Schema = {"oneOf": [{**node, "additionalProperties": False} for node in (one, two)]}
    assert validator(exact).is_valid({"b": 1})
    assert validator(opened(exact)).is_valid({"b": 1})
    assert can_read({**exact, "minProperties": 1}, exact) == []


def test_the_random_pairs_are_worth_comparing() -> None:
    readable = tried = values = 0
    for seed in range(150):
        random = repeatable(seed)
        writer, reader = pair(random)
        if schema_hash(writer) == schema_hash(reader):
            continue
        tried += 1
        if not can_read(writer, reader):
            readable += 1
            values += len(instances(random, writer, reader))
    assert readable > tried * 0.25
    assert values > readable * 2


def shuffled(random: Random, node: Any) -> Any:
    """The same schema with its keys and the members of its unions in another order."""
    if isinstance(node, list):
        return [shuffled(random, member) for member in node]
    if not isinstance(node, dict):
        return node
    keys = random.sample(list(node), len(node))
    inner = {key: shuffled(random, node[key]) for key in keys}
    for keyword in ("anyOf", "oneOf", "allOf", "required", "enum"):
        if isinstance(inner.get(keyword), list):
            random.shuffle(inner[keyword])
    return inner
