"""Lists and tuples: what a writer may write and a reader refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.core.schema.breaks import Break, Cause, not_provable
from penstock.core.schema.facts import ArrayFacts, stated
from penstock.core.schema.nodes import DEMANDS, STAYS_DISTINCT, node_text
from penstock.core.schema.place import Comparing, Place
from penstock.core.schema.shapes import Shape


def array_breaks(
    comparison: Comparing, shape: Shape, node: dict[str, Any], at: Place
) -> Iterator[Break]:
    """Lists with too few, too many or repeated members, or with members the reader refuses."""
    facts = ArrayFacts.of(shape.parts, comparison.shapes.is_empty)
    most = _most(node)
    yield from _count_breaks(facts, node, most, at)
    if node.get("uniqueItems") and not _all_differ(shape, facts):
        yield at.breaks(
            Cause.UNIQUE_ADDED,
            "members may repeat",
            "all members differ",
            "the same member can be written twice, which the reader refuses",
        )
    if STAYS_DISTINCT in node.get(DEMANDS, ()) and not _has_such_members(shape, node):
        yield not_provable(at.path, DEMANDS)
    yield from _member_breaks(comparison, facts, node, _least(facts.most, most), at)


def _all_differ(shape: Shape, facts: ArrayFacts) -> bool:
    return True in stated(shape.parts, "uniqueItems") or (facts.most is not None and facts.most < 2)


def _has_such_members(shape: Shape, node: dict[str, Any]) -> bool:
    """Whether the writer describes its members in the very words of the reader.

    A set of which a number of members is demanded may shrink else: read, two may be the same.
    """
    items = node_text(node.get("items", True))
    return any(node_text(written) == items for written in stated(shape.parts, "items"))


def _most(node: dict[str, Any]) -> int | None:
    """How many members the reader takes at most."""
    is_closed = node.get("items") is False
    return _least(node.get("maxItems"), len(node.get("prefixItems", ())) if is_closed else None)


def _least(one: int | None, other: int | None) -> int | None:
    return min((count for count in (one, other) if count is not None), default=None)


def _count_breaks(
    facts: ArrayFacts, node: dict[str, Any], most: int | None, at: Place
) -> Iterator[Break]:
    if facts.fewest < node.get("minItems", 0):
        yield at.breaks(
            Cause.MIN_ITEMS_RAISED,
            f"at least {facts.fewest}",
            f"at least {node['minItems']}",
            "fewer members can be written than the reader takes",
        )
    if most is not None and (facts.most is None or facts.most > most):
        yield at.breaks(
            Cause.MAX_ITEMS_LOWERED,
            "no limit" if facts.most is None else f"at most {facts.most}",
            f"at most {most}",
            "more members can be written than the reader takes",
        )


def _member_breaks(
    comparison: Comparing, facts: ArrayFacts, node: dict[str, Any], most: int | None, at: Place
) -> Iterator[Break]:
    prefix = node.get("prefixItems", ())
    all_alike_from = max(len(prefix), facts.prefix)
    for place in range(all_alike_from):
        if most is not None and place >= most:
            return
        wanted = prefix[place] if place < len(prefix) else node.get("items", True)
        yield from comparison.breaks(facts.member(place), wanted, at.member(place))
    if most is None or most > all_alike_from:
        rest = facts.member(all_alike_from)
        yield from comparison.breaks(rest, node.get("items", True), at.member())
