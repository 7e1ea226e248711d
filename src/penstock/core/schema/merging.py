"""Two JSON Schemas as one, as far as a single set of keywords can say what both say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.core.schema.instances import Schema


def merged(one: Schema, other: Schema) -> Schema:
    """A schema to find examples with: what it is too generous about, both still have to accept."""
    if isinstance(one, bool):
        return other if one else False
    if isinstance(other, bool):
        return one if other else False
    whole = {**one, **other}
    for keyword in one.keys() & other.keys():
        if one[keyword] != other[keyword]:
            _merge_keyword(whole, keyword, one[keyword], other[keyword])
    return whole


def _merge_keyword(whole: dict[str, Any], keyword: str, one: Any, other: Any) -> None:
    if keyword in _TOGETHER:
        whole[keyword] = _TOGETHER[keyword](one, other)
    elif keyword in _OUTSIDE:
        # It says the more general thing, and the nearer word counts.
        whole[keyword] = one
    else:
        whole["allOf"] = [*whole.get("allOf", ()), {keyword: other}]
        whole[keyword] = one


def _types(one: str | list[str], other: str | list[str]) -> list[str]:
    first, second = _names(one), _names(other)
    if "number" in second and "integer" in first:
        second = [*second, "integer"]
    if "number" in first and "integer" in second:
        first = [*first, "integer"]
    return [name for name in first if name in second]


def _names(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else list(types)


def _properties(one: Mapping[str, Schema], other: Mapping[str, Schema]) -> dict[str, Schema]:
    return {
        name: merged(one.get(name, True), other.get(name, True))
        for name in dict.fromkeys((*one, *other))
    }


_OUTSIDE: Final = frozenset({"title", "description", "default", "examples", "$defs", "deprecated"})
_TOGETHER: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "type": _types,
    "required": lambda one, other: list(dict.fromkeys((*one, *other))),
    "properties": _properties,
    "items": merged,
    "additionalProperties": merged,
    "propertyNames": merged,
    "allOf": lambda one, other: [*one, *other],
    "enum": lambda one, other: [value for value in one if value in other],
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), min),
}
