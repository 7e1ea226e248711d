"""An example for a JSON Schema: the same one every time, and one that the schema accepts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, islice
from typing import Any, Final

from penstock.core.schema.instances import Judge, Schema, is_json, is_number, is_same
from penstock.core.schema.merging import merged
from penstock.core.schema.nodes import KEYS, text_of
from penstock.core.schema.references import resolve
from penstock.core.schema.samples import FORMATS, text_like, texts_of_length

# What may be left out is left out behind the first, and the search ends behind the second.
_STEPS_FULL: Final = 2_000
_STEPS_MAX: Final = 20_000
_ITEMS_MAX: Final = 100

_KEYWORDS_OF = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}


class Nothing(Enum):
    """The type of NOTHING."""

    NOTHING = "NOTHING"


NOTHING: Final = Nothing.NOTHING
"""No example was found."""


def example_of(schema: Mapping[str, Any]) -> Any:
    """A value that the schema accepts, or NOTHING where none is found.

    What the schema itself offers comes first: examples, a default that says something, a constant,
    the first of an enumeration.
    """
    try:
        return _Search(schema).example(schema, frozenset())
    except RecursionError:
        return NOTHING


class _Search:
    """The search for one example; `open_references` are those it is inside of."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.judge = Judge(root)
        self.steps = 0

    def example(self, schema: Schema, open_references: frozenset[str]) -> Any:
        """A value that this part of the schema accepts."""
        self.steps += 1
        if schema is False or self.steps > _STEPS_MAX:
            return NOTHING
        if schema is True:
            return "anything"
        values = chain(self._offered(schema), self._built(schema, open_references))
        return next((value for value in values if self._is_right(schema, value)), NOTHING)

    def _is_right(self, schema: Schema, value: Any) -> bool:
        return value is not NOTHING and self.judge.accepts(schema, value)

    @staticmethod
    def _offered(schema: Mapping[str, Any]) -> Iterator[Any]:
        examples = schema.get("examples")
        offers = list(examples) if isinstance(examples, list | tuple) else []
        # An empty default is right, but shows nothing.
        offers += [schema["default"]] if schema.get("default") not in (None, [], {}, "") else []
        offers += [schema["const"]] if "const" in schema else []
        offers += schema.get("enum", ())
        yield from filter(is_json, offers)

    def _built(self, schema: Mapping[str, Any], open_references: frozenset[str]) -> Iterator[Any]:
        simpler = self._simpler(schema, open_references)
        if simpler is not None:
            for option, references in simpler:
                yield self.example(option, references)
            return
        if "enum" in schema or "const" in schema:
            return
        for type_name in _types_of(schema):
            yield from self._of_type(type_name, schema, open_references)

    def _of_type(
        self, type_name: str, schema: Mapping[str, Any], open_references: frozenset[str]
    ) -> Iterable[Any]:
        match type_name:
            case "object":
                return self._objects(schema, open_references)
            case "array":
                return (self._array(schema, open_references), [])
            case "string":
                return self._texts(schema)
            case "integer" | "number":
                return _numbers(schema, is_whole=type_name == "integer")
        return {"boolean": (True, False), "null": (None,)}.get(type_name, ("anything",))

    def _simpler(
        self, schema: Mapping[str, Any], open_references: frozenset[str]
    ) -> list[tuple[Schema, frozenset[str]]] | None:
        """The schemas that one with a reference or an alternative comes down to, in turn."""
        rest = dict(schema)
        if "$ref" in schema:
            reference = rest.pop("$ref")
            target = resolve(self.root, reference)
            # Whatever has a finite example has one that does not contain itself.
            if target is None or reference in open_references:
                return []
            return [(merged(rest, target), open_references | {reference})]
        if "allOf" in schema:
            whole: Schema = {key: value for key, value in rest.items() if key != "allOf"}
            for part in schema["allOf"]:
                whole = merged(whole, part)
            return [(whole, open_references)]
        for keyword in ("oneOf", "anyOf"):
            if keyword in schema:
                options = rest.pop(keyword)
                # Nothing at all is the last thing to show, until the search takes too long.
                is_late = self.steps > _STEPS_FULL
                options = sorted(options, key=lambda it: (it == {"type": "null"}) != is_late)
                return [(merged(rest, option), open_references) for option in options]
        return None

    # ── objects ────────────────────────────────────────────────────────────────────────────────

    def _objects(
        self, schema: Mapping[str, Any], open_references: frozenset[str]
    ) -> Iterator[dict[str, Any]]:
        """With everything in it, and with no more than it needs."""
        required = schema.get("required", ())
        properties = schema.get("properties", {})
        built: dict[str, Any] = {}
        for name in dict.fromkeys((*properties, *required)):
            if name not in required and self.steps > _STEPS_FULL:
                continue
            value = self.example(properties.get(name, True), open_references)
            if value is not NOTHING:
                built[name] = value
            elif name in required:
                return
        yield built | self._entries(schema, built, open_references)
        yield {name: built[name] for name in built if name in required}

    def _entries(
        self, schema: Mapping[str, Any], built: dict[str, Any], open_references: frozenset[str]
    ) -> dict[str, Any]:
        """The entries of a mapping: one at least, where its values are described."""
        pattern, values = next(
            iter(schema.get("patternProperties", {}).items()),
            (None, schema.get("additionalProperties", True)),
        )
        is_mapping = not schema.get("properties") and isinstance(values, Mapping)
        wanted = max(schema.get("minProperties", 0), int(is_mapping))
        missing = min(wanted - len(built), _ITEMS_MAX)
        value = self.example(values, open_references) if missing > 0 else NOTHING
        if value is NOTHING:
            return {}
        like = {"type": "string"} | ({"pattern": pattern} if pattern is not None else {})
        names = merged(schema.get("propertyNames", True), like)
        key = self.example(schema[KEYS], open_references) if KEYS in schema else NOTHING
        first = "key" if key is NOTHING else key if isinstance(key, str) else text_of(key)
        free = (name for name in self._different(names, first) if name not in built)
        return dict.fromkeys(islice(free, missing), value)

    # ── lists ──────────────────────────────────────────────────────────────────────────────────

    def _array(self, schema: Mapping[str, Any], open_references: frozenset[str]) -> Any:
        built: list[Any] = []
        minimum = schema.get("minItems", 0)
        for item_schema in schema.get("prefixItems", ()):
            value = self.example(item_schema, open_references)
            if value is NOTHING:
                return built if len(built) >= minimum else NOTHING
            built.append(value)
        wanted = max(minimum, int(not built and "items" in schema))
        wanted = min(wanted, schema.get("maxItems", wanted), _ITEMS_MAX)
        if len(built) < wanted and (self.steps <= _STEPS_FULL or minimum):
            built += self._rest(schema, wanted - len(built), open_references)
        return built

    def _rest(
        self, schema: Mapping[str, Any], wanted: int, open_references: frozenset[str]
    ) -> list[Any]:
        items = schema.get("items", True)
        first = self.example(items, open_references)
        if first is NOTHING:
            return []
        if schema.get("uniqueItems") is True and wanted > 1:
            return list(islice(self._different(items, first), wanted))
        return [first] * wanted

    def _different(self, schema: Schema, first: Any) -> Iterator[Any]:
        """Values that the schema accepts, each one once."""
        seen: list[Any] = []
        whole = schema
        if isinstance(schema, Mapping) and "$ref" in schema:
            whole = resolve(self.root, schema["$ref"]) or False
        enumerated = whole.get("enum", ()) if isinstance(whole, Mapping) else ()
        found = self.example(schema, frozenset())
        for value in chain((first,), enumerated, _changes(first), (found,), _changes(found)):
            is_new = not any(is_same(value, other) for other in seen)
            if is_new and self._is_right(schema, value):
                seen.append(value)
                yield value

    # ── texts ──────────────────────────────────────────────────────────────────────────────────

    def _texts(self, schema: Mapping[str, Any]) -> Iterator[str]:
        if schema.get("format") in FORMATS:
            yield FORMATS[schema["format"]]
        yield from texts_of_length(schema.get("minLength", 0), schema.get("maxLength"))
        if "pattern" in schema:
            text = text_like(schema["pattern"], lambda text: self.judge.accepts(schema, text))
            yield from () if text is None else (text,)


