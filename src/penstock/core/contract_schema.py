"""The JSON Schema of an event class: what is written under its type and version, and no more.

Readers accept more than that, since reading keeps unknown fields; comparing takes care of it.
"""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import core_schema, from_json, to_json

from penstock.core.contracts import readable_versions
from penstock.core.encoding import is_unstorable_text
from penstock.core.events import Event
from penstock.core.reader_demands import DemandsAside
from penstock.core.require import require
from penstock.core.schema.catalogue import Contract
from penstock.core.schema.nodes import ALIASES
from penstock.errors import RegistrationError


def json_schema_of(event_class: type[Event]) -> dict[str, Any]:
    """Its JSON Schema, draft 2020-12. Raises RegistrationError for what JSON Schema cannot say."""
    try:
        return event_class.model_json_schema(by_alias=True, schema_generator=_AsWritten)
    except PydanticInvalidForJsonSchema as error:
        raise RegistrationError(
            f"{event_class.__name__} has no JSON Schema, so other services cannot know what it "
            f"holds: {error.message}. Use types that JSON knows, or WithJsonSchema."
        ) from None


def contract_of(event_class: type[Event]) -> Contract:
    """What others are told of a class that has a version. Raises RegistrationError."""
    require(
        not is_unstorable_text(event_class.__event_type__),
        f"{event_class.__name__} cannot be told to others: its type "
        f"{event_class.__event_type__!a} holds a NUL or half a surrogate pair, which is no text. "
        "Give it another type.",
        RegistrationError,
    )
    schema = json_schema_of(event_class)
    key = event_class.__event_key__
    return Contract(
        event_type=event_class.__event_type__,
        version=event_class.__event_version__ or 1,
        json_schema=schema,
        key=None if key is None else _written_name(key, event_class.model_fields[key]),
        upcasts_from=tuple(readable_versions(event_class)),
        description=str(schema.get("description", "")),
        names_demands=True,
    )


class _AsWritten(DemandsAside):
    """Closes objects whose unknown fields are refused or dropped, and keeps aliases."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        model: type[BaseModel] = schema["cls"]
        _require_written(model)
        described = super().model_schema(schema)
        if "properties" in described or described.get("type") == "object":
            described.setdefault("additionalProperties", False)
        properties = _as_written(model, described.get("properties", {}))
        properties |= self._computed(schema)
        if properties:
            described["properties"] = properties
        if required := described.get("required"):
            described["required"] = _renamed(model, required)
        return described

    def _computed(self, schema: core_schema.ModelSchema) -> dict[str, JsonSchemaValue]:
        """Fields that are written although nobody gives them: readers find them, too."""
        inner: Any = schema["schema"]
        return {
            field.get("alias", field["property_name"]): {
                **self.generate_inner(field["return_schema"]),
                "readOnly": True,
            }
            for field in inner.get("computed_fields", ())
        }

    def encode_default(self, dft: Any) -> Any:
        """As JSON can express it: null where that is an infinity, as in what is recorded."""
        return from_json(to_json(super().encode_default(dft), inf_nan_mode="null"))

    def get_decimal_pattern(self, schema: core_schema.DecimalSchema) -> str | None:
        """Say that it is a number, and how long: nobody could tell it from a string else."""
        return self.build_decimal_pattern(schema)

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        described = super().dataclass_schema(schema)
        described.setdefault("additionalProperties", False)
        return described

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        described = super().typed_dict_schema(schema)
        described.setdefault("additionalProperties", False)
        return described


def _require_written(model: type[BaseModel]) -> None:
    for name, info in model.model_fields.items():
        if info.is_required() and (info.exclude or getattr(info, "exclude_if", None) is not None):
            raise RegistrationError(
                f"{model.__name__}.{name} is required and excluded from what is written, so nobody "
                "could read what is sent. Give it a default, or write it."
            )


def _as_written(model: type[BaseModel], properties: dict[str, Any]) -> dict[str, Any]:
    names = {_first_read(name, info): (name, info) for name, info in model.model_fields.items()}
    written: dict[str, Any] = {}
    for read_name, described in properties.items():
        if read_name not in names:
            written[read_name] = described
            continue
        name, info = names[read_name]
        written_name = _written_name(name, info)
        accepted = _names_read(model, name, info)
        if written_name not in accepted:
            read_as = " or ".join(map(repr, accepted)) or "a part of another field"
            raise RegistrationError(
                f"{model.__name__}.{name} is written as {written_name!r} and read as "
                f"{read_as}, so nobody could read what is sent. Add {written_name!r} to its "
                "validation_alias, or use one alias for both."
            )
        others = [other for other in accepted if other != written_name]
        written[written_name] = {**described, ALIASES: others} if others else described
    return written


def _renamed(model: type[BaseModel], required: list[str]) -> list[str]:
    names = {
        _first_read(name, info): _written_name(name, info)
        for name, info in model.model_fields.items()
    }
    return [names.get(name, name) for name in required]


def _written_name(name: str, info: FieldInfo) -> str:
    return info.serialization_alias or name


def _first_read(name: str, info: FieldInfo) -> str:
    """The name that pydantic's own JSON Schema gives to a field."""
    return _choices(info)[0] if _choices(info) else name


def _names_read(model: type[BaseModel], name: str, info: FieldInfo) -> list[str]:
    config = model.model_config
    choices = _choices(info) if config.get("validate_by_alias", True) else []
    by_name = config.get("populate_by_name") or config.get("validate_by_name")
    is_named = by_name or info.validation_alias is None
    return [*choices, name] if is_named and name not in choices else choices


def _choices(info: FieldInfo) -> list[str]:
    """The names of a field at its own place; those that dig deeper are nobody else's business."""
    alias = info.validation_alias
    if alias is None:
        return []
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
    paths = [choice.path if isinstance(choice, AliasPath) else [choice] for choice in choices]
    return [str(path[0]) for path in paths if len(path) == 1]
