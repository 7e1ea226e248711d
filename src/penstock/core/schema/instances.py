"""Whether a JSON Schema accepts a value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from penstock.core.schema.references import resolve

Schema = Mapping[str, Any] | bool

# Deeper than any value that is worth showing; only a reference to itself goes on for ever.
DEPTH_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Judge:
    """Decides by one schema document, draft 2020-12. What it cannot decide, it does not accept."""

    root: Mapping[str, Any]

    def accepts(self, schema: Schema, value: Any, depth: int = 0) -> bool:
        """Whether every keyword of the schema holds for the value; formats are not looked at."""
        if isinstance(schema, bool):
            return schema
        if depth > DEPTH_MAX:
            return False
        below = partial(self.accepts, depth=depth + 1)
        return self._follows_reference(schema, value, below) and all(
            _CHECKS[keyword](schema, value, below) for keyword in schema if keyword in _CHECKS
        )

    def _follows_reference(self, schema: Mapping[str, Any], value: Any, below: Below) -> bool:
        if "$ref" not in schema:
            return True
        target = resolve(self.root, schema["$ref"])
        return target is not None and below(target, value)


Below = Callable[[Schema, Any], bool]
Check = Callable[[Mapping[str, Any], Any, Below], bool]


def is_number(value: object) -> bool:
    """Whether JSON calls it a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_json(value: object) -> bool:
    """Whether JSON can say it: no infinity, and nothing that only Python knows."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and is_json(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_json, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int | bool)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON, where true is not 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text; a pattern that Python cannot read never is."""
    try:
        return re.search(pattern, text) is not None
    except re.error:
        return False


# ── types and values ───────────────────────────────────────────────────────────────────────────

_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": lambda value: is_number(value) and value == value // 1,
    "array": lambda value: isinstance(value, list | tuple),
    "object": lambda value: isinstance(value, dict),
}


def _type(schema: Mapping[str, Any], value: Any, _below: Below) -> bool:
    names = schema["type"]
    return any(
        _TYPES[name](value)
        for name in ([names] if isinstance(names, str) else names)
        if name in _TYPES
    )


def _limit(
    keyword: str, measure: Callable[[Any], Any], holds: Callable[[Any, Any], bool]
) -> tuple[str, Check]:
    """A check that leaves alone what cannot be measured."""

    def check(schema: Mapping[str, Any], value: Any, _below: Below) -> bool:
        measured = measure(value)
        return measured is None or holds(measured, schema[keyword])

    return keyword, check


def _number(value: Any) -> Any:
    return value if is_number(value) else None


def _text_length(value: Any) -> int | None:
    return len(value) if isinstance(value, str) else None


def _list_length(value: Any) -> int | None:
    return len(value) if isinstance(value, list | tuple) else None


def _object_size(value: Any) -> int | None:
    return len(value) if isinstance(value, dict) else None


def _is_multiple(value: float, step: float) -> bool:
    quotient = value / step
    return math.isfinite(quotient) and quotient == int(quotient)


# ── lists and objects ──────────────────────────────────────────────────────────────────────────


