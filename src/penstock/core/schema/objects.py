"""Objects: what a writer may write and a reader refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.core.schema.breaks import Break, Cause, not_provable
from penstock.core.schema.facts import CHOICES_MAX, ObjectFacts, distinct, name_rule, stated
from penstock.core.schema.nodes import ALIASES, KEYS, Node
from penstock.core.schema.place import Comparing, Place
from penstock.core.schema.rendering import words_for, words_for_all
from penstock.core.schema.shapes import Shape, Together, TooComplex
from penstock.core.schema.values import accepts, is_named, matches


def object_breaks(
    comparison: Comparing, shape: Shape, node: dict[str, Any], at: Place
) -> Iterator[Break]:
    """Objects whose fields are missing, too many, wrongly named, or of a type that is refused."""
    reading = _ObjectReading(comparison, shape, node, at)
    yield from reading.missing_fields()
    yield from reading.declared_fields()
    yield from reading.other_fields()
    yield from reading.unlisted_fields()
    yield from reading.names()
    yield from reading.keys()
    yield from reading.counts()
    yield from reading.dependencies()


def aliases_of(node: Node) -> tuple[str, ...]:
    """The further names under which a reader accepts a field."""
    return tuple(node.get(ALIASES, ())) if isinstance(node, dict) else ()


class _ObjectReading:
    """One kind of object against one reader."""

    def __init__(
        self, comparison: Comparing, shape: Shape, node: dict[str, Any], at: Place
    ) -> None:
        self.comparison = comparison
        self.definitions = comparison.shapes.definitions
        self.facts = ObjectFacts.of(shape.parts, self.definitions)
        self.node = node
        self.at = at
        self.fields: dict[str, Node] = node.get("properties", {})
        self.patterns: dict[str, Node] = node.get("patternProperties", {})
        self.parts = shape.parts

    def missing_fields(self) -> Iterator[Break]:
        """Fields that the reader needs and the writer may leave out."""
        for name in self.node.get("required", ()):
            known = {name, *aliases_of(self.fields.get(name, True))}
            if self.facts.required.isdisjoint(known):
                yield self._missing(name, known)

    def _missing(self, name: str, known: set[str]) -> Break:
        at = self.at.field(name)
        wanted = words_for(self.fields.get(name, True))
        if self.facts.declared.isdisjoint(known):
            return at.breaks(
                Cause.REQUIRED_ADDED,
                "absent",
                f"required, {wanted}",
                "the reader needs the field, and what is written need not have it",
            )
        return at.breaks(
            Cause.OPTIONAL_TO_REQUIRED,
            "optional",
            f"required, {wanted}",
            "the reader needs the field, and the writer may leave it out",
        )

    def declared_fields(self) -> Iterator[Break]:
        """Fields that the reader knows, under any of their names, and refuses the value of."""
        for name, schema in self.fields.items():
            for known in (name, *aliases_of(schema)):
                value = self.facts.value(known)
                if self._is_absent(value):
                    continue
                if known != name and self._is_ambiguous(known):
                    yield not_provable(self.at.field(known).path, ALIASES)
                yield from self._value_breaks(name, known, value)
                if known in self.facts.required:
                    # It is always there, so nobody looks for the names after it.
                    break

    def _is_ambiguous(self, alias: str) -> bool:
        claims = [schema for schema in self.fields.values() if alias in aliases_of(schema)]
        return alias in self.fields or len(claims) > 1

    def _value_breaks(self, name: str, known: str, value: Together) -> Iterator[Break]:
        at = self.at.field(known)
        for schema in self._wanted(name):
            if value or known in self.facts.declared:
                yield from self.comparison.breaks(value, schema, at)
            elif next(self.comparison.breaks(value, schema, at.trial()), None) is not None:
                yield at.breaks(
                    Cause.TYPED_IN_OPEN,
                    words_for_all(value),
                    words_for(schema),
                    "unknown fields can be written, so this name may already carry anything",
                )

    def _wanted(self, name: str) -> Iterator[Node]:
        """Every schema of the reader that applies, or may apply, to a field."""
        if name in self.fields:
            yield self.fields[name]
        for pattern, schema in self.patterns.items():
            if matches(pattern, name) is not False:
                yield schema
        if is_named(self.node, name) is not True:
            yield self.node.get("additionalProperties", True)

    def _is_absent(self, value: Together) -> bool:
        return self.comparison.shapes.is_empty(value)

    def other_fields(self) -> Iterator[Break]:
        """Fields that the writer knows and the reader does not."""
        for name in sorted((self.facts.declared | (self.facts.names or set())) - set(self.fields)):
            value = self.facts.value(name)
            if not self._is_absent(value):
                for schema in self._wanted(name):
                    yield from self.comparison.breaks(value, schema, self.at.field(name))

    def unlisted_fields(self) -> Iterator[Break]:
        """Fields whose names neither side lists: the values of dictionaries."""
        rest = self.node.get("additionalProperties", True)
        if self.facts.names is not None or (not self.patterns and rest is True):
            return
        if self.facts.count_others() > CHOICES_MAX:
            raise TooComplex
        at = self.at.field("*")
        for pattern, schema in self.patterns.items():
            for value in self.facts.others_matching(pattern):
                yield from self.comparison.breaks(value, schema, at)
        for value in self.facts.others_besides(self.patterns):
            yield from self.comparison.breaks(value, rest, at)

    def names(self) -> Iterator[Break]:
        """Names that the reader refuses."""
        for rule in self._name_rules():
            refused = [name for name in self._listed_names() if not self._takes_name(rule, name)]
            if not refused and (self.facts.names is not None or self._takes_unlisted(rule)):
                continue
            told = " and ".join(sorted(set(map(words_for_all, self.facts.name_rules()))))
            yield self.at.breaks(
                Cause.NAMES_NARROWED,
                ", ".join(refused) or told,
                words_for(rule),
                "fields can be written under names that the reader refuses",
            )

    def _name_rules(self) -> Iterator[Node]:
        if "propertyNames" in self.node:
            yield name_rule(self.node["propertyNames"])
        # A dictionary whose keys have a pattern is written like this, and reading it refuses all
        # other keys, although the schema does not say so.
        is_dictionary = self.patterns and _has_only_patterns(self.node)
        if is_dictionary and not any(self._has_such_keys(part) for part in self.parts):
            yield {"anyOf": [{"pattern": pattern} for pattern in self.patterns]}

    def _has_such_keys(self, part: dict[str, Any]) -> bool:
        return (
            "patternProperties" in part
            and _has_only_patterns(part)
            and part["patternProperties"].keys() <= self.patterns.keys()
        )

    def _listed_names(self) -> list[str]:
        listed = self.facts.declared if self.facts.names is None else self.facts.names
        present = [name for name in listed if not self._is_absent(self.facts.value(name))]
        renamed = [name for name, schema in self.fields.items() if aliases_of(schema)]
        return sorted({*present, *renamed})

    def _takes_name(self, rule: Node, name: str) -> bool:
        return accepts(rule, name, self.definitions) is True

    def _takes_unlisted(self, rule: Node) -> bool:
        at = self.at.names().trial()
        return all(
            next(self.comparison.breaks(names, rule, at), None) is None
            for names in self.facts.name_rules()
        )

    def keys(self) -> Iterator[Break]:
        """Names that cannot be read as what the reader takes them for."""
        if KEYS not in self.node or self.facts.names == frozenset():
            return
        written, wanted = distinct(stated(self.parts, KEYS)), self.node[KEYS]
        found = self.comparison.breaks(written, wanted, self.at.names().trial())
        if next(found, None) is not None:
            yield self.at.breaks(
                Cause.NAMES_NARROWED,
                words_for_all(written) if written else "any name",
                words_for(wanted),
                "fields can be written under names that the reader cannot read as its keys",
            )

    def counts(self) -> Iterator[Break]:
        """Objects with too few or too many fields."""
        fewest, most = self.facts.fewest(), self.facts.most()
        if fewest < self.node.get("minProperties", 0):
            yield self.at.breaks(
                Cause.MIN_FIELDS_RAISED,
                f"at least {fewest} fields",
                f"at least {self.node['minProperties']} fields",
                "fewer fields can be written than the reader takes",
            )
        limit = self.node.get("maxProperties")
        if limit is not None and (most is None or most > limit):
            yield self.at.breaks(
                Cause.MAX_FIELDS_LOWERED,
                "no limit" if most is None else f"at most {most} fields",
                f"at most {limit} fields",
                "more fields can be written than the reader takes",
            )

    def dependencies(self) -> Iterator[Break]:
        """Fields that the reader wants together and the writer may write alone."""
        has_aliases = any(map(aliases_of, self.fields.values()))
        for name, others in self.node.get("dependentRequired", {}).items():
            if self._is_absent(self.facts.value(name)) and not has_aliases:
                continue
            stated_here = stated(self.parts, "dependentRequired")
            brought = {other for needs in stated_here for other in needs.get(name, ())}
            if has_aliases or not set(others) <= self.facts.required | brought:
                yield not_provable(self.at.field(name).path, "dependentRequired")


def _has_only_patterns(node: dict[str, Any]) -> bool:
    return node.keys().isdisjoint({"properties", "additionalProperties"})
