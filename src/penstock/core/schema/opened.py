"""How a schema reads: unknown fields are kept, whatever it says about writing them."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from penstock.core.schema.canonical import definition_of
from penstock.core.schema.nodes import ALIASES, Node, children, in_order, mapped, node_text
from penstock.core.schema.values import kinds_of_type

_OPEN: Final = "-open"
_CLOSERS: Final = ("additionalProperties", "unevaluatedProperties")
_OPENED: Final = frozenset(
    {
        "additionalProperties",
        "allOf",
        "anyOf",
        "items",
        "patternProperties",
        "prefixItems",
        "properties",
    }
)
_ABOUT_ALL_FIELDS: Final = frozenset(
    {"additionalProperties", "enum", "maxProperties", "not", "patternProperties", "propertyNames"}
)
_DEPTH_MAX: Final = 8

Tags = dict[str, frozenset[str]]


class Opening:
    """The open form of schemas, and of the definitions they refer to.

    An object that forbids unknown fields takes them; a schema for them stays. Only where that
    accepts more, never less: what `not`, `if`, `contains`, `dependentSchemas` and a `oneOf` whose
    branches may overlap have inside stays as it is.
    """

    def __init__(self, definitions: Mapping[str, Node]) -> None:
        self.definitions = definitions

    def opened_definitions(self) -> dict[str, Node]:
        """The definitions as they are and, under names of their own, opened."""
        return {
            **self.definitions,
            **{name + _OPEN: self.opened(node) for name, node in self.definitions.items()},
        }

    def opened(self, node: Node) -> Node:
        """The schema as its reader applies it."""
        if isinstance(node, bool):
            return node
        kept = {
            keyword: value
            for keyword, value in node.items()
            if not (keyword in _CLOSERS and value is False) and keyword != "$defs"
        }
        inner = mapped(kept, self.opened, _OPENED)
        assert isinstance(inner, dict)
        if "oneOf" in inner and self._are_disjoint(inner["oneOf"], inner.get("required", ())):
            inner["oneOf"] = sorted(map(self.opened, inner["oneOf"]), key=node_text)
        if "anyOf" in inner:
            inner["anyOf"] = in_order(inner["anyOf"])
        if definition_of(inner.get("$ref"), self.definitions) is not None:
            inner["$ref"] += _OPEN
        return inner or True

    def _are_disjoint(self, branches: list[Node], required: list[str]) -> bool:
        """Whether no value passes two branches, even when they take unknown fields."""
        known = [
            (self._kinds(branch), self._tags(branch, frozenset(required))) for branch in branches
        ]
        return all(
            kinds.isdisjoint(others) or _differ(tags, other_tags)
            for (kinds, tags), (others, other_tags) in combinations(known, 2)
        )

    def _kinds(self, node: Node, depth: int = _DEPTH_MAX) -> frozenset[str]:
        flat = self._resolved(node, depth)
        if "type" in flat:
            return kinds_of_type(flat["type"])
        return frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})

    def _tags(self, node: Node, required: frozenset[str], depth: int = _DEPTH_MAX) -> Tags:
        """The fields that are always there, with all the values they can have."""
        flat = self._resolved(node, depth)
        required |= frozenset(flat.get("required", ()))
        branches = flat.get("oneOf") or flat.get("anyOf")
        if branches and depth:
            all_tags = [self._tags(branch, required, depth - 1) for branch in branches]
            shared = set.intersection(*(set(tags) for tags in all_tags))
            return {name: frozenset().union(*(tags[name] for tags in all_tags)) for name in shared}
        if flat.get("type") != "object":
            return {}
        return {
            name: frozenset(node_text(value) for value in schema["enum"])
            for name, schema in flat.get("properties", {}).items()
            # Under another name, the reader may find another value.
            if name in required
            and isinstance(schema, dict)
            and "enum" in schema
            and ALIASES not in schema
        }

    def _resolved(self, node: Node, depth: int) -> dict[str, Any]:
        while isinstance(node, dict) and depth:
            target = definition_of(node.get("$ref"), self.definitions)
            if target is None:
                return node
            node, depth = target, depth - 1
        return {}


def _differ(tags: Tags, others: Tags) -> bool:
    return any(tags[name].isdisjoint(others[name]) for name in tags.keys() & others.keys())


def without_aliases(node: Node, definitions: Mapping[str, Node]) -> Node:
    """A schema that takes at least what this one takes when names may be exchanged for others."""
    if not _mentions_aliases(node) and not any(map(_mentions_aliases, definitions.values())):
        return node
    renamed = _renamed_below(node)

    def widened(inner: Node) -> Node:
        if isinstance(inner, bool) or "$ref" in inner:
            return True
        kept = {key: value for key, value in inner.items() if key not in _ABOUT_ALL_FIELDS}
        for keyword in kept.keys() & {"properties", "required"}:
            names = kept[keyword]
            kept[keyword] = (
                {name: names[name] for name in names if name not in renamed}
                if isinstance(names, dict)
                else [name for name in names if name not in renamed]
            )
        return mapped(kept, widened, _OPENED | {"oneOf"})

    return node if node is False else widened(node)


def _mentions_aliases(node: Node) -> bool:
    return f'"{ALIASES}"' in node_text(node)


def _renamed_below(node: Node) -> set[str]:
    """Every name that has aliases, and every alias."""
    found: set[str] = set()
    if isinstance(node, dict):
        for name, schema in node.get("properties", {}).items():
            if isinstance(schema, dict) and ALIASES in schema:
                found |= {name, *schema[ALIASES]}
    for child in children(node):
        found |= _renamed_below(child)
    return found
