"""Whether a schema takes one given value: yes, no, or nobody here can tell (None)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, Final

from penstock.core.schema.canonical import definition_of
from penstock.core.schema.nodes import ALIASES, DEMANDS, HEXADECIMAL, Node, text_of

Answer = bool | None

FREE_FORMATS: Final = frozenset({"binary", "password", "path"})
"""Formats that every string has: they say what it is for."""

_DEPTH_MAX: Final = 40
# Dialects differ here: sets inside sets, and operations on them.
_FOREIGN: Final = ("[[", "[:", "&&", "--", "~~", "||", "(?")


def kind_of(value: object) -> str:
    """The JSON type of a value, numbers told apart by whether they are whole."""
    kinds: dict[type, str] = {bool: "boolean", str: "string", list: "array", dict: "object"}
    if value is None:
        return "null"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "integer" if value == value // 1 else "fraction"
    return kinds[type(value)]


def kinds_of_type(type_names: str | list[str]) -> frozenset[str]:
    """The kinds of values that a `type` keyword takes."""
    names = [type_names] if isinstance(type_names, str) else type_names
    return frozenset(
        kind
        for name in names
        for kind in (("integer", "fraction") if name == "number" else (name,))
    )


def exact(number: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(str(number))


def matches(pattern: str, text: str) -> Answer:
    """Whether the pattern occurs in the text, where all dialects of patterns agree on it."""
    groups_aside = pattern.replace("(?:", "(")
    if not text.isascii() or "\n" in text or any(sign in groups_aside for sign in _FOREIGN):
        return None
    compiled = _compiled(pattern)
    return None if compiled is None else compiled.search(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern)
    except re.error:
        return None


def counted_in(node: Mapping[str, Any]) -> str:
    """What the lengths of a string are counted in: characters (""), bytes, or those it encodes."""
    name = node.get("format")
    if HEXADECIMAL in node.get(DEMANDS, ()):
        return HEXADECIMAL
    return str(name) if name in {"base64", "base64url", "binary"} else ""


def length_of(text: str, counted: str) -> int:
    """How long a text is to whoever counts so; of an encoded one, what it has at most."""
    return len(text.encode(errors="surrogatepass")) if counted == "binary" else len(text)


def every(answers: Iterable[Answer]) -> Answer:
    """All of them: no if one is no, else unknown if one is."""
    seen = set(answers)
    return False if False in seen else None if None in seen else True


def some(answers: Iterable[Answer]) -> Answer:
    """At least one of them: yes if one is yes, else unknown if one is."""
    seen = set(answers)
    return True if True in seen else None if None in seen else False


def accepts(
    node: Node, value: Any, definitions: Mapping[str, Node], depth: int = _DEPTH_MAX
) -> Answer:
    """Whether the schema takes the value."""
    if isinstance(node, bool):
        return node
    if depth == 0:
        return None
    ask = _Question(value, definitions, depth - 1)
    return every(ask.keyword(keyword, node) for keyword in node)


class _Question:
    """One value, asked about keyword by keyword."""

    def __init__(self, value: Any, definitions: Mapping[str, Node], depth: int) -> None:
        self.value = value
        self.definitions = definitions
        self.depth = depth
        self.kind = kind_of(value)

    def keyword(self, keyword: str, node: dict[str, Any]) -> Answer:
        """Whether one keyword of the node takes the value."""
        if keyword in {ALIASES, "$defs"}:
            return True
        if keyword in _GENERAL:
            return _GENERAL[keyword](self, node[keyword])
        for kinds, checks in _BY_KIND:
            if keyword in checks:
                return checks[keyword](self, node) if self.kind in kinds else True
        return None

    def of(self, node: Node, value: Any) -> Answer:
        """Whether a schema inside takes a value inside, or the same."""
        return accepts(node, value, self.definitions, self.depth)

    def length(self, node: Mapping[str, Any]) -> int:
        """How long the text is to this schema."""
        return length_of(self.value, counted_in(node))

    def reference(self, reference: object) -> Answer:
        """Whether what a reference stands for takes the value."""
        target = definition_of(reference, self.definitions)
        return None if target is None else self.of(target, self.value)

    def one_of(self, branches: list[Node]) -> Answer:
        """Whether exactly one branch takes the value."""
        answers = [self.of(branch, self.value) for branch in branches]
        if answers.count(True) > 1:
            return False
        if None in answers:
            return None
        return answers.count(True) == 1

    def items(self, node: dict[str, Any]) -> Answer:
        """Whether every member after the prefix is taken."""
        first = len(node.get("prefixItems", ()))
        return every(self.of(node["items"], member) for member in self.value[first:])

    def prefix_items(self, node: dict[str, Any]) -> Answer:
        """Whether every member is taken by the schema at its place."""
        pairs = zip(node["prefixItems"], self.value, strict=False)
        return every(self.of(schema, member) for schema, member in pairs)

    def properties(self, node: dict[str, Any]) -> Answer:
        """Whether every declared property is taken."""
        declared = node["properties"]
        if any(isinstance(schema, dict) and ALIASES in schema for schema in declared.values()):
            return None
        present = [name for name in declared if name in self.value]
        return every(self.of(declared[name], self.value[name]) for name in present)

    def pattern_properties(self, node: dict[str, Any]) -> Answer:
        """Whether every property is taken by the patterns that its name matches."""
        return every(
            some((self.of(schema, value), _opposite(matches(pattern, name))))
            for pattern, schema in node["patternProperties"].items()
            for name, value in self.value.items()
        )

    def additional_properties(self, node: dict[str, Any]) -> Answer:
        """Whether every property that nothing else speaks of is taken."""
        return every(
            some((self.of(node["additionalProperties"], value), is_named(node, name)))
            for name, value in self.value.items()
        )

    def dependent_required(self, node: dict[str, Any]) -> Answer:
        """Whether every property brings those along that it needs."""
        needed = node["dependentRequired"].items()
        return all(set(others) <= set(self.value) for name, others in needed if name in self.value)


def is_named(node: Mapping[str, Any], name: str) -> Answer:
    """Whether `properties` or `patternProperties` speak of a name."""
    if name in node.get("properties", ()):
        return True
    return some(matches(pattern, name) for pattern in node.get("patternProperties", ()))


def _opposite(answer: Answer) -> Answer:
    return None if answer is None else not answer


def _format(ask: _Question, name: object) -> Answer:
    return True if ask.kind != "string" or name in FREE_FORMATS else None


_GENERAL: Final[dict[str, Callable[[_Question, Any], Answer]]] = {
    "$ref": lambda ask, reference: ask.reference(reference),
    "allOf": lambda ask, nodes: every(ask.of(node, ask.value) for node in nodes),
    "anyOf": lambda ask, nodes: some(ask.of(node, ask.value) for node in nodes),
    "enum": lambda ask, values: text_of(ask.value) in {text_of(value) for value in values},
    "format": _format,
    "not": lambda ask, node: _opposite(ask.of(node, ask.value)),
    "oneOf": lambda ask, nodes: ask.one_of(nodes),
    "type": lambda ask, names: ask.kind in kinds_of_type(names),
}

_Checks = dict[str, Callable[[_Question, dict[str, Any]], Answer]]
_NUMBERS: Final[_Checks] = {
    "exclusiveMaximum": lambda ask, node: bool(ask.value < node["exclusiveMaximum"]),
    "exclusiveMinimum": lambda ask, node: bool(ask.value > node["exclusiveMinimum"]),
    "maximum": lambda ask, node: bool(ask.value <= node["maximum"]),
    "minimum": lambda ask, node: bool(ask.value >= node["minimum"]),
    "multipleOf": lambda ask, node: (exact(ask.value) / exact(node["multipleOf"])).denominator == 1,
}
_STRINGS: Final[_Checks] = {
    "maxLength": lambda ask, node: ask.length(node) <= node["maxLength"],
    "minLength": lambda ask, node: ask.length(node) >= node["minLength"],
    "pattern": lambda ask, node: matches(node["pattern"], ask.value),
}
_ARRAYS: Final[_Checks] = {
    "items": _Question.items,
    "maxItems": lambda ask, node: bool(len(ask.value) <= node["maxItems"]),
    "minItems": lambda ask, node: bool(len(ask.value) >= node["minItems"]),
    "prefixItems": _Question.prefix_items,
    "uniqueItems": lambda ask, _: len({text_of(member) for member in ask.value}) == len(ask.value),
}
_OBJECTS: Final[_Checks] = {
    "additionalProperties": _Question.additional_properties,
    "dependentRequired": _Question.dependent_required,
    "maxProperties": lambda ask, node: bool(len(ask.value) <= node["maxProperties"]),
    "minProperties": lambda ask, node: bool(len(ask.value) >= node["minProperties"]),
    "patternProperties": _Question.pattern_properties,
    "properties": _Question.properties,
    "propertyNames": lambda ask, node: every(
        ask.of(node["propertyNames"], name) for name in ask.value
    ),
    "required": lambda ask, node: set(node["required"]) <= set(ask.value),
}
_BY_KIND: Final = (
    ({"integer", "fraction"}, _NUMBERS),
    ({"string"}, _STRINGS),
    ({"array"}, _ARRAYS),
    ({"object"}, _OBJECTS),
)