def _types_of(schema: Mapping[str, Any]) -> Iterable[str]:
    """The types to try, by what is said or by what the keywords are about."""
    names = schema.get("type")
    if names is None:
        about = [
            name for name, words in _KEYWORDS_OF.items() if not schema.keys().isdisjoint(words)
        ]
        return about or ["anything"]
    listed: Sequence[str] = [names] if isinstance(names, str) else names
    return sorted(listed, key=lambda name: name == "null")


def _numbers(schema: Mapping[str, Any], *, is_whole: bool) -> Iterator[float]:
    """Numbers worth trying: plain ones, then those at and between the limits."""
    step = schema.get("multipleOf", 1)
    low = max(schema.get("minimum", -math.inf), schema.get("exclusiveMinimum", -math.inf))
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    tries: list[float] = [1, 0] if is_whole else [1.5, 1, 0]
    for limit in filter(math.isfinite, (low, high)):
        nearest = math.floor(limit / step)
        tries += [limit, *((nearest + n) * step for n in (0, 1, -1, 2))]
    if math.isfinite(low) and math.isfinite(high):
        tries.append((low + high) / 2)
    tries.append(step)
    for number in tries:
        yield int(number) if is_whole and number == number // 1 else number


def _changes(value: Any) -> Iterator[Any]:
    return (_changed(value, n) for n in range(2, 2 * _ITEMS_MAX))


def _changed(value: Any, n: int) -> Any:
    """Another value of the same kind; n tells which."""
    if isinstance(value, bool):
        return not value
    if is_number(value):
        return value + n - 1
    if isinstance(value, str):
        return f"{value}{n}"
    if isinstance(value, list) and value:
        return [*value[:-1], _changed(value[-1], n)]
    if isinstance(value, dict) and value:
        # The last field that can change: the first ones often say what kind of thing it is.
        name = next((key for key in reversed(value) if _changed(value[key], n) != value[key]), None)
        return value if name is None else {**value, name: _changed(value[name], n)}
    return value
