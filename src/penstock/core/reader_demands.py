"""What pydantic demands of a value when it reads it, and its own JSON Schema does not tell.

Classes that demand nothing of the kind are described as ever; else their recorded schemas would
differ from those of former releases, which are in lock files and databases. What a function of
the user's demands nobody can see.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, Final, NoReturn

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from penstock.core.schema.nodes import DEMANDS, HEXADECIMAL, KEYS, STAYS_DISTINCT, WRITTEN_AS_NUMBER
from penstock.errors import RegistrationError

Describe = Callable[[Any], JsonSchemaValue]

_COMPARED: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_ZONES: Final = {"aware": "with a time zone", "naive": "without a time zone"}
# Two of them that are told apart in JSON are told apart by whoever reads them.
_STAY_DISTINCT: Final = frozenset({"bool", "date", "enum", "float", "int", "literal", "uuid"})
# In JSON a key is a text, and nobody makes these of one.
_NO_KEYS: Final = frozenset({"array", "null", "object"})


class DemandsAside(GenerateJsonSchema):
    """Says what readers demand where JSON Schema has no words, and refuses what none can read."""

    _inside: type[BaseModel] | None = None

    def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], JsonSchemaValue]]:
        """How each kind of value is described: as pydantic does, and its demands beside it."""
        methods = super().build_schema_type_to_method()
        return {kind: self._with_demands(kind, method) for kind, method in methods.items()}

    def _with_demands(self, kind: str, method: Describe) -> Describe:
        demands_of = _DEMANDS.get(kind)
        if demands_of is None:
            return method

        def describe(schema: Any) -> JsonSchemaValue:
            described = method(schema)
            return _demanding(described, demands_of(schema, described, self._config))

        return describe

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """A model, of which errors inside tell."""
        outside, self._inside = self._inside, schema["cls"]
        try:
            return super().model_schema(schema)
        finally:
            self._inside = outside

    def refuse(self, why: str, fix: str) -> NoReturn:
        """Raise RegistrationError for the class that is being described."""
        name = "The event" if self._inside is None else self._inside.__name__
        raise RegistrationError(f"{name}: {why}, so nobody could read what is sent. {fix}.")

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonSchemaValue:
        """Limits of digits are in the pattern of the text, and bind the number as well."""
        described = super().decimal_schema(schema)
        if "anyOf" not in described:
            return described
        number, text = described["anyOf"]
        demands = [f"of at most {schema['max_digits']} digits"] if "max_digits" in schema else []
        if "decimal_places" in schema:
            demands.append(f"of at most {schema['decimal_places']} decimals")
        return {**described, "anyOf": [_demanding(number, demands), text]}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonSchemaValue:
        """Bytes that are read as they were written."""
        written, read = self._config.ser_json_bytes, self._config.val_json_bytes
        if written != read and "serialization" not in schema:
            self.refuse(
                f"bytes are written as {written} and read as {read}",
                "Give ser_json_bytes and val_json_bytes the same value in its model_config",
            )
        return _demanding(super().bytes_schema(schema), [HEXADECIMAL] if read == "hex" else [])

    def json_schema(self, schema: core_schema.JsonSchema) -> JsonSchemaValue:
        """Text that is JSON itself, if it is written as a text again."""
        if "serialization" not in schema:
            self.refuse(
                "Json[…] is read from a text and written as what was in it",
                "Declare what is in it, or write a field_serializer that gives a text",
            )
        return super().json_schema(schema)

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Keys with a pattern: no others are ever written."""
        described = self._keyed(super().dict_schema(schema), schema)
        if "patternProperties" in described:
            described.setdefault("additionalProperties", False)
        return described

    def ordered_dict_schema(self, schema: core_schema.OrderedDictSchema) -> JsonSchemaValue:
        """A dictionary, with what its keys are read as."""
        return self._keyed(super().ordered_dict_schema(schema), schema)

    def counter_schema(self, schema: core_schema.CounterSchema) -> JsonSchemaValue:
        """A dictionary, with what its keys are read as."""
        return self._keyed(super().counter_schema(schema), schema)

    def _keyed(self, described: JsonSchemaValue, schema: Any) -> JsonSchemaValue:
        keys = schema.get("keys_schema", core_schema.any_schema())
        read_as = dict(self.generate_inner(keys))
        read_as.pop("title", None)
        resolved = self.get_schema_from_definitions(read_as["$ref"]) if "$ref" in read_as else None
        if (resolved or read_as).get("type") in _NO_KEYS or _has_other_values(keys):
            self.refuse(
                f"the keys of a dictionary are of the kind {keys['type']}, and JSON's are texts",
                "Take keys that are read from a text, or a list of models",
            )
        is_told = not described.keys().isdisjoint({"patternProperties", "propertyNames"})
        is_any_text = read_as in ({}, {"type": "string"})
        return described if is_told or is_any_text else {**described, KEYS: read_as}


