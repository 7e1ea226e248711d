"""A JSON Schema in plain words, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.schema.instances import Schema
from penstock.core.schema.markdown_text import code, text, value
from penstock.core.schema.nodes import ALIASES, DEMANDS, KEYS
from penstock.core.schema.references import resolve

_VALUES_MAX: Final = 20
_DEPTH_MAX: Final = 8

_TYPES: Final = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "null": "null",
    "array": "list",
    "object": "object",
}
_FORMATS: Final = {
    "binary": "bytes",
    "base64": "bytes in base64",
    "base64url": "bytes in base64",
    "date": "date",
    "date-time": "date and time",
    "duration": "duration",
    "email": "email address",
    "ipv4": "IPv4 address",
    "ipv6": "IPv6 address",
    "json-string": "text that is JSON",
    "time": "time of day",
    "uri": "URL",
    **dict.fromkeys(("uuid", *(f"uuid{n}" for n in range(1, 9))), "UUID"),
}
_LIMITS: Final = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "&gt; {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "&lt; {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} long",
    "maxLength": "at most {} long",
    "pattern": "matches {}",
    "minItems": "at least {} long",
    "maxItems": "at most {} long",
    "minProperties": "at least {} entries",
    "maxProperties": "at most {} entries",
}
_COUNTS: Final = frozenset({"minItems", "maxItems"})


def is_null(schema: Schema) -> bool:
    """Whether a schema accepts null and nothing else."""
    return not isinstance(schema, bool) and schema.get("type") == "null"


@dataclass(frozen=True, slots=True)
class Words:
    """Tells what one schema document says."""

    root: Mapping[str, Any]

    def type_of(self, schema: Schema, depth: int = 0) -> str:
        """What kind of value a schema describes."""
        if isinstance(schema, bool):
            return "anything" if schema else "never there"
        if depth > _DEPTH_MAX:
            return "…"
        if "const" in schema:
            return f"always {value(schema['const'])}"
        if "enum" in schema:
            return f"one of {_values(schema['enum'])}"
        return self._described(schema, depth)

    def _described(self, schema: Mapping[str, Any], depth: int) -> str:
        if "$ref" in schema:
            return self._referred(schema["$ref"], depth)
        options = schema.get("anyOf") or schema.get("oneOf")
        if options:
            return self._options(schema, options, depth)
        if "type" not in schema and schema.get("allOf"):
            return " and ".join(self.type_of(part, depth + 1) for part in schema["allOf"])
        return self._typed(schema, depth)

    def _referred(self, reference: object, depth: int) -> str:
        target = resolve(self.root, reference)
        if target is None:
            return "anything"
        if not isinstance(target, bool) and "properties" in target:
            return f"object {code(self.name_of({'$ref': reference}))}"
        return self.type_of(target, depth + 1)

    def _options(self, schema: Mapping[str, Any], options: list[Schema], depth: int) -> str:
        words = " or ".join(dict.fromkeys(self.type_of(option, depth + 1) for option in options))
        discriminator = schema.get("discriminator")
        if isinstance(discriminator, Mapping) and "propertyName" in discriminator:
            return f"{words}, told apart by {code(str(discriminator['propertyName']))}"
        return words

    def _typed(self, schema: Mapping[str, Any], depth: int) -> str:
        names = schema.get("type", "anything")
        if not isinstance(names, str):
            return " or ".join(self._typed({**schema, "type": name}, depth) for name in names)
        match names:
            case "array":
                return self._list(schema, depth)
            case "object":
                return self._object(schema, depth)
            case "string" if schema.get("format") in _FORMATS:
                return _FORMATS[schema["format"]]
            case "string" if isinstance(schema.get("format"), str):
                return f"text ({text(schema['format'])})"
        return _TYPES.get(names, "anything")

    def _list(self, schema: Mapping[str, Any], depth: int) -> str:
        items = schema.get("items", True)
        if "prefixItems" in schema:
            parts = [self.type_of(part, depth + 1) for part in schema["prefixItems"]]
            is_open = items is not False and schema.get("maxItems") != len(parts)
            more = [f"any number of {self.type_of(items, depth + 1)}"] if is_open else []
            return f"list of exactly: {', '.join(parts + more)}"
        kind = "list of different values" if schema.get("uniqueItems") is True else "list"
        return kind if items is True else f"{kind}: {self.type_of(items, depth + 1)}"

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        values = schema.get("additionalProperties", True)
        values = next(iter(schema.get("patternProperties", {}).values()), values)
        if schema.get("properties") or isinstance(values, bool):
            return "object"
        keys = schema.get("propertyNames", schema.get(KEYS, {"type": "string"}))
        names = self.type_of(keys, depth + 1)
        return f"mapping of {names} to {self.type_of(values, depth + 1)}"

    def name_of(self, schema: Schema) -> str:
        """What a schema is called: its title, or its definition's name; else nothing."""
        if isinstance(schema, bool):
            return ""
        reference = schema.get("$ref")
        target = schema if reference is None else resolve(self.root, reference)
        title = None if target is None or isinstance(target, bool) else target.get("title")
        if isinstance(title, str) and title:
            return title
        return str(reference).rpartition("/")[2] if reference is not None else ""

    def description_of(self, schema: Schema) -> str:
        """What a schema says about itself, or what it refers to says."""
        if isinstance(schema, bool):
            return ""
        description = schema.get("description")
        if isinstance(description, str) and description:
            return description
        target = resolve(self.root, schema.get("$ref"))
        found = None if target is None or isinstance(target, bool) else target.get("description")
        return found if isinstance(found, str) else ""

    def constraints_of(self, schema: Schema, depth: int = 0) -> Iterator[str]:
        """What a value has to comply with besides its type, and what is known of the field."""
        if isinstance(schema, bool) or depth > _DEPTH_MAX:
            return
        yield from (
            words.format(
                code(limit) if isinstance(limit := schema[keyword], str) else text(str(limit))
            )
            for keyword, words in _LIMITS.items()
            if keyword in schema and not (keyword in _COUNTS and "prefixItems" in schema)
        )
        yield from map(text, schema.get(DEMANDS, ()))
        yield from self._constraints_inside(schema, depth)
        if "default" in schema:
            yield f"default {value(schema['default'])}"
        if schema.get(ALIASES):
            yield f"also read as {', '.join(map(code, schema[ALIASES]))}"
        if schema.get("deprecated") is True:
            yield "deprecated"

    def _constraints_inside(self, schema: Mapping[str, Any], depth: int) -> Iterator[str]:
        target = resolve(self.root, schema.get("$ref"))
        if target is not None:
            yield from self.constraints_of(target, depth + 1)
        for part in schema.get("allOf", ()):
            yield from self.constraints_of(part, depth + 1)
        options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        several = sum(not is_null(option) for option in options) > 1
        for option in options:
            for words in self.constraints_of(option, depth + 1):
                yield f"{self.type_of(option)}: {words}" if several else words
        patterns = [{"pattern": pattern} for pattern in schema.get("patternProperties", ())]
        for label, part in (
            ("each", schema.get("items", True)),
            ("each name", schema.get("propertyNames", True)),
            *(("each name", pattern) for pattern in patterns),
        ):
            for words in self.constraints_of(part, depth + 1):
                yield f"{label} {words}"


def _values(values: list[Any]) -> str:
    shown = [value(item) for item in values[:_VALUES_MAX]]
    left_out = len(values) - len(shown)
    return ", ".join(shown) + (f" and {left_out} more" if left_out else "")
