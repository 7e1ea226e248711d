"""The catalogue as Markdown pages: an index, and a page for each stream."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry, by_type_and_version
from penstock.core.schema.examples import NOTHING, example_of
from penstock.core.schema.fields import ROWS_MAX, Row, rows_of
from penstock.core.schema.markdown_text import code, json_block, paragraphs, table, text
from penstock.core.schema.names import page_name

INDEX = "index.md"


def render_pages(catalogue: Catalogue) -> dict[str, str]:
    """The pages by the names of their files; the same for the same catalogue."""
    streams = sorted(catalogue.streams, key=lambda stream: stream.name)
    pages = {INDEX: _page(_index(catalogue, streams))}
    return pages | {page_name(stream.name): _page(_stream(stream)) for stream in streams}


def _page(blocks: Iterable[list[str]]) -> str:
    return "\n\n".join("\n".join(map(str.rstrip, block)) for block in blocks if block) + "\n"


# ── the index ──────────────────────────────────────────────────────────────────────────────────


def _index(catalogue: Catalogue, streams: list[StreamEntry]) -> Iterable[list[str]]:
    yield [f"# {text(catalogue.title)}"]
    yield [f"Version {text(catalogue.version)}."]
    if not streams:
        yield ["There are no streams."]
        return
    header = ("Stream", "Event", "Current version", "Producers", "Consumers")
    yield table(header, (row for stream in streams for row in _index_rows(stream)))


def _index_rows(stream: StreamEntry) -> Iterable[tuple[str, ...]]:
    link = f"[{text(stream.name)}]({page_name(stream.name)})"
    people = (_names(stream.producers), _names(stream.consumers))
    if not stream.contracts:
        yield (link, "", "", *people)
    for event_type, versions in _types(stream):
        yield (link, code(event_type), str(versions[-1].version), *people)


# ── a stream's page ────────────────────────────────────────────────────────────────────────────


def _stream(stream: StreamEntry) -> Iterable[list[str]]:
    types = _types(stream)
    yield [f"# Stream {text(stream.name)}"]
    yield [
        f"- Events: {_names(event_type for event_type, _ in types) or 'none is known'}",
        f"- Producers: {_names(stream.producers) or 'none is known'}",
        f"- Consumers: {_names(stream.consumers) or 'none is known'}",
    ]
    for event_type, versions in types:
        yield [f"## {text(event_type)}"]
        for contract in reversed(versions):
            yield from _version(contract, is_current=contract is versions[-1])


def _version(contract: Contract, *, is_current: bool) -> Iterable[list[str]]:
    yield [f"### Version {contract.version}{' (current)' if is_current else ''}"]
    description = contract.description or contract.json_schema.get("description")
    for paragraph in paragraphs(description if isinstance(description, str) else ""):
        yield [paragraph]
    yield [
        f"- Type: {code(contract.event_type)}",
        f"- Key: {'none' if contract.key is None else code(contract.key)}",
        *_upcasts(contract),
    ]
    yield from _fields(rows_of(contract.json_schema))
    example = example_of(contract.json_schema)
    if example is not NOTHING:
        yield ["An example:"]
        yield json_block(example)


def _upcasts(contract: Contract) -> list[str]:
    older = [str(version) for version in sorted(set(contract.upcasts_from))]
    if not older:
        return []
    noun = "Version" if len(older) == 1 else "Versions"
    return [f"- Older events: {noun} {_and(older)} can be read as version {contract.version}."]


def _fields(rows: list[Row]) -> Iterable[list[str]]:
    if not rows:
        yield ["It has no fields."]
        return
    header = ("Field", "Type", "Required", "Constraints", "Description")
    yield table(
        header,
        (
            (
                row.path,
                row.type_words,
                "yes" if row.is_required else "no",
                row.constraints,
                row.description,
            )
            for row in rows
        ),
    )
    if len(rows) == ROWS_MAX:
        yield [f"Only the first {ROWS_MAX} fields are shown."]


def _types(stream: StreamEntry) -> list[tuple[str, list[Contract]]]:
    """The types that a stream carries, each with its versions, oldest first."""
    contracts = by_type_and_version(stream.contracts)
    grouped = groupby(contracts, key=lambda contract: contract.event_type)
    return [(event_type, list(versions)) for event_type, versions in grouped]


def _names(names: Iterable[str]) -> str:
    return ", ".join(code(name) for name in sorted(set(names)))


def _and(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
