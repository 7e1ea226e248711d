"""Types from JSON Schemas. What has no type in Python becomes Any, never something narrower."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from penstock.core.schema.codegen_lookup import definition, is_model, required_names
from penstock.core.schema.codegen_names import is_field_name
from penstock.core.schema.codegen_scalars import (
    DECIMAL,
    NOTHING,
    Default,
    Schema,
    Typed,
    anything,
    boolean,
    constrained,
    is_decimal,
    is_scalar,
    lengths,
    literals,
    literals_of,
    no_default,
    number,
    string,
    unchecked,
)
from penstock.core.schema.codegen_source import (
    Alternatives,
    Atom,
    Brackets,
    call,
    flat,
    is_text,
    name,
    quoted,
    subscript,
)

DEPTH_MAX = 40
"""How deep types are followed into each other; what lies deeper is Any."""
TYPES_MAX = 10_000
"""How many types a module has: definitions that use each other twice double with every step."""
_DEFAULT_WIDTH_MAX = 60
_ITEMS = {"minItems": "min_length", "maxItems": "max_length"}
_PROPERTIES = {"minProperties": "min_length", "maxProperties": "max_length"}
_SCALARS: dict[str, Callable[[Schema], Typed]] = {
    "boolean": boolean,
    "integer": number,
    "number": number,
    "string": string,
}


class Classes(Protocol):
    """Where a type finds the classes that it is made of."""

    def model(self, schema: Schema, hint: str, depth: int) -> Typed:
        """The class of an object that stands in the schema itself."""
        ...

    def defined(self, reference: str, depth: int) -> Typed | None:
        """The class of a definition; None if a definition is no class."""
        ...


class Types:
    """The types in one contract's schema."""

    def __init__(self, root: Schema, classes: Classes) -> None:
        self._root = root
        self._classes = classes
        self._left = TYPES_MAX
        self._inlining: set[str] = set()

    def typed(self, schema: Any, hint: str, depth: int) -> Typed:
        """The type of what a schema describes. The hint names a class that has no title."""
        self._left -= 1
        if not isinstance(schema, Mapping):
            return anything() if schema is True else anything("false")
        if depth > DEPTH_MAX or self._left < 0:
            return anything("what is nested too deep")
        return self._of_schema(schema, hint, depth)

    def _of_schema(self, schema: Schema, hint: str, depth: int) -> Typed:
        if "$ref" in schema:
            return self._reference(schema, hint, depth)
        if "const" in schema or "enum" in schema:
            return _enumerated(schema) or self._without_values(schema, hint, depth)
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return self._of_kind(schema, kinds, hint, depth)
        if isinstance(kinds, list) and kinds:
            each = [{**schema, "type": kind} for kind in kinds]
            return union([self.typed(one, hint, depth + 1) for one in each])
        return self._combined(schema, hint, depth)

    def _without_values(self, schema: Schema, hint: str, depth: int) -> Typed:
        rest = {key: schema[key] for key in schema if key not in ("const", "enum")}
        found = self.typed(rest, hint, depth + 1)
        return replace(found, notes=(*found.notes, *unchecked(schema, *rest)))

    def _reference(self, schema: Schema, hint: str, depth: int) -> Typed:
        reference = schema["$ref"]
        target = definition(self._root, reference)
        if target is None or reference in self._inlining:
            return anything("$ref", *unchecked(schema, "$ref"))
        notes = unchecked(schema, "$ref")
        found = self._classes.defined(reference, depth + 1)
        if found is None:
            self._inlining.add(reference)
            found = self.typed(target, hint, depth + 1)
            self._inlining.discard(reference)
        return replace(found, notes=(*found.notes, *notes))

    def _of_kind(self, schema: Schema, kind: str, hint: str, depth: int) -> Typed:
        if kind in _SCALARS:
            return _SCALARS[kind](schema)
        if kind == "null":
            return replace(NOTHING, notes=unchecked(schema, "type"))
        if kind == "array":
            return self._array(schema, hint, depth)
        if kind != "object":
            return anything(*unchecked(schema))
        if is_model(schema):
            return self._classes.model(schema, hint, depth + 1)
        return self._dictionary(schema, hint, depth)

    def _combined(self, schema: Schema, hint: str, depth: int) -> Typed:
        for keyword in ("anyOf", "oneOf"):
            members = schema.get(keyword)
            if isinstance(members, list) and members:
                if keyword == "oneOf" and "discriminator" in schema:
                    return self._discriminated(schema, members, hint, depth)
                notes = unchecked(schema, keyword)
                return union([*self._members(members, hint, depth)], notes)
        every = schema.get("allOf")
        if isinstance(every, list):
            # Whatever all of them accept, each of them does.
            for member in every:
                found = self.typed(member, hint, depth + 1)
                if found.code != name("Any"):
                    notes = unchecked(schema, "allOf") if len(every) == 1 else unchecked(schema)
                    return replace(found, notes=(*found.notes, *notes))
        return anything(*unchecked(schema))

    def _members(self, members: Sequence[Any], hint: str, depth: int) -> list[Typed]:
        numbers = [one for one in members if _is_kind(one, "number")]
        texts = [one for one in members if is_decimal(one)]
        if not numbers or not texts:
            return [self.typed(one, hint, depth + 1) for one in members]
        notes = tuple(note for one in numbers for note in unchecked(one, "type"))
        found = []
        for one in members:
            if one is numbers[0]:
                found.append(replace(DECIMAL, notes=notes))
            elif not any(one is other for other in (*numbers, *texts)):
                found.append(self.typed(one, hint, depth + 1))
        return found

    def _discriminated(
        self, schema: Schema, members: Sequence[Any], hint: str, depth: int
    ) -> Typed:
        found = union(self._members(members, hint, depth), unchecked(schema, "oneOf"))
        told_apart = schema["discriminator"]
        tag = told_apart.get("propertyName") if isinstance(told_apart, Mapping) else None
        if not self._can_discriminate(members, tag) or not isinstance(found.code, Alternatives):
            return found
        field = call("Field", Atom(f"discriminator={quoted(str(tag))}"))
        return Typed(
            code=subscript("Annotated", found.code, field),
            notes=tuple(note for note in found.notes if note != "discriminator"),
        )

    def _can_discriminate(self, members: Sequence[Any], tag: Any) -> bool:
        """Whether each member demands the tag, each with values of its own.

        Where a member does not, the schema accepts what has no tag, and pydantic would not.
        """
        if not isinstance(tag, str) or not is_field_name(tag):
            return False
        seen: list[Any] = []
        for member in members:
            target = definition(self._root, member.get("$ref")) if _is_mapping(member) else None
            if target is None or not is_model(target) or tag not in required_names(target):
                return False
            described = target["properties"].get(tag) if _is_mapping(target["properties"]) else None
            if not isinstance(described, Mapping) or "$ref" in described:
                return False
            seen.extend(
                [described["const"]] if "const" in described else described.get("enum", [None])
            )
        return all(is_text(one) for one in seen) and len(set(seen)) == len(seen)

    def _array(self, schema: Schema, hint: str, depth: int) -> Typed:
        prefix = schema.get("prefixItems")
        if isinstance(prefix, list) and prefix:
            return self._tuple(schema, prefix, hint, depth)
        known = schema.get("items") is not False
        item = self.typed(schema.get("items", True) if known else True, f"{hint}Item", depth + 1)
        wants_set = schema.get("uniqueItems") is True and item.is_hashable
        constraints = lengths(schema, _ITEMS)
        if wants_set and not item.is_exact:
            constraints.pop("min_length", None)
        generic = "set" if wants_set else "list"
        checked = [keyword for keyword, ours in _ITEMS.items() if ours in constraints]
        checked += ["uniqueItems"] if wants_set or not schema.get("uniqueItems") else []
        return Typed(
            code=constrained(subscript(generic, item.code), constraints),
            notes=(
                *item.notes,
                *unchecked(schema, "type", *checked, *(["items"] if known else [])),
            ),
            default=_default_of_items(generic, item),
            factory=generic,
        )

    def _tuple(self, schema: Schema, prefix: Sequence[Any], hint: str, depth: int) -> Typed:
        if schema.get("minItems") != len(prefix) or schema.get("maxItems") != len(prefix):
            code = constrained(subscript("list", name("Any")), lengths(schema, _ITEMS))
            notes = unchecked(schema, "type", "minItems", "maxItems")
            return Typed(code=code, notes=notes, factory="list")
        parts = [self.typed(one, f"{hint}Part", depth + 1) for one in prefix]
        own = unchecked(schema, "type", "prefixItems", "minItems", "maxItems", "items")
        return Typed(
            code=subscript("tuple", *(part.code for part in parts)),
            notes=(*(note for part in parts for note in part.notes), *own),
        )

    def _dictionary(self, schema: Schema, hint: str, depth: int) -> Typed:
        others = schema.get("additionalProperties", True)
        has_patterns = "patternProperties" in schema
        described = others if isinstance(others, Mapping) and not has_patterns else True
        value = self.typed(described, f"{hint}Value", depth + 1)
        constraints = lengths(schema, _PROPERTIES)
        checked = [keyword for keyword, ours in _PROPERTIES.items() if ours in constraints]
        checked += ["additionalProperties"] if others is True or described is others else []
        return Typed(
            code=constrained(subscript("dict", name("str"), value.code), constraints),
            notes=(*value.notes, *unchecked(schema, "type", *checked)),
            default=lambda given: Default(name("dict"), is_factory=True) if given == {} else None,
            factory="dict",
        )


