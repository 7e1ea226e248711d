"""Numbers, strings, formats and demands: what a writer may write and a reader refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from penstock.core.schema.breaks import Break, Cause
from penstock.core.schema.facts import Bound, NumberFacts, StringFacts, stated
from penstock.core.schema.nodes import DEMANDS, WRITTEN_AS_NUMBER
from penstock.core.schema.place import Place
from penstock.core.schema.shapes import Shape
from penstock.core.schema.values import FREE_FORMATS, counted_in, exact, kinds_of_type

_NO_LIMIT: Final = "no limit"
_EVERY_STRING: Final = frozenset({"", "^", ".*", "^.*", "(.*)"})
_UUIDS: Final = [f"uuid{version}" for version in range(1, 9)]
# Only where every reader agrees: a date is a date-time to some, and to others it is none.
_WIDER_FORMATS: Final[dict[str, str]] = {
    **dict.fromkeys(_UUIDS, "uuid"),
    "ipv4": "ipvanyaddress",
    "ipv6": "ipvanyaddress",
}


def number_breaks(shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
    """Numbers outside the reader's range, between its steps, or written like a fraction."""
    if _is_integer(node) and _is_whole_by_chance(shape):
        yield at.breaks(
            Cause.TYPE_NARROWED,
            "number",
            "integer",
            "whole numbers can be written as 1.0 or 1e+19, which a reader of integers may refuse",
        )
    facts = NumberFacts.of(shape.parts, shape.kind, shape.values)
    for keyword, is_open in (("minimum", False), ("exclusiveMinimum", True)):
        if keyword in node and not _is_above(facts.low, (exact(node[keyword]), is_open)):
            yield at.breaks(
                Cause.MINIMUM_RAISED,
                _bound_words(facts.low, "≥", ">"),
                _bound_words((exact(node[keyword]), is_open), "≥", ">"),
                "smaller numbers can be written than the reader takes",
            )
    for keyword, is_open in (("maximum", False), ("exclusiveMaximum", True)):
        if keyword in node and not _is_below(facts.high, (exact(node[keyword]), is_open)):
            yield at.breaks(
                Cause.MAXIMUM_LOWERED,
                _bound_words(facts.high, "≤", "<"),
                _bound_words((exact(node[keyword]), is_open), "≤", "<"),
                "greater numbers can be written than the reader takes",
            )
    if "multipleOf" in node and not _steps_fit(facts, node["multipleOf"]):
        yield at.breaks(
            Cause.MULTIPLE_NARROWED,
            "any number" if facts.step is None else f"a multiple of {facts.step}",
            f"a multiple of {node['multipleOf']}",
            f"numbers can be written that are no multiples of {node['multipleOf']}",
        )


def _is_integer(part: dict[str, Any]) -> bool:
    return "type" in part and "fraction" not in kinds_of_type(part["type"])


def _is_whole_by_chance(shape: Shape) -> bool:
    """Whether only a step keeps fractions out, so that numbers are not written as integers."""
    is_said = shape.values is not None or any(map(_is_integer, shape.parts))
    return not is_said and NumberFacts.of(shape.parts, "fraction", None).is_impossible


def _is_above(low: Bound | None, limit: Bound) -> bool:
    return low is not None and (low[0] > limit[0] or (low[0] == limit[0] and low[1] >= limit[1]))


def _is_below(high: Bound | None, limit: Bound) -> bool:
    return high is not None and (
        high[0] < limit[0] or (high[0] == limit[0] and high[1] >= limit[1])
    )


def _bound_words(bound: Bound | None, sign: str, open_sign: str) -> str:
    if bound is None:
        return _NO_LIMIT
    limit, is_open = bound
    shown = limit.numerator if limit.denominator == 1 else float(limit)
    return f"{open_sign if is_open else sign} {shown}"


def _steps_fit(facts: NumberFacts, step: float) -> bool:
    return facts.step is not None and (facts.step / exact(step)).denominator == 1


def string_breaks(shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
    """Strings of a length the reader refuses, or that may not match its pattern."""
    facts = StringFacts.of(shape.parts, shape.values, counted_in(node))
    if facts.shortest < node.get("minLength", 0):
        yield at.breaks(
            Cause.MIN_LENGTH_RAISED,
            f"at least {facts.shortest} long",
            f"at least {node['minLength']} long",
            "shorter strings can be written than the reader takes",
        )
    if "maxLength" in node and (facts.longest is None or facts.longest > node["maxLength"]):
        yield at.breaks(
            Cause.MAX_LENGTH_LOWERED,
            _NO_LIMIT if facts.longest is None else f"at most {facts.longest} long",
            f"at most {node['maxLength']} long",
            "longer strings can be written than the reader takes",
        )
    patterns = stated(shape.parts, "pattern")
    if "pattern" in node and node["pattern"] not in {*patterns, *_EVERY_STRING}:
        yield at.breaks(
            Cause.PATTERN_TIGHTENED,
            f"matching {' and '.join(patterns)}" if patterns else "no pattern",
            f"matching {node['pattern']}",
            "strings can be written that may not match the reader's pattern",
        )


def format_breaks(shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
    """Values that may not have the reader's format."""
    wanted = node["format"]
    formats = stated(shape.parts, "format")
    if (shape.kind == "string" and wanted in FREE_FORMATS) or wanted in {
        *formats,
        *(_WIDER_FORMATS.get(name) for name in formats),
    }:
        return
    if shape.kind == "string" or "type" in node:
        yield at.breaks(
            Cause.FORMAT_TIGHTENED,
            " and ".join(formats) or "no format",
            wanted,
            f"values can be written that may not be a valid {wanted}",
        )


def demand_breaks(shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
    """Values that may not be what the reader demands besides."""
    known = {demand for demands in stated(shape.parts, DEMANDS) for demand in demands}
    wanted = node.get(DEMANDS, ())
    if WRITTEN_AS_NUMBER in known and "type" in node and WRITTEN_AS_NUMBER not in wanted:
        yield at.breaks(
            Cause.TYPE_CHANGED,
            WRITTEN_AS_NUMBER,
            "a text",
            "a time is written as a number, and the reader takes a text",
        )
    for demand in wanted:
        if demand not in known:
            yield at.breaks(
                Cause.FORMAT_TIGHTENED,
                ", ".join(sorted(known)) or "no demand",
                demand,
                f"values can be written that are not {demand}, which the reader demands",
            )
