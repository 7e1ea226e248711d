"""The catalogue as Markdown pages."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry
from penstock.core.schema.fields import ROWS_MAX, rows_of
from penstock.core.schema.markdown import render_pages
from penstock.core.schema.markdown_text import code, paragraphs, table, text
from penstock.core.schema.names import page_name
from tests.documented import HOSTILE, WEIRD_TYPE, rich_catalogue


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return render_pages(rich_catalogue())


def rendered(markdown: str) -> str:
    """HTML as a reader that follows every rule would see it."""
    reader = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    return str(reader.render(markdown))


def row_of(page: str, field: str) -> list[str]:
    line = next(line for line in page.splitlines() if line.startswith(f"| `{field}` |"))
    return [cell.strip() for cell in line.strip("|").split(" | ")]


def field_row(schema: dict[str, Any]) -> tuple[str, str]:
    row = rows_of({"properties": {"f": schema}})[0]
    return row.type_words, row.constraints


def test_the_index_lists_streams_with_their_events(pages: dict[str, str]) -> None:
    index = pages["index.md"]
    assert index.startswith("# Shop &lt;b&gt;&amp; more&lt;/b&gt;\n\nVersion 2024.1.\n\n| Stream |")
    assert (
        "| [orders](stream-orders.md) | `orders.placed` | 2 | `shop` | `billing.invoices`, `mail` |"
        in index.splitlines()
    )
    assert "| [empty](stream-empty.md) | - | - | - | - |" in index.splitlines()
    assert index.count("\n| [") == 6


def test_every_stream_has_a_page_that_the_index_links(pages: dict[str, str]) -> None:
    linked = set(re.findall(r'<a href="([^"]+)"', rendered(pages["index.md"])))
    assert linked == set(pages) - {"index.md"}
    assert len(linked) == 4


def test_pages_end_with_a_newline_and_lines_without_spaces(pages: dict[str, str]) -> None:
    nothing = render_pages(Catalogue(title="", version="", streams=()))
    assert "There are no streams." in nothing["index.md"]
    for page in (*pages.values(), *nothing.values()):
        assert page.endswith("\n")
        assert not page.endswith("\n\n")
        assert not re.search(r"[ \t]$", page, re.MULTILINE)


def test_a_stream_says_who_sends_and_who_handles(pages: dict[str, str]) -> None:
    lines = pages["stream-orders.md"].splitlines()
    assert lines[0] == "# Stream orders"
    assert "- Events: `Shipped`, `orders.placed`" in lines
    assert "- Producers: `shop`" in lines
    assert "- Consumers: `billing.invoices`, `mail`" in lines
    assert "- Producers: none is known" in pages["stream-empty.md"]


def test_an_event_shows_its_versions_the_current_one_first(pages: dict[str, str]) -> None:
    lines = pages["stream-orders.md"].splitlines()
    headings = [line for line in lines if line.startswith("##")]
    assert headings == [
        *("## Shipped", "### Version 1 (current)"),
        *("## orders.placed", "### Version 2 (current)", "### Version 1"),
    ]
    assert "A customer has placed an order." in lines
    assert "- Key: `order_id`" in lines
    assert "- Older events: Version 1 can be read as version 2." in lines


FIELDS: list[tuple[Any, ...]] = [
    ("order_id", "UUID", "yes", "-", "-"),
    ("due", "date or null", "no", "default `null`", "-"),
    ("lines", "list: object `Line`", "yes", "at least 1 long; at most 50 long", "-"),
    ("lines[].sku", "text", "yes", r"matches `^[A-Z]{3}-\d+$`", "What is sold"),
    ("lines[].price", "object `Money`", "yes", "-", "Price of one, before tax"),
    (
        "lines[].price.cents",
        "whole number",
        "yes",
        "≥ 0; ≤ 1000000000; a multiple of 5",
        "-",
    ),
    (
        "lines[].options",
        "mapping of text to object `Money` or text",
        "no",
        "default `{}`",
        "-",
    ),
    ("lines[].options.* (Money).cents", "whole number", "yes", ..., "-"),
    ("lines[].categories[].parent", "object `Category` or null", "no", "default `null`", "-"),
    (
        "payment",
        "object `Card` or object `Transfer`, told apart by `kind`",
        "yes",
        "-",
        "-",
    ),
    ("payment (Card).kind", 'always `"card"`', "yes", "-", "-"),
    ("payment (Transfer).iban", "text", "yes", "at least 15 long; at most 34 long", "-"),
    ("origin", 'list of exactly: number, number, one of `"N"`, `"S"`', "yes", "-", "-"),
    ("tags", "list of different values: text", "no", "at most 9 long", "-"),
    ("remark", "text or whole number or null", "no", "default `null`", "-"),
    ("extra", "anything", "no", "default `null`", "-"),
]


@pytest.mark.parametrize(("field", "cells"), [(field, cells) for field, *cells in FIELDS])
def test_fields_are_told_in_plain_words(
    pages: dict[str, str], field: str, cells: list[Any]
) -> None:
    row = row_of(pages["stream-orders.md"], field)[1:]
    assert row == [shown if cell is ... else cell for cell, shown in zip(cells, row, strict=True)]


@pytest.mark.parametrize(
    ("schema", "type_words", "constraints"),
    [
        (True, "anything", ""),
        (False, "never there", ""),
        ({}, "anything", ""),
        ({"type": ["string", "null"]}, "text or null", ""),
        ({"type": "string", "format": "x<y"}, "text (x&lt;y)", ""),
        ({"exclusiveMinimum": 0, "type": "number"}, "number", "&gt; 0"),
        ({"type": "array", "items": {"minLength": 2}}, "list: anything", "each at least 2 long"),
        (
            {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
            "mapping of text to whole number",
            "each name matches `^a`",
        ),
        (
            {"anyOf": [{"type": "string", "minLength": 1}, {"type": "integer", "minimum": 2}]},
            "text or whole number",
            "text: at least 1 long; whole number: ≥ 2",
        ),
        (
            {"x-penstock-aliases": ["old"], "deprecated": True},
            "anything",
            "also read as `old`; deprecated",
        ),
        (
            {"type": "string", "format": "date-time", "x-penstock-demands": ["in the past"]},
            "date and time",
            "in the past",
        ),
        (
            {"additionalProperties": {}, "type": "object", "x-penstock-keys": {"type": "integer"}},
            "mapping of whole number to anything",
            "",
        ),
        (
            {"enum": list(range(25))},
            "one of `0`, " + ", ".join(f"`{n}`" for n in range(1, 20)) + " and 5 more",
            "",
        ),
        ({"$ref": "#/nowhere"}, "anything", ""),
    ],
)
def test_schemas_in_words(schema: Any, type_words: str, constraints: str) -> None:
    assert field_row(schema) == (type_words, constraints)


def test_a_table_of_a_wide_schema_ends_and_says_so() -> None:
    # Ten kinds of objects that all hold each other: more ways through than anybody can list.
    names = [f"A{n}" for n in range(10)]
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in names}
    definitions = {name: {"type": "object", "properties": properties} for name in names}
    schema = {"properties": properties, "$defs": definitions}
    contract = Contract(event_type="wide", version=1, json_schema=schema)
    stream = StreamEntry(name="s", contracts=(contract,))
    page = render_pages(Catalogue(title="t", version="1", streams=(stream,)))["stream-s.md"]
    assert f"Only the first {ROWS_MAX} fields are shown." in page


def test_an_example_is_shown_as_json(pages: dict[str, str]) -> None:
    page = pages["stream-orders.md"]
    assert 'An example:\n\n```json\n{\n  "parcel": 1\n}\n```\n' in page
    assert page.count("```json") == 3


# ── hostile texts ──────────────────────────────────────────────────────────────────────────────


def test_hostile_names_and_descriptions_are_only_shown(pages: dict[str, str]) -> None:
    page = rendered(pages[page_name("orders_x2f_EU")])
    for tag in ("<script", "<img", "<i>", "<a ", "<b>", "<hr", "<ol", "<em", "<strong"):
        assert tag not in page, tag
    assert page.count("<h1>") == 1
    assert page.count("<h2>") == 1
    assert page.count("<table>") == 1
    assert page.count("<tr>") == 4
    assert page.count("<td>") == 5 * 3
    assert f"<h2>{WEIRD_TYPE.replace('<', '&lt;').replace('>', '&gt;')}</h2>" in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; [click](http://evil.example)" in page


HOSTILE_TEXTS = st.text(alphabet="ab1 |`\\<>[]()!*_#&;:/~-+=.\n\t$\u202e\u2028\x00@w", max_size=25)


@given(words=HOSTILE_TEXTS)
def test_text_is_shown_as_it_is(words: str) -> None:
    for inline in (text(words), code(words)):
        row = rendered("\n".join(table(("h", "i"), [(inline, "second")])))
        assert row.count("<td>") == 2
        assert "<td>second</td>" in row
        shown = re.sub(r"</?code>", "", row.split("<td>")[1].partition("</td>")[0])
        assert "<" not in shown
        assert _letters(
            shown.replace("&lt;", "<")
            .replace("&gt;", ">")
            .replace("&quot;", '"')
            .replace("&amp;", "&")
        ) in {_letters(words), "-"}


def _letters(words: str) -> str:
    return re.sub(r"[\s\u202e\u2028\x00\ufffd]", "", words)


@given(words=HOSTILE_TEXTS)
def test_paragraphs_are_only_paragraphs(words: str) -> None:
    html = rendered("\n\n".join(paragraphs(words)))
    assert re.fullmatch(r"(<p>[^<]*</p>\n)*", html), html
    assert html.count("<p>") == len(paragraphs(words))


def test_what_cannot_be_seen_is_made_visible() -> None:
    assert code("a\u202eb") == "`a\ufffdb`"
    stream = StreamEntry(
        name="s",
        contracts=(Contract(event_type="e", version=1, json_schema={"const": "\u202e\x7f```"}),),
    )
    page = render_pages(Catalogue(title="", version="", streams=(stream,)))["stream-s.md"]
    assert '"\\u202e\\u007f```"' in page


def test_hostile_strings_are_in_the_catalogue_that_is_tested() -> None:
    assert "<script>" in HOSTILE
    assert "|" in WEIRD_TYPE
