"""What JSON Schema's keywords hold, and how two JSON values are told apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

Node = bool | dict[str, Any]
"""A schema at any depth: True takes everything, False nothing."""

ALIASES: Final = "x-penstock-aliases"
"""Further names under which a reader accepts a property, the most wanted first."""
DEMANDS: Final = "x-penstock-demands"
"""What a reader demands of a value, and every written one has, in words JSON Schema lacks."""
HEXADECIMAL: Final = "in hexadecimal digits"
STAYS_DISTINCT: Final = "different from the others once it is read"
WRITTEN_AS_NUMBER: Final = "a time that is written as a number, whatever its format says"
"""Demands that mean something to a comparison; all others are words to it."""
KEYS: Final = "x-penstock-keys"
"""What the names of an object are read as, where that is no text: `{"type": "integer"}`."""
_OWN: Final = frozenset({ALIASES, DEMANDS, KEYS})

HOLDS_ONE: Final = frozenset(
    {
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        KEYS,
    }
)
HOLDS_MANY: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
HOLDS_NAMED: Final = frozenset({"dependentSchemas", "patternProperties", "properties"})
DEFINITIONS: Final = frozenset({"$defs", "definitions"})

EDITORIAL: Final = frozenset(
    {
        "$anchor",
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that tell people something and refuse nothing."""

_EXACT_BELOW: Final = 2**53
_ENCODER: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def is_editorial(keyword: str) -> bool:
    """Whether a keyword refuses nothing; `x-` ones are somebody's notes, except our own."""
    return keyword in EDITORIAL or (keyword.startswith("x-") and keyword not in _OWN)


def without_demands(node: Any) -> Any:
    """The schema as releases wrote it that had no words for what readers demand."""
    if isinstance(node, list):
        return [without_demands(member) for member in node]
    if not isinstance(node, Mapping):
        return node
    return {
        keyword: without_demands(value)
        for keyword, value in node.items()
        if keyword not in (DEMANDS, KEYS)
    }


def text_of(value: object) -> str:
    """One text per value: equal exactly if JSON Schema calls the values equal."""
    return node_text(plain(value))


def node_text(node: object) -> str:
    """The same for what is canonical already, where whole numbers are integers."""
    return _ENCODER.encode(node)


def plain(value: Any) -> Any:
    """The value with whole numbers as integers: to JSON, 1.0 is 1."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_BELOW:
        return int(value)
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    return value


def in_order(values: Iterable[Any]) -> list[Any]:
    """The values without repetitions, in an order that depends on nothing but them."""
    by_text = {text_of(value): value for value in values}
    return [by_text[text] for text in sorted(by_text)]


def mapped(node: Node, change: Callable[[Any], Any], keywords: frozenset[str]) -> Node:
    """The node with every schema under those keywords changed, the rest as it is."""
    if isinstance(node, bool):
        return node
    return {
        keyword: _mapped_value(keyword, value, change) if keyword in keywords else value
        for keyword, value in node.items()
    }


def _mapped_value(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    if keyword in HOLDS_ONE:
        return change(value)
    if keyword in HOLDS_MANY:
        return [change(member) for member in value]
    assert keyword in HOLDS_NAMED
    return {name: change(member) for name, member in value.items()}


def children(node: Node) -> Iterable[Node]:
    """The schemas directly inside a node, definitions left out."""
    if isinstance(node, bool):
        return
    for keyword, value in node.items():
        if keyword in HOLDS_ONE:
            yield value
        elif keyword in HOLDS_MANY:
            yield from value
        elif keyword in HOLDS_NAMED:
            yield from value.values()
