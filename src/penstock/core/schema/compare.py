"""Which change of a schema breaks whom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from penstock.core.schema.breaks import Break, Rule, as_backward, as_forward, not_provable
from penstock.core.schema.canonical import canonical
from penstock.core.schema.inclusion import Comparison
from penstock.core.schema.nodes import node_text
from penstock.core.schema.opened import Opening
from penstock.core.schema.place import Place
from penstock.core.schema.shapes import TooComplex

BREAKS_MAX: Final = 200
_TOO_COMPLEX: Final = "the schemas have too many alternatives to compare them all"


def can_read(writer: Mapping[str, Any], reader: Mapping[str, Any]) -> list[Break]:
    """What an instance of the writer's schema can have that the reader refuses.

    Empty only if the reader, which keeps unknown fields, accepts every instance. What cannot be
    proved is a break.
    """
    written, read = canonical(writer), canonical(reader)
    if node_text(written) == node_text(read):
        return []
    opening = Opening(read.get("$defs", {}))
    comparison = Comparison(written.get("$defs", {}), opening.opened_definitions())
    found: dict[tuple[str, ...], Break] = {}
    try:
        for one in islice(comparison.breaks((written,), opening.opened(read), Place()), BREAKS_MAX):
            found.setdefault((one.path, one.rule, one.before, one.after), one)
    except (TooComplex, RecursionError):
        found.setdefault(("",), replace(not_provable("", "anyOf"), reason=_TOO_COMPLEX))
    return list(found.values())


def check(old: Mapping[str, Any], new: Mapping[str, Any], rule: Rule) -> list[Break]:
    """What the change from one schema to the other breaks under a rule; nothing: it is safe."""
    return list(_broken(old, new, Rule(rule)))


def _broken(old: Mapping[str, Any], new: Mapping[str, Any], rule: Rule) -> Iterator[Break]:
    if rule in {Rule.BACKWARD, Rule.FULL}:
        yield from map(as_backward, can_read(old, new))
    if rule in {Rule.FORWARD, Rule.FULL}:
        yield from map(as_forward, can_read(new, old))
