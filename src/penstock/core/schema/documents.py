"""A contract as one JSON document: its JSON Schema, and beside it what a schema cannot say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from penstock.core.schema.catalogue import Contract

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
MARK: Final = "x-penstock"
"""Type, version and key of the event, and the versions that it can be read from."""


def document_of(contract: Contract) -> dict[str, Any]:
    """The document of a contract."""
    mark: dict[str, Any] = {"type": contract.event_type, "version": contract.version}
    if contract.key is not None:
        mark["key"] = contract.key
    if contract.upcasts_from:
        mark["upcasts_from"] = list(contract.upcasts_from)
    if contract.names_demands:
        mark["names_demands"] = True
    return {"$schema": DIALECT, MARK: mark, **contract.json_schema}


def contract_in(document: Mapping[str, Any]) -> Contract:
    """The contract of a document. Raises ValueError where it is none."""
    try:
        mark = document[MARK]
        return Contract(
            event_type=str(mark["type"]),
            version=int(mark["version"]),
            key=mark.get("key"),
            upcasts_from=tuple(map(int, mark.get("upcasts_from", ()))),
            json_schema={
                name: part for name, part in document.items() if name not in ("$schema", MARK)
            },
            description=str(document.get("description", "")),
            names_demands=mark.get("names_demands") is True,
        )
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{MARK} is missing or incomplete ({type(error).__name__})") from None