def _demanding(described: JsonSchemaValue, demands: list[str]) -> JsonSchemaValue:
    return {**described, DEMANDS: sorted(demands)} if demands else described


def _has_other_values(keys: Any) -> bool:
    """Whether keys are among listed values that no text is read as."""
    if keys["type"] == "literal":
        return any(not isinstance(value, str | bool | Enum) for value in keys["expected"])
    if keys["type"] == "enum" and keys.get("sub_type") != "int":
        return any(not isinstance(member.value, str) for member in keys["members"])
    return False


# ── by kind ────────────────────────────────────────────────────────────────────────────────────


def _of_moment(schema: Any, _: Any, config: Any) -> list[str]:
    """The limits of a time, which no format has."""
    demands = [f"{sign} {schema[name]}" for name, sign in _COMPARED.items() if name in schema]
    if "now_op" in schema:
        demands.append(f"in the {schema['now_op']}")
    if "tz_constraint" in schema:
        zone = schema["tz_constraint"]
        demands.append(_ZONES.get(zone, f"{zone} seconds from UTC"))
    is_float = schema["type"] == "timedelta" and config.ser_json_timedelta == "float"
    if is_float or config.ser_json_temporal != "iso8601":
        demands.append(WRITTEN_AS_NUMBER)
    return demands


def _of_text(schema: Any, described: JsonSchemaValue, config: Any) -> list[str]:
    """Blanks are taken away before length and pattern are looked at."""
    is_stripped = schema.get("strip_whitespace", config.str_strip_whitespace)
    is_limited = described.get("minLength") or "pattern" in described
    return ["without blanks around it"] if is_stripped and is_limited else []


def _of_url(schema: Any, *_: Any) -> list[str]:
    schemes = sorted(schema.get("allowed_schemes") or ())
    demands = [f"of the scheme {' or '.join(schemes)}"] if schemes else []
    return [*demands, "with a host"] if schema.get("host_required") else demands


def _of_set(schema: Any, _: Any, config: Any) -> list[str]:
    """Members that were different may be the same once they are read: " a" and "a"."""
    items = schema.get("items_schema", core_schema.any_schema())
    is_changed = (
        not items.keys().isdisjoint({"strip_whitespace", "to_lower", "to_upper"})
        or config.str_strip_whitespace
        or config.str_to_lower
        or config.str_to_upper
    )
    is_plain = items["type"] in _STAY_DISTINCT or (items["type"] == "str" and not is_changed)
    return [] if is_plain or (schema.get("min_length") or 0) < 2 else [STAYS_DISTINCT]


_DEMANDS: Final[dict[str, Callable[[Any, JsonSchemaValue, Any], list[str]]]] = {
    **dict.fromkeys(("date", "datetime", "time", "timedelta"), _of_moment),
    **dict.fromkeys(("url", "multi-host-url"), _of_url),
    **dict.fromkeys(("set", "frozenset"), _of_set),
    "complex": lambda *_: ["a complex number"],
    "str": _of_text,
}
