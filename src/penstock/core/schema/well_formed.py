"""Whether a JSON Schema that somebody may have edited is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.core.schema.nodes import (
    ALIASES,
    DEFINITIONS,
    DEMANDS,
    HOLDS_MANY,
    HOLDS_NAMED,
    HOLDS_ONE,
)

_TYPES: Final = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_DEPTH_MAX: Final = 100


def require_well_formed(schema: object, path: str = "", depth: int = 0) -> None:
    """Raise ValueError, with the place, where a keyword holds what it cannot hold."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        raise ValueError(f"{path or 'the whole'} is no JSON Schema")
    for keyword, value in schema.items():
        at = f"{path}.{keyword}" if path else keyword
        if keyword in HOLDS_ONE:
            require_well_formed(value, at, depth + 1)
        elif keyword in HOLDS_MANY | HOLDS_NAMED | DEFINITIONS:
            for name, inner in _members(keyword, value, at):
                require_well_formed(inner, f"{at}.{name}", depth + 1)
        elif not _HOLDS.get(keyword, _anything)(value):
            raise ValueError(f"{at} cannot be {value!r}")


def _members(keyword: str, value: object, at: str) -> list[tuple[Any, Any]]:
    if keyword in HOLDS_MANY and isinstance(value, list):
        return list(enumerate(value))
    if keyword not in HOLDS_MANY and isinstance(value, Mapping):
        return list(value.items())
    raise ValueError(f"{at} cannot be {value!r}")


def _anything(_: object) -> bool:
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: object) -> bool:
    names = [value] if isinstance(value, str) else value
    return isinstance(names, list) and all(_is_text(name) and name in _TYPES for name in names)


def _is_finite(value: object) -> bool:
    """Whether JSON can express it: Python also reads NaN, Infinity and 1e400."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_count(value: object) -> bool:
    return _is_number(value) and isinstance(value, int | float) and value >= 0


_HOLDS: Final[dict[str, Callable[[object], bool]]] = {
    "type": _is_type,
    "const": _is_finite,
    "enum": lambda value: isinstance(value, list) and _is_finite(value),
    "uniqueItems": lambda value: isinstance(value, bool),
    "discriminator": lambda value: isinstance(value, dict),
    "dependentRequired": lambda value: (
        isinstance(value, dict) and all(map(_is_texts, value.values()))
    ),
    "multipleOf": lambda value: _is_count(value) and value != 0,
    **dict.fromkeys(("$ref", "format", "pattern"), _is_text),
    **dict.fromkeys(("required", ALIASES, DEMANDS), _is_texts),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _is_number),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), _is_count),
    **dict.fromkeys(("minProperties", "maxProperties"), _is_count),
}
