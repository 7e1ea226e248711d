"""The catalogue as an AsyncAPI document, and the names in documents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator, Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT7

from penstock.core.schema.asyncapi import asyncapi_document
from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry
from penstock.core.schema.draft07 import Translation
from penstock.core.schema.markdown import render_pages
from penstock.core.schema.names import component_key, page_name
from tests.documented import SHIPPED, WEIRD_TYPE, rich_catalogue

OFFICIAL_SCHEMA = "PENSTOCK_ASYNCAPI_SCHEMA"
KEY = re.compile(r"[a-zA-Z0-9.\-_]+")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return asyncapi_document(rich_catalogue())


def validator_for(document: dict[str, Any], pointer: str) -> Draft7Validator:
    """Validates with one schema of the document, which may refer to all the others."""
    registry = Registry().with_resource("urn:document", DRAFT7.create_resource(document))
    return Draft7Validator({"$ref": f"urn:document#{pointer}"}, registry=registry)


def references_in(anything: Any) -> Iterator[str]:
    if isinstance(anything, dict):
        if isinstance(anything.get("$ref"), str):
            yield anything["$ref"]
        for part in anything.values():
            yield from references_in(part)
    if isinstance(anything, list):
        for part in anything:
            yield from references_in(part)


def found_at(document: dict[str, Any], reference: str) -> Any:
    assert reference.startswith("#/")
    found: Any = document
    for part in reference[2:].split("/"):
        found = found[part.replace("~1", "/").replace("~0", "~")]
    return found


# ── AsyncAPI ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(
    OFFICIAL_SCHEMA not in os.environ,
    reason=f"{OFFICIAL_SCHEMA} does not name the official schema; it is schemas/3.0.0.json "
    "in the npm package @asyncapi/specs",
)
def test_the_document_is_valid_by_the_official_schema(document: dict[str, Any]) -> None:
    official = json.loads(Path(os.environ[OFFICIAL_SCHEMA]).read_text(encoding="utf-8"))
    assert official["properties"]["asyncapi"]["const"] == "3.0.0"
    validator = Draft7Validator(official)
    assert [error.message for error in validator.iter_errors(document)] == []
    # The schema does look into channels, messages and payloads.
    for pointer in ("channels/orders/address", "components/messages/Shipped--v1/payload/type"):
        broken = deepcopy(document)
        *parents, last = pointer.split("/")
        found_at(broken, "#/" + "/".join(parents))[last] = 42
        assert not validator.is_valid(broken), pointer


def test_the_document_is_the_same_whatever_the_order_of_the_catalogue(
    document: dict[str, Any],
) -> None:
    catalogue = rich_catalogue()
    turned = Catalogue(
        title=catalogue.title,
        version=catalogue.version,
        streams=tuple(
            StreamEntry(
                name=stream.name,
                contracts=stream.contracts[::-1],
                producers=stream.producers[::-1],
                consumers=stream.consumers[::-1],
            )
            for stream in catalogue.streams[::-1]
        ),
    )
    assert json.dumps(asyncapi_document(turned)) == json.dumps(document)
    assert render_pages(turned) == render_pages(catalogue)


def test_the_document_is_json(document: dict[str, Any]) -> None:
    assert json.loads(json.dumps(document, allow_nan=False)) == document


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = list(references_in(document))
    assert len(references) > 30
    for reference in references:
        found_at(document, reference)


def test_keys_are_those_that_asyncapi_allows(document: dict[str, Any]) -> None:
    keyed = [document["channels"], document["operations"], *document["components"].values()]
    for key in (key for group in keyed for key in group):
        assert KEY.fullmatch(key), key


def test_payloads_are_draft_07(document: dict[str, Any]) -> None:
    for message in document["components"]["messages"].values():
        Draft7Validator.check_schema(message["payload"])
    for schema in document["components"]["schemas"].values():
        Draft7Validator.check_schema(schema)
        assert "discriminator" not in json.dumps(schema)


def test_messages_have_examples_that_their_payloads_accept(document: dict[str, Any]) -> None:
    messages = document["components"]["messages"]
    assert len(messages) == 5
    for key, message in messages.items():
        if message["name"] == WEIRD_TYPE:
            # Its example has a field "$ref", which tools would follow.
            assert "examples" not in message
            continue
        (example,) = message["examples"]
        validator_for(document, f"/components/messages/{key}/payload").validate(example["payload"])


def test_a_stream_is_a_channel_with_the_messages_of_its_events(document: dict[str, Any]) -> None:
    assert document["channels"]["orders"] == {
        "address": "orders",
        "messages": {
            key: {"$ref": f"#/components/messages/{key}"}
            for key in ("Shipped--v1", "orders.placed--v1", "orders.placed--v2")
        },
    }
    addresses = sorted(channel["address"] for channel in document["channels"].values())
    assert addresses == ["empty", "orders", "orders/EU:1..2", "orders_x2f_EU"]


def test_who_sends_and_who_handles_are_operations(document: dict[str, Any]) -> None:
    operations = document["operations"]
    assert [key for key in operations if "--orders--" in key] == [
        "send--orders--shop",
        "receive--orders--billing.invoices",
        "receive--orders--mail",
    ]
    sending = operations["send--orders--shop"]
    assert (sending["action"], sending["x-penstock-producer"]) == ("send", "shop")
    assert sending["channel"] == {"$ref": "#/channels/orders"}
    # The specification wants the messages of the channel, not those that they refer to.
    assert {"$ref": "#/channels/orders/messages/orders.placed--v2"} in sending["messages"]
    receiving = operations["receive--orders--mail"]
    assert (receiving["action"], receiving["x-penstock-consumer"]) == ("receive", "mail")


def test_a_message_tells_version_key_and_what_it_reads(document: dict[str, Any]) -> None:
    message = document["components"]["messages"]["orders.placed--v2"]
    assert message["name"] == "orders.placed"
    assert message["title"] == "orders.placed v2"
    assert message["x-penstock-version"] == 2
    assert message["x-penstock-key"] == "order_id"
    assert message["x-penstock-upcasts-from"] == [1]
    assert message["correlationId"] == {"$ref": "#/components/correlationIds/correlation"}
    older = document["components"]["messages"]["orders.placed--v1"]
    assert "x-penstock-upcasts-from" not in older


def test_a_contract_on_two_streams_is_one_message(document: dict[str, Any]) -> None:
    for channel in ("orders", component_key("orders/EU:1..2")):
        assert "Shipped--v1" in document["channels"][channel]["messages"]


def test_streams_that_disagree_about_a_version_have_a_message_each() -> None:
    other = Contract(event_type="Shipped", version=1, json_schema={"type": "object"})
    streams = (
        StreamEntry(name="a", contracts=(SHIPPED,)),
        StreamEntry(name="b", contracts=(other,)),
    )
    document = asyncapi_document(Catalogue(title="t", version="1", streams=streams))
    assert set(document["components"]["messages"]) == {"Shipped--v1", "Shipped--v1--2"}
    assert set(document["channels"]["b"]["messages"]) == {"Shipped--v1--2"}


def test_a_reference_that_leads_nowhere_is_told_and_not_kept() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "https://example.com/x.json"}}}
    contract = Contract(event_type="x", version=1, json_schema=schema)
    streams = (StreamEntry(name="s", contracts=(contract,)),)
    document = asyncapi_document(Catalogue(title="t", version="1", streams=streams))
    payload = document["components"]["messages"]["x--v1"]["payload"]
    assert payload["properties"]["a"] == {"x-penstock-unresolved": "https://example.com/x.json"}


TRANSLATED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        [[1, "a"], [1], []],
        [["a"], [1, "a", 2]],
    ),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}}, [[1, "a"]], [[1, 2]]),
    ({"items": {"minimum": 3}}, [[3]], [[2]]),
    (
        {"$ref": "#/$defs/A", "maximum": 5, "$defs": {"A": {"minimum": 3}}},
        [4],
        [2, 6],
    ),
    (
        {
            "dependentRequired": {"a": ["b"]},
            "dependentSchemas": {"a": {"required": ["c"]}, "d": {"maxProperties": 1}},
        },
        [{"a": 1, "b": 1, "c": 1}, {"d": 1}, {}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}, {"d": 1, "e": 1}],
    ),
    ({"contains": {"const": 1}}, [[1]], [[2]]),
    ({"contains": {"const": 1}, "minContains": 0}, [[1], [2]], []),
    ({"properties": {"$ref": {"type": "integer"}}}, [{"$ref": 1}], [{"$ref": "a"}]),
    ({"enum": [{"$ref": "#/nowhere"}]}, [{"$ref": "#/nowhere"}], [{}]),
    ({"schema": {"type": "integer"}, "type": "string"}, ["a"], [1]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), TRANSLATED)
def test_draft_07_says_the_same(schema: dict[str, Any], right: list[Any], wrong: list[Any]) -> None:
    translated = Translation(lambda reference: reference.replace("$defs", "definitions")).of(schema)
    assert isinstance(translated, dict)
    definitions = Translation(str).of({"properties": schema.get("$defs", {})})
    assert isinstance(definitions, dict)
    whole = {"definitions": definitions["properties"], "allOf": [translated]}
    for values, is_right in ((right, True), (wrong, False)):
        for value in values:
            assert Draft202012Validator(schema).is_valid(value) is is_right, value
            assert Draft7Validator(whole).is_valid(value) is is_right, value
    assert "schema" not in translated


# ── names ──────────────────────────────────────────────────────────────────────────────────────

PARTS = st.lists(st.text(alphabet="ab_x2f-./Ω-_", max_size=8), min_size=1, max_size=3)


@given(one=PARTS, other=PARTS)
def test_different_parts_have_different_keys(one: list[str], other: list[str]) -> None:
    assert (component_key(*one) == component_key(*other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a/b"], ["a_x2f_b"]),
        (["a--b"], ["a", "b"]),
        (["a-", "b"], ["a", "-b"]),
        (["_x"], ["_x5f_x"]),
        (["a", ""], ["a"]),
    ],
)
def test_keys_that_might_be_mistaken_are_different(one: list[str], other: list[str]) -> None:
    assert component_key(*one) != component_key(*other)


@given(one=st.text(max_size=40), other=st.text(max_size=40))
def test_pages_have_files_of_their_own(one: str, other: str) -> None:
    names = {page_name(name) for name in (one, other)}
    assert len({name.casefold() for name in names}) == len({one, other})
    for name in names:
        assert re.fullmatch(r"[a-z0-9._-]{1,255}", name)
        assert ".." not in name
        assert name != "index.md"


@pytest.mark.parametrize(
    ("stream", "file"),
    [
        ("orders", "stream-orders.md"),
        ("orders.eu-1", "stream-orders.eu-1.md"),
        ("../etc", "stream-_x2e__x2e__x2f_etc.md"),
        ("Orders", "stream-_x4f_rders.md"),
        ("index", "stream-index.md"),
    ],
)
def test_the_file_of_a_page(stream: str, file: str) -> None:
    assert page_name(stream) == file


def test_long_names_have_short_files() -> None:
    assert page_name("A" * 200) != page_name("A" * 199 + "B")
    assert len(page_name("A" * 200)) < 255
