"""What stands where in a JSON Schema that need not be a good one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from penstock.core.schema.codegen_scalars import Schema


def is_model(schema: Schema) -> bool:
    """Whether an object has fields, rather than keys and values."""
    is_closed = schema.get("additionalProperties") is False and "patternProperties" not in schema
    return schema.get("type") == "object" and (
        isinstance(schema.get("properties"), Mapping) or is_closed
    )


def required_names(schema: Schema) -> set[str]:
    """The properties that an object must have."""
    required = schema.get("required")
    return (
        {one for one in required if isinstance(one, str)} if isinstance(required, list) else set()
    )


def definition(root: Schema, reference: Any) -> Schema | None:
    """What a reference leads to, within the same schema."""
    if not isinstance(reference, str):
        return None
    if reference == "#":
        return root
    for keyword in ("$defs", "definitions"):
        start = f"#/{keyword}/"
        known = root.get(keyword)
        if reference.startswith(start) and isinstance(known, Mapping):
            key = unquote(reference.removeprefix(start)).replace("~1", "/").replace("~0", "~")
            found = known.get(key)
            return found if isinstance(found, Mapping) else None
    return None


def described_by(root: Schema) -> Schema:
    """The object that a schema describes: itself, or a definition that refers to itself."""
    return definition(root, root.get("$ref")) or root
