"""Draft 2020-12 in the words of draft 07, which is what AsyncAPI's own schemas are written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.schema.instances import Schema, is_json
from penstock.core.schema.nodes import HOLDS_MANY, HOLDS_NAMED, HOLDS_ONE

# An $id would change what references mean, and `definitions` are kept elsewhere.
_KEPT: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "type",
        "const",
        "enum",
        "format",
        "contentMediaType",
        "contentEncoding",
        "multipleOf",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
        "uniqueItems",
        "contains",
        "minProperties",
        "maxProperties",
        "required",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
    }
)
_IS_WELL_FORMED: Final[dict[str, Callable[[Any], bool]]] = {
    "examples": lambda value: isinstance(value, list),
    "title": lambda value: isinstance(value, str),
    "description": lambda value: isinstance(value, str),
    "deprecated": lambda value: isinstance(value, bool),
}


@dataclass(frozen=True, slots=True)
class Translation:
    """Rewrites schemas; what draft 07 cannot say is left out."""

    new_reference: Callable[[str], str | None]
    """Where a reference leads in the new document; None: nowhere."""

    def of(self, schema: Schema) -> Schema:
        """The schema in draft 07."""
        if isinstance(schema, bool):
            return schema
        translated = {
            keyword: self._value(keyword, value)
            for keyword, value in schema.items()
            if _is_kept(keyword, value)
        }
        if "minContains" in schema or "maxContains" in schema:
            translated.pop("contains", None)
        return self._with_reference(
            schema, translated | self._lists(schema) | self._dependencies(schema)
        )

    def _value(self, keyword: str, value: Any) -> Any:
        if keyword in HOLDS_ONE:
            return self.of(value)
        if keyword in HOLDS_MANY:
            return [self.of(part) for part in value]
        if keyword in HOLDS_NAMED:
            return self._named(value)
        return value

    def _named(self, schemas: Mapping[str, Schema]) -> dict[str, Any]:
        return {name: self.of(schema) for name, schema in schemas.items()}

    def _lists(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        if "prefixItems" not in schema:
            return {"items": self.of(schema["items"])} if "items" in schema else {}
        lists: dict[str, Any] = {"items": [self.of(part) for part in schema["prefixItems"]]}
        if "items" in schema:
            lists["additionalItems"] = self.of(schema["items"])
        return lists

    def _dependencies(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        dependencies: dict[str, Any] = dict(schema.get("dependentRequired", {}))
        for name, dependent in schema.get("dependentSchemas", {}).items():
            both = {"allOf": [{"required": dependencies.get(name, [])}, self.of(dependent)]}
            dependencies[name] = both
        return {"dependencies": dependencies} if dependencies else {}

    def _with_reference(self, schema: Mapping[str, Any], translated: dict[str, Any]) -> Schema:
        if "$ref" not in schema:
            return translated
        target = self.new_reference(schema["$ref"])
        if target is None:
            return {**translated, "x-penstock-unresolved": schema["$ref"]}
        reference = {"$ref": target}
        if not translated:
            return reference
        # In draft 07 nothing counts that stands beside a reference.
        return {**translated, "allOf": [reference, *translated.get("allOf", ())]}


def _is_kept(keyword: str, value: Any) -> bool:
    if keyword not in _KEPT and not keyword.startswith("x-"):
        return False
    is_well_formed = _IS_WELL_FORMED.get(keyword)
    holds_schemas = keyword in HOLDS_ONE | HOLDS_MANY | HOLDS_NAMED
    return (is_well_formed is None or is_well_formed(value)) and (holds_schemas or is_json(value))
