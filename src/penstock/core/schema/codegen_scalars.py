"""Types without parts: strings, numbers, literals. Each accepts all that its schema accepts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter, ValidationError
from pydantic_core import SchemaError, SchemaValidator, core_schema

from penstock.core.schema.codegen_source import (
    Atom,
    Brackets,
    Code,
    call,
    is_text,
    name,
    quoted,
    subscript,
)

LENGTH_MAX = 2**31 - 1
_BOUND_MAX = 1e300
_RESTRICTS = re.compile(
    r"\$(dynamicRef|ref)|(all|any|one)Of|not|if|then|else|type|const|enum|format|discriminator"
    r"|(min|max)(imum|Contains|Items|Length|Properties)|exclusive(Min|Max)imum|multipleOf|pattern"
    r"|content(Encoding|MediaType|Schema)|contains|items|prefixItems|uniqueItems|unevaluatedItems"
    r"|(additional|pattern|unevaluated)Properties|properties|propertyNames|required"
    r"|dependencies|dependent(Required|Schemas)"
)
_FORMAT = re.compile(r"[a-z][a-z0-9-]{0,30}")
# Spelled the same, these mean less to pydantic's regular expressions than to JSON Schema's:
# there, \W leaves out non-ASCII letters, too, and a class may hold "[" and "&&" as they are.
_AMBIGUOUS = re.compile(
    r"\\[BDSWb<>]|\[\^?[^\]]*(\[|&&|--|~~)|\[\^[^\]]*\\[dsw]|\(\?[a-zA-Z-]*[xU]"
)
_DIGITS = r"\[0-9\](?:\?|\{\d+(?:,\d+)?\})?"
_SOME_DIGITS = r"\[0-9\](?:\{[1-9]\d*(?:,\d+)?\})?"
_DECIMAL_FORMS = "|".join(
    (
        rf"(?:0\*{_SOME_DIGITS}|0\+|\[0-9\]\+)(?:\(\?:\\\.(?:{_DIGITS})?0\*\)\?)?",
        rf"(?:0\*(?:{_DIGITS})?|\[0-9\]\*)?\\\.(?:{_SOME_DIGITS}0\*|0\+)",
        *map(
            re.escape,
            (
                r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][+-]?[0-9]+",
                r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
            ),
        ),
    )
)
# What pydantic says of a Decimal's text: since 2.14, and before.
_DECIMAL_PATTERNS = (
    re.compile(rf"\^\[\+-\]\?\(\?:(?:{_DECIMAL_FORMS})(?:\|(?:{_DECIMAL_FORMS}))*\)\$"),
    re.compile(
        re.escape(r"^(?!^[-+.]*$)[+-]?0*")
        + r"(?:\\d\*\\\.\?\\d(?:\*|\{0,\d+\}0\*)\$"
        + r"|\(\?:\\d\{0,\d+\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
        + r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,\d+\})0\*\$\))"
    ),
)
_LENGTHS = {"minLength": "min_length", "maxLength": "max_length"}
_BOUNDS = {
    "minimum": ("ge", math.ceil),
    "exclusiveMinimum": ("gt", math.floor),
    "maximum": ("le", math.floor),
    "exclusiveMaximum": ("lt", math.ceil),
}

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Default:
    """A default as it is going to be written: a value, or what makes one each time."""

    code: Atom | Brackets
    is_factory: bool = False


def no_default(_value: Any) -> Default | None:
    """For types whose values cannot be written down."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """A type as it is going to be written, and the keywords of its schema that it leaves out."""

    code: Code
    notes: tuple[str, ...] = ()
    default: Callable[[Any], Default | None] = no_default
    """The default for a JSON value; None where the type cannot have it."""
    literals: tuple[Any, ...] = ()
    """The values of a Literal: a union has one Literal for all its members' values."""
    factory: str = ""
    """What makes an empty value."""
    is_hashable: bool = False
    is_exact: bool = False
    """Whether different JSON values are different values of this type."""


