"""What is known of streams and the events they carry: the source of documents and classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.core.schema.nodes import without_demands


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What one version of one event type promises."""

    event_type: str
    version: int
    json_schema: Mapping[str, Any]
    """Draft 2020-12, as written: it says what writers write."""
    key: str | None = None
    """The field whose value is the event's key."""
    upcasts_from: tuple[int, ...] = ()
    """Older versions that have a path to this one."""
    description: str = ""
    names_demands: bool = field(default=False, compare=False)
    """Whether the schema names all that readers demand; those of former releases do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEntry:
    """One stream: the contracts of its events, who sends them and who handles them."""

    name: str
    contracts: tuple[Contract, ...]
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Every stream that a document is about; each name once."""

    title: str
    version: str
    streams: tuple[StreamEntry, ...]


def comparable(one: Contract, other: Contract) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Both schemas, in the words that both have: nobody is blamed for what a release left out."""
    if one.names_demands and other.names_demands:
        return one.json_schema, other.json_schema
    return without_demands(one.json_schema), without_demands(other.json_schema)


def by_type_and_version(contracts: Iterable[Contract]) -> list[Contract]:
    """Contracts in the order of their types, and each type's versions from first to last."""
    return sorted(contracts, key=lambda contract: (contract.event_type, contract.version))
