"""A schema taken apart: one shape for every kind of value it takes, alternatives spelled out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from penstock.core.schema.canonical import definition_of
from penstock.core.schema.facts import ArrayFacts, NumberFacts, ObjectFacts, StringFacts
from penstock.core.schema.nodes import Node, node_text
from penstock.core.schema.values import accepts, kind_of, kinds_of_type

SHAPES_MAX: Final = 400
STEPS_MAX: Final = 20_000
_EMPTY_DEPTH_MAX: Final = 3
_INTEGERS_MAX: Final = 24

KINDS: Final = ("null", "boolean", "integer", "fraction", "string", "array", "object")
_COMBINING: Final = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_HIDES_UNEVALUATED: Final = _COMBINING | {"not", "if", "dependentSchemas"}

Together = tuple[Node, ...]
"""Schemas that hold for the same value; none of them: anything."""
Parts = tuple[dict[str, Any], ...]


class TooComplex(Exception):
    """Comparing would take more steps than an answer is worth."""


@dataclass(frozen=True)
class Shape:
    """Values of one kind that pass all parts; no part has alternatives any more."""

    kind: str
    parts: Parts
    values: tuple[Any, ...] | None = None
    """All there are, where they can be listed."""
    source: Together = field(default=(), compare=False)
    """What it was taken out of, for messages."""

    @cached_property
    def key(self) -> str:
        """A text that two shapes share only if they take the same values."""
        return node_text([self.kind, sorted(map(node_text, self.parts)), self.values])


class Shapes:
    """Takes schemas apart that share their definitions."""

    def __init__(self, definitions: Mapping[str, Node]) -> None:
        self.definitions = definitions
        self._known: dict[tuple[str, int], tuple[Shape, ...]] = {}
        self._steps = 0

    def spend_step(self) -> None:
        """Count one step of a comparison that must end."""
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise TooComplex

    def of(self, together: Together, depth: int = 0) -> tuple[Shape, ...]:
        """Shapes that between them take at least what passes all the schemas; none: nothing does.

        They may take more, where a keyword is not understood.
        """
        key = (node_text(sorted(map(node_text, together))), depth)
        if key not in self._known:
            self.spend_step()
            found: dict[str, Shape] = {}
            for parts in self._alternatives(together):
                for shape in self._by_kind(parts, together, depth):
                    found[shape.key] = shape
            self._known[key] = tuple(found.values())
        return self._known[key]

    def is_empty(self, together: Together, depth: int = 0) -> bool:
        """Whether surely nothing passes all the schemas."""
        if any(node is False for node in together):
            return True
        return bool(together) and depth <= _EMPTY_DEPTH_MAX and not self.of(together, depth)

    def kinds(self, together: Together) -> frozenset[str]:
        """The kinds of values that may pass."""
        return frozenset(shape.kind for shape in self.of(together))

    def _alternatives(self, together: Together) -> Iterator[Parts]:
        """Every choice among anyOf and oneOf, as parts without either."""
        waiting: list[tuple[Together, Parts, frozenset[str]]] = [(together, (), frozenset())]
        count = 0
        while waiting:
            nodes, parts, followed = waiting.pop()
            if not nodes:
                count += 1
                if count > SHAPES_MAX:
                    raise TooComplex
                yield parts
                continue
            node, rest = nodes[0], nodes[1:]
            if isinstance(node, bool):
                waiting += [(rest, parts, followed)] if node else []
                continue
            waiting += reversed(list(self._choices(node, rest, parts, followed)))

    def _choices(
        self, node: dict[str, Any], rest: Together, parts: Parts, followed: frozenset[str]
    ) -> Iterator[tuple[Together, Parts, frozenset[str]]]:
        flat = _flat(node)
        parts = (*parts, flat) if flat and flat not in parts else parts
        target = definition_of(node.get("$ref"), self.definitions)
        more: Together = tuple(node.get("allOf", ()))
        if "$ref" in node:
            # To follow it again would add nothing: it is the same value, which passed already.
            if target is not None and node["$ref"] not in followed:
                more = (target, *more)
            followed |= {node["$ref"]}
        unions = [node[keyword] for keyword in ("anyOf", "oneOf") if keyword in node]
        if not unions:
            yield (*more, *rest), parts, followed
            return
        others = {"anyOf": unions[1]} if len(unions) > 1 else True
        for branch in unions[0]:
            yield (branch, others, *more, *rest), parts, followed

    def _by_kind(self, parts: Parts, source: Together, depth: int) -> Iterator[Shape]:
        kinds = frozenset(KINDS)
        for part in parts:
            if "type" in part:
                kinds &= kinds_of_type(part["type"])
        for kind in KINDS:
            if kind in kinds:
                values = self._values(kind, parts)
                shape = Shape(kind, parts, values, source)
                if values != () and not self._is_impossible(shape, depth):
                    yield shape

    def _values(self, kind: str, parts: Parts) -> tuple[Any, ...] | None:
        """The values to choose from, if they can be listed."""
        listed = [part["enum"] for part in parts if "enum" in part]
        candidates = listed[0] if listed else _few(kind, parts)
        if candidates is None:
            return None
        return tuple(
            value
            for value in candidates
            if kind_of(value) == kind
            and all(accepts(part, value, self.definitions) is not False for part in parts)
        )

    def _is_impossible(self, shape: Shape, depth: int) -> bool:
        """Whether surely no value has this shape."""
        if shape.values is not None:
            return not shape.values
        if shape.kind in {"integer", "fraction"}:
            return NumberFacts.of(shape.parts, shape.kind, None).is_impossible
        if shape.kind == "string":
            return StringFacts.of(shape.parts, None).is_impossible
        if depth > _EMPTY_DEPTH_MAX:
            return False

        def is_empty(together: Together) -> bool:
            return self.is_empty(together, depth + 1)

        if shape.kind == "array":
            return ArrayFacts.of(shape.parts, is_empty).is_impossible
        return ObjectFacts.of(shape.parts, self.definitions).is_impossible(is_empty)


def _flat(node: dict[str, Any]) -> dict[str, Any]:
    """The node's own assertions, without references and alternatives."""
    flat = {keyword: value for keyword, value in node.items() if keyword not in _COMBINING}
    flat.pop("$defs", None)
    if "unevaluatedProperties" in flat and _HIDES_UNEVALUATED.isdisjoint(node):
        # Nothing else here evaluates fields, so it speaks of the same ones.
        flat.setdefault("additionalProperties", flat["unevaluatedProperties"])
    return flat


def _few(kind: str, parts: Parts) -> list[Any] | None:
    if kind == "null":
        return [None]
    if kind == "boolean":
        return [False, True]
    if kind == "integer":
        return NumberFacts.of(parts, kind, None).integers(_INTEGERS_MAX)
    return None
