"""The lines of an archived object: valid JSON, and byte for byte the body that they came from."""

from __future__ import annotations

import json
from typing import Any

import orjson
import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.archive import (
    ArchivedObject,
    folder_of,
    manifest_json,
    object_name,
    parse_manifest,
    range_of,
)
from penstock.core.archive_lines import body_of_line, line_of, position_of
from penstock.core.wire import sent_us_of
from penstock.errors import ArchiveDamaged
from tests.publishing import insert

# What would lead a reader astray that looked for names in the wrong place.
TRAPS = [',"key":', ',"metadata":', ',"payload":', '"', "\\", '\\"', '{"position":1,', "\n", "}"]
texts = st.lists(st.one_of(st.sampled_from(TRAPS), st.text(max_size=4)), max_size=5).map("".join)
numbers = st.one_of(
    st.integers(),
    st.decimals(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:f}"),
)
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
key_ids = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=12)


def printed(value: Any) -> str:
    """As PostgreSQL prints a jsonb: a space behind every comma and colon."""
    return json.dumps(value, ensure_ascii=False)


def body(event_type: str, key_id: str, key: str | None, metadata: Any, payload: str) -> str:
    fields = ["event", "0cad6cb1-3b3e-4026-9267-af9b06ad2fb8", "3", "41"]
    fields += ["01a1de94-ace6-77df-9c92-ee6cc16573e2", event_type, "2", key_id, "1794735647975097"]
    return "\n".join([*fields, printed(key), printed(metadata), payload])


@given(names, key_ids, st.none() | texts, st.dictionaries(texts, plain), plain)
def test_a_line_gives_back_the_body_that_it_was_made_from(
    event_type: str, key_id: str, key: str | None, metadata: dict[str, Any], payload: Any
) -> None:
    made = body(event_type, key_id, key, metadata, printed(payload))
    line = line_of(7, made)
    assert body_of_line(line) == made
    assert "\n" not in line
    assert position_of(line.encode()) == 7
    assert orjson.loads(line)["position"] == 7
    read = json.loads(line)
    assert (read["event_type"], read["key_id"], read["key"]) == (event_type, key_id, key)
    assert read["metadata"] == json.loads(printed(metadata))


@given(numbers)
def test_a_number_passes_through_nothing_that_rounds_it(number: object) -> None:
    made = body("T", "", None, {}, f'{{"n": {number}}}')
    assert body_of_line(line_of(1, made)) == made


def test_what_postgresql_prints_comes_back_from_a_line(database_url: str) -> None:
    payload = {"big": 12345678901234567890123, "payload": [',"payload":', "\\", '"}', "é\u2028"]}
    with psycopg.connect(database_url, autocommit=True) as connection:
        for trap in [*TRAPS, "é\u2028", ""]:
            insert(
                connection, "s", key=trap, metadata={trap: trap}, payload={**payload, trap: 1.10}
            )
        rows = connection.execute(
            "SELECT row_number() OVER (), events.entry(o, gen_random_uuid()) FROM ("
            "SELECT id, event_uuid, stream_name, event_type, version, key, key_id, payload,"
            " metadata, created_at, 1::bigint AS position, 1::bigint AS term, published_at"
            " FROM events.outbox_event) AS x, LATERAL (SELECT (x.*)::events.outbox_event AS o) AS y"
        ).fetchall()
    assert len(rows) == len(TRAPS) + 2
    for position, printed_body in rows:
        line = line_of(position, printed_body)
        assert body_of_line(line) == printed_body
        assert orjson.loads(line)["position"] == position
        assert sent_us_of(printed_body) > 0


def test_a_hole_comes_back_too() -> None:
    hole = "hole\n0cad6cb1-3b3e-4026-9267-af9b06ad2fb8\n11\n20"
    line = line_of(20, hole)
    assert body_of_line(line) == hole
    assert position_of(line.encode()) == 20
    assert orjson.loads(line)["hole"] == [11, 20]


@pytest.mark.parametrize("line", ["", "{}", "[]", "null", '{"position":1}', '{"position":1,"key":'])
def test_what_is_no_line_is_said_to_be_damaged(line: str) -> None:
    with pytest.raises(ArchiveDamaged):
        body_of_line(line)


# ── names and manifests ────────────────────────────────────────────────────────────────────────


def test_names_sort_as_their_ranges_do_and_streams_do_not_lie_within_each_other() -> None:
    assert object_name("s", 9, 10) < object_name("s", 10, 99) < object_name("s", 10**18, 10**18)
    assert range_of("s", object_name("s", 9, 10)) == (9, 10)
    assert range_of("s", object_name("s/x", 9, 10)) is None
    assert range_of("s", f"s/superseded/{object_name('s', 9, 10)[2:]}") is None
    assert "/" not in folder_of("a/../b")


OBJECT = ArchivedObject(
    stream_name="s",
    first=1,
    last=10,
    events=9,
    raw_bytes=100,
    content_sha256="aa",
    newest_us=5,
    stored_bytes=50,
    sha256="bb",
)


def test_a_manifest_says_again_what_it_was_told() -> None:
    assert parse_manifest("s", manifest_json("s", [OBJECT])) == [OBJECT]


@given(st.binary() | plain.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_manifest_is_said_to_be_damaged(raw: bytes) -> None:
    with pytest.raises(ArchiveDamaged):
        parse_manifest("s", raw)
