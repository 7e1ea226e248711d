"""Names for classes, fields and members, from names that need not be any in Python."""

from __future__ import annotations

import builtins
import itertools
import keyword
import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from penstock.core.events import Event

NAME_LENGTH_MAX = 60
MODULES = {
    "AliasChoices": "pydantic",
    "Annotated": "typing",
    "Any": "typing",
    "BaseModel": "pydantic",
    "ConfigDict": "pydantic",
    "Decimal": "decimal",
    "Event": "penstock",
    "Field": "pydantic",
    "IntEnum": "enum",
    "Literal": "typing",
    "StrEnum": "enum",
    "UUID": "uuid",
    "date": "datetime",
    "datetime": "datetime",
    "time": "datetime",
    "timedelta": "datetime",
}
"""Where a generated module takes its names from."""

_TYPES = frozenset(MODULES) | {"bool", "dict", "float", "int", "list", "set", "str", "tuple"}
_ATTRIBUTES = frozenset(dir(BaseModel)) | frozenset(dir(Event))
_PROTECTED = ("model_dump", "model_validate")
# Letters that linters refuse, since they look like digits.
_AMBIGUOUS = frozenset({"I", "O", "l"})
_NO_CLASS_NAMES = frozenset(dir(builtins)) | _TYPES | _AMBIGUOUS
_APART = re.compile(r"[\W_]+")


def is_identifier(text: str) -> bool:
    """Whether it is a public name in Python, and the one that Python would make of it."""
    return (
        text.isidentifier()
        and not keyword.iskeyword(text)
        and not text.startswith("_")
        and len(text) <= NAME_LENGTH_MAX
        and unicodedata.normalize("NFKC", text) == text
    )


def is_field_name(text: str) -> bool:
    """Whether a property's name can be its field's, whatever else is in the class."""
    return _is_free(text) and text not in _TYPES


def _is_free(text: str) -> bool:
    is_attribute = text in _ATTRIBUTES or text.startswith(_PROTECTED)
    return is_identifier(text) and not is_attribute and text not in _AMBIGUOUS


def field_names(properties: Iterable[str], types_used: frozenset[str]) -> dict[str, str]:
    """The field of each property: its own name, or one like it that can be a field's.

    A field must not be called like a type that its class uses, which it would hide.
    """
    every = list(properties)
    names = {one: one for one in every if _is_free(one) and one not in types_used}
    taken = set(names) | types_used
    for one in every:
        if one not in names:
            names[one] = _first_free(one, "field", taken)
            taken.add(names[one])
    return {one: names[one] for one in every}


def member_names(values: Iterable[str | int]) -> list[str]:
    """The names of an enumeration's members."""
    names: dict[str, None] = {}
    for value in values:
        text = value.upper() if isinstance(value, str) else str(value).replace("-", "MINUS_")
        names[_first_free(text, "VALUE", set(names))] = None
    return list(names)


def _first_free(text: str, fallback: str, taken: set[str]) -> str:
    like = _APART.sub("_", unicodedata.normalize("NFKC", text)).strip("_")
    like = like[: NAME_LENGTH_MAX - 10].rstrip("_")
    if not like.isidentifier() or like.startswith(_PROTECTED):
        like = f"{fallback}_{like}".rstrip("_")
    if not is_identifier(f"{like}_2"):
        like = fallback
    candidates = itertools.chain(
        (like, f"{like}_"), (f"{like}_{number}" for number in itertools.count(2))
    )
    return next(one for one in candidates if one not in taken and _is_free(one))


class ClassNames:
    """The names of a module's classes, each given once."""

    def __init__(self, reserved: Iterable[str]) -> None:
        """A reserved name is a property's somewhere: its field would hide a class of that name."""
        self._taken = set(reserved) | _NO_CLASS_NAMES

    def claim(self, *candidates: str) -> str:
        """The first candidate that is a free name, or else one like the last."""
        made = [one for one in candidates if one] or ["Unnamed"]
        numbered = (f"{made[-1]}{number}" for number in itertools.count(2))
        name = next(one for one in itertools.chain(made, numbered) if one not in self._taken)
        self._taken.add(name)
        return name


def class_like(text: str) -> str:
    """A class's name made of the words in a text; empty if nothing is left of it."""
    words = _APART.split(unicodedata.normalize("NFKC", text))
    name = "".join(word[:1].upper() + word[1:] for word in words)[: NAME_LENGTH_MAX - 10]
    name = f"Type{name}" if name and not name.isidentifier() else name
    return name if is_identifier(name) else ""


def property_names(schema: Mapping[str, Any]) -> set[str]:
    """The names of all properties, however deep."""
    found: set[str] = set()
    waiting: list[Any] = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            properties = one.get("properties")
            found.update(properties if isinstance(properties, Mapping) else ())
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)
    return found