def union(members: Sequence[Typed], notes: tuple[str, ...] = ()) -> Typed:
    """What is any of these types: None last, and one Literal for all literals."""
    every = tuple(dict.fromkeys((*(note for one in members for note in one.notes), *notes)))
    if any(one.code == name("Any") for one in members):
        return anything(*every)
    values = {(type(value), value): value for one in members for value in one.literals}
    merged = literals_of(list(values.values()), ()) if values else None
    distinct: dict[str, Typed] = {}
    for one in members:
        for code in one.code.members if isinstance(one.code, Alternatives) else (one.code,):
            is_literal = isinstance(code, Brackets) and code.head == "Literal["
            kept = merged if merged and is_literal else replace(one, code=code)
            distinct.setdefault(flat(kept.code), kept)
    ordered = [one for text, one in distinct.items() if text != "None"]
    ordered += [distinct["None"]] if "None" in distinct else []
    if len(ordered) == 1:
        return replace(ordered[0], notes=every)

    def default(value: Any) -> Default | None:
        return next((found for one in ordered if (found := one.default(value))), None)

    return Typed(
        code=Alternatives(tuple(one.code for one in ordered)),
        notes=every,
        default=default,
        literals=merged.literals if merged else (),
    )


def _enumerated(schema: Schema) -> Typed | None:
    values = [schema["const"]] if "const" in schema else schema["enum"]
    notes = unchecked(schema, "const", "enum", "type")
    if not isinstance(values, list):
        return None
    others = [one for one in values if one is not None]
    if values and not others:
        return replace(NOTHING, notes=notes)
    found = literals(others, notes)
    return union([found, NOTHING]) if found and len(others) < len(values) else found


def _default_of_items(generic: str, item: Typed) -> Callable[[Any], Default | None]:
    opening, closing = ("{", "}") if generic == "set" else ("[", "]")

    def default(value: Any) -> Default | None:
        if not isinstance(value, list):
            return None
        if not value:
            return Default(name(generic), is_factory=True)
        if not all(is_scalar(one) and item.default(one) for one in value):
            return None
        if item.default is no_default or (generic == "set" and len(set(value)) < len(value)):
            return None
        codes = [found.code for one in value if (found := item.default(one))]
        display = Brackets(f"lambda: {opening}", tuple(codes), closing)
        is_short = len(flat(display)) <= _DEFAULT_WIDTH_MAX
        return Default(display, is_factory=True) if is_short else None

    return default


def _is_kind(schema: Any, kind: str) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == kind and "enum" not in schema


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)