def unchecked(schema: Schema, *checked: str) -> tuple[str, ...]:
    """The keywords of a schema that restrict it and are not among those checked."""
    left = [key for key in sorted(schema) if key not in checked and _RESTRICTS.fullmatch(key)]
    return tuple(_named(key, schema[key]) for key in left)


def _named(keyword: str, value: Any) -> str:
    """A format is worth its name, unless that could be more than a name."""
    is_plain = keyword == "format" and isinstance(value, str) and _FORMAT.fullmatch(value)
    return f"format {value}" if is_plain else keyword


def anything(*notes: str) -> Typed:
    """Any, for what has no other type."""
    return Typed(code=name("Any"), notes=notes, default=_default_of(object))


def constrained(code: Code, constraints: Mapping[str, int | float | str]) -> Code:
    """A type with pydantic's constraints, if there are any."""
    if not constraints:
        return code
    arguments = [Atom(f"{key}={literal(value)}") for key, value in constraints.items()]
    return subscript("Annotated", code, call("Field", *arguments))


def literal(value: Any) -> str:
    """A scalar of JSON in Python."""
    return quoted(value) if isinstance(value, str) else repr(value)


def is_scalar(value: Any) -> bool:
    """Whether a value of JSON can be written as a literal."""
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, int) or is_text(value)


def _default_of(*types: type) -> Callable[[Any], Default | None]:
    def default(value: Any) -> Default | None:
        is_right = isinstance(value, types) and (bool in types or type(value) is not bool)
        if object in types or is_right:
            return Default(Atom(literal(value))) if is_scalar(value) else None
        return None

    return default


NOTHING = Typed(code=Atom("None"), default=_default_of(type(None)))


def boolean(schema: Schema) -> Typed:
    """True or false."""
    return Typed(
        code=Atom("bool", ("bool",)),
        notes=unchecked(schema, "type"),
        default=_default_of(bool),
        is_hashable=True,
        is_exact=True,
    )


def lengths(schema: Schema, keywords: Mapping[str, str]) -> dict[str, int | float | str]:
    """The lengths that a schema demands, by pydantic's names for them, given the schema's."""
    return {
        constraint: schema[keyword]
        for keyword, constraint in keywords.items()
        if type(schema.get(keyword)) is int and 0 <= schema[keyword] <= LENGTH_MAX
    }


def string(schema: Schema) -> Typed:
    """A str, or what its format says."""
    if str(schema.get("format")) in _FORMATS:
        return _formatted(schema)
    if is_decimal(schema):
        return DECIMAL
    constraints = lengths(schema, _LENGTHS)
    if _is_portable(schema.get("pattern")):
        constraints["pattern"] = schema["pattern"]
    checked = {"minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"}
    used = [keyword for keyword, constraint in checked.items() if constraint in constraints]
    return Typed(
        code=constrained(name("str"), constraints),
        notes=unchecked(schema, "type", *used),
        default=_default_of(str),
        is_hashable=True,
        is_exact=True,
    )


def _is_portable(pattern: Any) -> bool:
    """Whether pydantic takes the pattern, and in no narrower sense than JSON Schema."""
    if not is_text(pattern) or _AMBIGUOUS.search(pattern):
        return False
    try:
        SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError:
        return False
    return True


def _formatted(schema: Schema) -> Typed:
    python_type, write = _FORMATS[schema["format"]]

    def default(value: Any) -> Default | None:
        try:
            return Default(write(value)) if is_text(value) else None
        except (ValueError, OverflowError):
            return None

    return Typed(
        code=name(python_type),
        notes=unchecked(schema, "type", "format"),
        default=default,
        is_hashable=True,
    )


def _write_uuid(value: str) -> Brackets:
    return call("UUID", Atom(quoted(str(UUID(value)))))


