"""The catalogue as an AsyncAPI 3.0.0 document."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Final

from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry, by_type_and_version
from penstock.core.schema.draft07 import Translation
from penstock.core.schema.examples import NOTHING, example_of
from penstock.core.schema.names import component_key
from penstock.core.schema.references import pointer_parts, resolve

_DEFINITIONS: Final = ("$defs", "definitions")
_METADATA: Final = "metadata"
_CORRELATION: Final = "correlation"


def asyncapi_document(catalogue: Catalogue) -> dict[str, Any]:
    """An AsyncAPI document that needs nothing else; the same for the same catalogue."""
    streams = sorted(catalogue.streams, key=lambda stream: stream.name)
    messages = _Messages()
    channels = {component_key(stream.name): _channel(stream, messages) for stream in streams}
    return {
        "asyncapi": "3.0.0",
        "info": {"title": catalogue.title, "version": catalogue.version},
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": dict(
            operation for stream in streams for operation in _operations(stream, messages)
        ),
        "components": {
            "messages": dict(sorted(messages.documents.items())),
            "schemas": {_METADATA: _metadata_schema(), **dict(sorted(messages.schemas.items()))},
            "correlationIds": {_CORRELATION: _correlation_id()},
        },
    }


# ── channels and operations ────────────────────────────────────────────────────────────────────


def _channel(stream: StreamEntry, messages: _Messages) -> dict[str, Any]:
    keys = [messages.key_of(contract) for contract in by_type_and_version(stream.contracts)]
    return {
        "address": stream.name,
        "messages": {key: {"$ref": f"#/components/messages/{key}"} for key in keys},
    }


def _operations(stream: StreamEntry, messages: _Messages) -> Iterable[tuple[str, dict[str, Any]]]:
    channel = f"#/channels/{component_key(stream.name)}"
    keys = [messages.key_of(contract) for contract in by_type_and_version(stream.contracts)]
    for action, role, names in (
        ("send", "producer", stream.producers),
        ("receive", "consumer", stream.consumers),
    ):
        for name in sorted(set(names)):
            yield (
                component_key(action, stream.name, name),
                {
                    "action": action,
                    "channel": {"$ref": channel},
                    "messages": [
                        {"$ref": f"{channel}/messages/{key}"} for key in dict.fromkeys(keys)
                    ],
                    f"x-penstock-{role}": name,
                },
            )


# ── messages ───────────────────────────────────────────────────────────────────────────────────


class _Messages:
    """The messages of the document: one for each contract, however many streams carry it."""

    def __init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.schemas: dict[str, Any] = {}
        self._contracts: dict[str, Contract] = {}

    def key_of(self, contract: Contract) -> str:
        """The message's key. Streams that disagree about a type and version have one each."""
        for number in count(1):
            parts = (contract.event_type, f"v{contract.version}", str(number))
            key = component_key(*(parts if number > 1 else parts[:2]))
            if key not in self._contracts:
                self._add(key, contract)
            if self._contracts[key] == contract:
                return key
        raise AssertionError

    def _add(self, key: str, contract: Contract) -> None:
        self._contracts[key] = contract
        schema = contract.json_schema
        names = _Names(key, schema)
        translation = Translation(names.new_reference)
        self.documents[key] = _message(contract, translation.of(_without_definitions(schema)))
        for group in _DEFINITIONS:
            for name, definition in schema.get(group, {}).items():
                self.schemas[names.key_of(group, name)] = translation.of(definition)


class _Names:
    """Where the parts of one contract's schema are found in the document."""

    def __init__(self, message_key: str, schema: Mapping[str, Any]) -> None:
        self.message_key = message_key
        self.schema = schema

    def key_of(self, group: str, name: str) -> str:
        """The key of a definition among the document's schemas."""
        # Both groups may hold a definition of this name; hardly ever is there more than one group.
        is_second = group != "$defs" and name in self.schema.get("$defs", {})
        return f"{self.message_key}--{component_key(name, *([group] if is_second else []))}"

    def new_reference(self, reference: str) -> str | None:
        """Where a reference of the schema leads in the document."""
        parts = pointer_parts(reference)
        if parts is None or resolve(self.schema, reference) is None:
            return None
        match parts:
            case [group, name, *rest] if group in _DEFINITIONS:
                base = f"#/components/schemas/{self.key_of(group, name)}"
            case rest:
                base = f"#/components/messages/{self.message_key}/payload"
        return base if not rest else None


def _without_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {keyword: value for keyword, value in schema.items() if keyword not in _DEFINITIONS}


def _message(contract: Contract, payload: Any) -> dict[str, Any]:
    schema = contract.json_schema
    message: dict[str, Any] = {
        "name": contract.event_type,
        "title": f"{contract.event_type} v{contract.version}",
        "headers": {"$ref": f"#/components/schemas/{_METADATA}"},
        "payload": payload,
        "correlationId": {"$ref": f"#/components/correlationIds/{_CORRELATION}"},
        "x-penstock-version": contract.version,
    }
    description = contract.description or schema.get("description")
    if isinstance(description, str) and description:
        message["description"] = description
    if contract.key is not None:
        message["x-penstock-key"] = contract.key
    if contract.upcasts_from:
        message["x-penstock-upcasts-from"] = sorted(contract.upcasts_from)
    example = example_of(schema)
    if example is not NOTHING and not _looks_like_a_reference(example):
        message["examples"] = [{"payload": example}]
    return message


def _looks_like_a_reference(example: Any) -> bool:
    """Whether a reader that resolves all references would take part of the example for one."""
    if isinstance(example, dict):
        return "$ref" in example or any(map(_looks_like_a_reference, example.values()))
    return isinstance(example, list) and any(map(_looks_like_a_reference, example))


def _metadata_schema() -> dict[str, Any]:
    return {
        "title": "Metadata",
        "description": "What an event carries besides its payload.",
        "type": "object",
        "properties": {
            "correlation_id": {"description": "Handed on from event to event, once it is given."},
            "causation_id": {
                "description": "The event that was being handled when this one was sent.",
                "type": "string",
                "format": "uuid",
            },
            "traceparent": {"description": "W3C Trace Context.", "type": "string"},
            "tracestate": {"description": "W3C Trace Context.", "type": "string"},
        },
    }


def _correlation_id() -> dict[str, Any]:
    return {
        "description": "Of the metadata, which are this message's headers.",
        "location": "$message.header#/correlation_id",
    }
