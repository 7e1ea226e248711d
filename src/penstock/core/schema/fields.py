"""The fields of an event, nested ones included, as rows to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.core.schema.instances import Schema
from penstock.core.schema.markdown_text import code, text
from penstock.core.schema.plain_words import Words, is_null
from penstock.core.schema.references import resolve

# A schema is a graph, and a table is a list: what a wide one repeats is cut off here.
ROWS_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field; its words are Markdown."""

    path: str
    type_words: str
    is_required: bool
    constraints: str
    description: str


def rows_of(schema: Mapping[str, Any]) -> list[Row]:
    """The fields of a payload, each below the one that it is part of; ROWS_MAX at most."""
    walk = _Walk(schema)
    walk.inside(schema, "", frozenset())
    return walk.rows[:ROWS_MAX]


@dataclass(slots=True)
class _Walk:
    root: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)

    def inside(self, schema: Schema, path: str, open_references: frozenset[str]) -> None:
        """Add the fields that lie in what the schema describes."""
        if isinstance(schema, bool) or len(self.rows) > ROWS_MAX:
            return
        if "$ref" in schema:
            self._referred(schema["$ref"], path, open_references)
        for part in schema.get("allOf", ()):
            self.inside(part, path, open_references)
        self._options(schema, path, open_references)
        self._properties(schema, path, open_references)
        for pattern_values in schema.get("patternProperties", {}).values():
            self.inside(pattern_values, _joined(path, "*"), open_references)
        self.inside(schema.get("additionalProperties", True), _joined(path, "*"), open_references)
        for index, item in enumerate(schema.get("prefixItems", ())):
            self.inside(item, f"{path}[{index}]", open_references)
        self.inside(schema.get("items", True), f"{path}[]", open_references)

    def _referred(self, reference: str, path: str, open_references: frozenset[str]) -> None:
        target = resolve(self.root, reference)
        if target is not None and reference not in open_references:
            self.inside(target, path, open_references | {reference})

    def _options(
        self, schema: Mapping[str, Any], path: str, open_references: frozenset[str]
    ) -> None:
        options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        options = [option for option in options if not is_null(option)]
        words = Words(self.root)
        for option in options:
            # Fields of one alternative among several say which one they belong to.
            name = words.name_of(option)
            label = f" ({name})" if len(options) > 1 and name else ""
            self.inside(option, f"{path}{label}", open_references)

    def _properties(
        self, schema: Mapping[str, Any], path: str, open_references: frozenset[str]
    ) -> None:
        words = Words(self.root)
        for name, part in schema.get("properties", {}).items():
            if len(self.rows) > ROWS_MAX:
                return
            here = _joined(path, name)
            self.rows.append(
                Row(
                    path=code(here),
                    type_words=words.type_of(part),
                    is_required=name in schema.get("required", ()),
                    constraints="; ".join(dict.fromkeys(words.constraints_of(part))),
                    description=text(words.description_of(part)),
                )
            )
            self.inside(part, here, open_references)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
