"""References within a JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote


def pointer_parts(reference: str) -> list[str] | None:
    """The steps of a reference into its own document; None for any other reference."""
    pointer = unquote(reference)
    if pointer == "#":
        return []
    if not pointer.startswith("#/"):
        return None
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer[2:].split("/")]


def resolve(root: Mapping[str, Any], reference: object) -> Mapping[str, Any] | bool | None:
    """The schema that a reference within `root` means; None where it leads nowhere."""
    parts = pointer_parts(reference) if isinstance(reference, str) else None
    if parts is None:
        return None
    found: Any = root
    for part in parts:
        if isinstance(found, Mapping):
            found = found.get(part)
        elif _is_list(found) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    return found if isinstance(found, Mapping | bool) else None


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