def _prefix_items(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    if not isinstance(value, list | tuple):
        return True
    return all(below(item_schema, item) for item_schema, item in _pairs(schema, value))


def _pairs(schema: Mapping[str, Any], value: Any) -> list[tuple[Schema, Any]]:
    return list(zip(schema["prefixItems"], value, strict=False))


def _items(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    if not isinstance(value, list | tuple):
        return True
    rest = value[len(schema.get("prefixItems", ())) :]
    return all(below(schema["items"], item) for item in rest)


def _unique_items(schema: Mapping[str, Any], value: Any, _below: Below) -> bool:
    if schema["uniqueItems"] is not True or not isinstance(value, list | tuple):
        return True
    return not any(
        is_same(item, other) for index, item in enumerate(value) for other in value[:index]
    )


def _contains(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    if not isinstance(value, list | tuple):
        return True
    count = sum(below(schema["contains"], item) for item in value)
    minimum, maximum = schema.get("minContains", 1), schema.get("maxContains", len(value))
    return bool(minimum <= count <= maximum)


def _required(schema: Mapping[str, Any], value: Any, _below: Below) -> bool:
    return not isinstance(value, dict) or all(name in value for name in schema["required"])


def _properties(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    properties: Mapping[str, Schema] = schema["properties"]
    return not isinstance(value, dict) or all(
        below(properties[name], item) for name, item in value.items() if name in properties
    )


def _pattern_properties(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    return not isinstance(value, dict) or all(
        below(item_schema, item)
        for pattern, item_schema in schema["patternProperties"].items()
        for name, item in value.items()
        if matches(pattern, name)
    )


def _additional_properties(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    return not isinstance(value, dict) or all(
        below(schema["additionalProperties"], item)
        for name, item in value.items()
        if name not in schema.get("properties", {})
        and not any(matches(pattern, name) for pattern in schema.get("patternProperties", ()))
    )


def _property_names(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    return not isinstance(value, dict) or all(
        below(schema["propertyNames"], name) for name in value
    )


def _dependent_required(schema: Mapping[str, Any], value: Any, _below: Below) -> bool:
    return not isinstance(value, dict) or all(
        other in value
        for name, others in schema["dependentRequired"].items()
        if name in value
        for other in others
    )


def _dependent_schemas(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    return not isinstance(value, dict) or all(
        below(dependent, value)
        for name, dependent in schema["dependentSchemas"].items()
        if name in value
    )


# ── schemas of schemas ─────────────────────────────────────────────────────────────────────────


def _if(schema: Mapping[str, Any], value: Any, below: Below) -> bool:
    return below(schema.get("then" if below(schema["if"], value) else "else", True), value)


_CHECKS: Final[dict[str, Check]] = {
    "type": _type,
    "const": lambda schema, value, _: is_same(schema["const"], value),
    "enum": lambda schema, value, _: any(is_same(item, value) for item in schema["enum"]),
    "pattern": lambda schema, value, _: (
        not isinstance(value, str) or matches(schema["pattern"], value)
    ),
    **dict(
        (
            _limit("minimum", _number, lambda number, limit: bool(number >= limit)),
            _limit("maximum", _number, lambda number, limit: bool(number <= limit)),
            _limit("exclusiveMinimum", _number, lambda number, limit: bool(number > limit)),
            _limit("exclusiveMaximum", _number, lambda number, limit: bool(number < limit)),
            _limit("multipleOf", _number, _is_multiple),
            _limit("minLength", _text_length, lambda length, limit: bool(length >= limit)),
            _limit("maxLength", _text_length, lambda length, limit: bool(length <= limit)),
            _limit("minItems", _list_length, lambda count, limit: bool(count >= limit)),
            _limit("maxItems", _list_length, lambda count, limit: bool(count <= limit)),
            _limit("minProperties", _object_size, lambda count, limit: bool(count >= limit)),
            _limit("maxProperties", _object_size, lambda count, limit: bool(count <= limit)),
        )
    ),
    "prefixItems": _prefix_items,
    "items": _items,
    "uniqueItems": _unique_items,
    "contains": _contains,
    "required": _required,
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "propertyNames": _property_names,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
    "allOf": lambda schema, value, below: all(below(part, value) for part in schema["allOf"]),
    "anyOf": lambda schema, value, below: any(below(part, value) for part in schema["anyOf"]),
    "oneOf": lambda schema, value, below: sum(below(p, value) for p in schema["oneOf"]) == 1,
    "not": lambda schema, value, below: not below(schema["not"], value),
    "if": _if,
    # Whatever it would forbid depends on all the others; an object or list is not decided.
    "unevaluatedProperties": lambda schema, value, _: (
        schema["unevaluatedProperties"] is True or not isinstance(value, dict)
    ),
    "unevaluatedItems": lambda schema, value, _: (
        schema["unevaluatedItems"] is True or not isinstance(value, list | tuple)
    ),
    "$dynamicRef": lambda *_: False,
}
