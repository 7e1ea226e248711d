"""Schemas in a few words, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.core.schema.nodes import Node, text_of

WORDS_MAX: Final = 100
VALUES_MAX: Final = 8
ANYTHING: Final = "anything"
NOTHING: Final = "nothing"

_SIGNS: Final = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} long",
    "maxLength": "at most {} long",
    "pattern": "matching {}",
    "format": "({})",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "minProperties": "at least {} fields",
    "maxProperties": "at most {} fields",
}


def words_for(node: Node) -> str:
    """The schema as a reader of messages wants it: `integer ≥ 1 | null`."""
    return shortened(_words(node))


def words_for_all(nodes: Iterable[Node]) -> str:
    """Several schemas that hold together."""
    told = [_words(node) for node in nodes if node is not True]
    return shortened(" and ".join(dict.fromkeys(told)) or ANYTHING)


def words_for_values(values: Iterable[Any]) -> str:
    """The values, as many as fit."""
    texts = [text_of(value) for value in values]
    more = len(texts) - VALUES_MAX
    shown = ", ".join(texts[:VALUES_MAX])
    return shortened(f"{shown} and {more} more" if more > 0 else shown)


def shortened(text: str) -> str:
    """The text, cut where it would fill a line."""
    return text if len(text) <= WORDS_MAX else text[: WORDS_MAX - 1] + "…"


def _words(node: Node) -> str:
    if isinstance(node, bool):
        return ANYTHING if node else NOTHING
    if "enum" in node:
        return _values(node["enum"])
    parts = [_base(node), *_constraints(node)]
    told = " ".join(part for part in parts if part)
    together = [told] if told else []
    together += [_joined(node[keyword], " | ") for keyword in ("anyOf", "oneOf") if keyword in node]
    together += [_joined(node["allOf"], " and ")] if "allOf" in node else []
    together += [f"not ({_words(node['not'])})"] if "not" in node else []
    return " and ".join(together) or _others(node)


def _values(values: list[Any]) -> str:
    told = words_for_values(values)
    return f"one of {told}" if len(values) > 1 else told


def _joined(nodes: list[Node], sign: str) -> str:
    return sign.join(dict.fromkeys(_words(node) for node in nodes))


def _base(node: Mapping[str, Any]) -> str:
    types = node.get("type", [])
    names = [types] if isinstance(types, str) else types
    return " | ".join(_named(name, node) for name in names)


def _named(name: str, node: Mapping[str, Any]) -> str:
    if name == "array":
        return _array(node)
    if name == "object":
        return _object(node)
    return name


def _array(node: Mapping[str, Any]) -> str:
    if "prefixItems" in node:
        return f"tuple of ({', '.join(_words(item) for item in node['prefixItems'])})"
    items = f"list of {_words(node['items'])}" if "items" in node else "list"
    return f"unique {items}" if node.get("uniqueItems") else items


def _object(node: Mapping[str, Any]) -> str:
    if node.get("properties"):
        required = set(node.get("required", ()))
        fields = [name if name in required else f"{name}?" for name in node["properties"]]
        return f"object ({', '.join(fields)})"
    values = node.get("additionalProperties", True)
    return f"object of {_words(values)}" if isinstance(values, dict) else "object"


def _constraints(node: Mapping[str, Any]) -> list[str]:
    return [sign.format(node[keyword]) for keyword, sign in _SIGNS.items() if keyword in node]


def _others(node: Mapping[str, Any]) -> str:
    if "$ref" in node:
        return "the same again"
    return f"what {', '.join(sorted(node))} allow" if node else ANYTHING