def _write_iso(python_type: type[date] | type[time]) -> Callable[[str], Brackets]:
    def write(value: str) -> Brackets:
        parsed = python_type.fromisoformat(value)
        return call(f"{python_type.__name__}.fromisoformat", Atom(quoted(parsed.isoformat())))

    return write


def _write_timedelta(value: str) -> Brackets:
    try:
        parsed = TypeAdapter(timedelta).validate_python(value)
    except ValidationError as error:
        raise ValueError from error
    parts = {
        "days": parsed.days,
        "seconds": parsed.seconds,
        "microseconds": parsed.microseconds,
    }
    return call("timedelta", *(Atom(f"{unit}={part}") for unit, part in parts.items() if part))


# A datetime may lack a zone, and so may the values of a writer whose own type is this one.
_FORMATS: dict[str, tuple[str, Callable[[str], Brackets]]] = {
    "date": ("date", _write_iso(date)),
    "date-time": ("datetime", _write_iso(datetime)),
    "duration": ("timedelta", _write_timedelta),
    "time": ("time", _write_iso(time)),
    "uuid": ("UUID", _write_uuid),
    **{f"uuid{version}": ("UUID", _write_uuid) for version in (1, 3, 4, 5, 6, 7, 8)},
}


def is_decimal(schema: Any) -> bool:
    """Whether it describes the strings that pydantic reads as Decimal."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return False
    pattern = schema.get("pattern")
    return isinstance(pattern, str) and any(known.fullmatch(pattern) for known in _DECIMAL_PATTERNS)


def _decimal_default(value: Any) -> Default | None:
    try:
        parsed = Decimal(str(value))
    except InvalidOperation:
        return None
    if not parsed.is_finite() or isinstance(value, bool):
        return None
    is_whole = parsed.as_tuple().exponent == 0
    return Default(call("Decimal", Atom(str(int(parsed)) if is_whole else quoted(str(parsed)))))


DECIMAL = Typed(code=name("Decimal"), default=_decimal_default, is_hashable=True)


def number(schema: Schema) -> Typed:
    """A float, or an int."""
    whole = schema.get("type") == "integer"
    constraints: dict[str, int | float | str] = {}
    used = []
    for keyword, (constraint, rounded) in _BOUNDS.items():
        if (bound := _number(schema.get(keyword))) is not None:
            constraints[constraint] = rounded(bound) if whole else bound
            used.append(keyword)
    step = _number(schema.get("multipleOf"))
    if step is not None and step > 0 and (not whole or step == int(step)):
        constraints["multiple_of"] = int(step) if whole else step
        used.append("multipleOf")
    return Typed(
        code=constrained(name("int" if whole else "float"), constraints),
        notes=unchecked(schema, "type", *used),
        default=_default_of(int) if whole else _default_of(int, float),
        is_hashable=True,
        is_exact=whole,
    )


def _number(value: Any) -> int | float | None:
    """A number that a constraint can have."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) <= _BOUND_MAX else None


def literals(values: Sequence[Any], notes: Iterable[str]) -> Typed | None:
    """A Literal of these values, where Python has one."""
    usable = [one for one in values if is_scalar(one) and not isinstance(one, float)]
    if not values or len(usable) < len(values):
        return None
    distinct = list({(type(one), one): one for one in values}.values())
    return literals_of(distinct, notes)


def literals_of(values: Sequence[Any], notes: Iterable[str]) -> Typed:
    """A Literal of these values, which are different and not floats."""

    def default(value: Any) -> Default | None:
        same = any(type(one) is type(value) and one == value for one in values)
        return Default(Atom(literal(value))) if same else None

    atoms = [Atom(literal(one)) for one in values]
    return Typed(
        code=subscript("Literal", *atoms),
        notes=tuple(notes),
        default=default,
        literals=tuple(values),
        is_hashable=True,
        is_exact=all(isinstance(one, str) for one in values),
    )
