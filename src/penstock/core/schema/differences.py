"""Every change between two schemas, whoever may mind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from penstock.core.schema.canonical import canonical, definition_of, with_editorial
from penstock.core.schema.nodes import DEFINITIONS, Node, is_editorial, text_of
from penstock.core.schema.rendering import shortened, words_for

Kind = Literal["added", "removed", "changed"]
Traits = frozenset[tuple[str, str]]

_ABSENT: Final = "absent"
_LISTS: Final = {"items": "[]", "contains": "[contains]", "unevaluatedItems": "[unevaluated]"}
_VALUES: Final = {"additionalProperties": ".*", "unevaluatedProperties": ".*"}
_UNIONS: Final = frozenset({"allOf", "anyOf", "oneOf"})
_WALKED: Final = frozenset(
    {*_LISTS, *_VALUES, *_UNIONS, *DEFINITIONS, "properties", "prefixItems", "required"}
)
_STRUCTURE: Final = frozenset({"type", "enum", *_UNIONS})


@dataclass(frozen=True, slots=True, order=True)
class Difference:
    """One change, from the old schema to the new one."""

    path: str
    kind: Kind
    before: str
    after: str
    is_editorial: bool = False
    """It changes what people read, not what is accepted."""

    def __str__(self) -> str:
        """For people; both sides where there are two."""
        sides = {"added": self.after, "removed": self.before}
        what = sides.get(self.kind, f"{self.before} → {self.after}")
        note = " (for people only)" if self.is_editorial else ""
        return f"{self.path or 'the whole'} {self.kind}: {what}{note}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    """All changes, sorted by path; none: both schemas say the same, in the same words."""
    before, after = with_editorial(old), with_editorial(new)
    walk = _Walk(before.get("$defs", {}), after.get("$defs", {}))
    found = set(walk.between(before, after, ""))
    if not any(not one.is_editorial for one in found) and _differ(canonical(old), canonical(new)):
        # It lies where the walk does not tell it apart: behind references, in another order.
        found.add(Difference("", "changed", words_for(before), words_for(after)))
    return sorted(found)


def _differ(before: object, after: object) -> bool:
    return text_of(before) != text_of(after)


class _Walk:
    """Goes through two schemas side by side."""

    def __init__(self, old: Mapping[str, Node], new: Mapping[str, Node]) -> None:
        self.old = old
        self.new = new
        self._seen: set[tuple[str, str]] = set()

    def between(self, before: Node, after: Node, path: str) -> Iterator[Difference]:
        """The changes from one node to the other."""
        if not _differ(before, after) and not _refers(before):
            return
        names = (_reference(before), _reference(after))
        if any(names):
            if names in self._seen:
                return
            self._seen.add(names)
        before, after = _followed(before, self.old), _followed(after, self.new)
        if isinstance(before, bool) or isinstance(after, bool) or _is_other(before, after):
            yield from _changed(path, words_for(before), words_for(after), before, after)
            return
        yield from self._keywords(before, after, path)
        yield from self._fields(before, after, path)
        yield from self._inner(before, after, path)
        for keyword in sorted(_UNIONS):
            yield from self._members(before.get(keyword, []), after.get(keyword, []), path)

    def _keywords(
        self, before: dict[str, Any], after: dict[str, Any], path: str
    ) -> Iterator[Difference]:
        for keyword in sorted({*before, *after} - _WALKED):
            old, new = _value_words(keyword, before), _value_words(keyword, after)
            if _differ(before.get(keyword, []), after.get(keyword, [])) or old != new:
                yield Difference(path, "changed", old, new, is_editorial(keyword))

    def _fields(
        self, before: dict[str, Any], after: dict[str, Any], path: str
    ) -> Iterator[Difference]:
        old, new = before.get("properties", {}), after.get("properties", {})
        needed, needed_now = set(before.get("required", ())), set(after.get("required", ()))
        for name in sorted({*old, *new, *(needed ^ needed_now)}):
            at = f"{path}.{name}" if path else name
            if name in old and name not in new:
                yield Difference(at, "removed", _field_words(name, old, needed), _ABSENT)
            elif name in new and name not in old:
                yield Difference(at, "added", _ABSENT, _field_words(name, new, needed_now))
            else:
                if (name in needed) != (name in needed_now):
                    words = {True: "required", False: "optional"}
                    yield Difference(
                        at, "changed", words[name in needed], words[name in needed_now]
                    )
                yield from self.between(old.get(name, True), new.get(name, True), at)

    def _inner(
        self, before: dict[str, Any], after: dict[str, Any], path: str
    ) -> Iterator[Difference]:
        for keyword, step in {**_LISTS, **_VALUES}.items():
            at = (path + step).lstrip(".")
            if keyword in before or keyword in after:
                yield from self.between(before.get(keyword, True), after.get(keyword, True), at)
        old, new = before.get("prefixItems", []), after.get("prefixItems", [])
        for place in range(max(len(old), len(new))):
            at = f"{path}[{place}]"
            if place >= len(old):
                yield Difference(at, "added", _ABSENT, words_for(new[place]))
            elif place >= len(new):
                yield Difference(at, "removed", words_for(old[place]), _ABSENT)
            else:
                yield from self.between(old[place], new[place], at)

    def _pairs(self, gone: list[Node], come: list[Node]) -> list[tuple[Node, Node]]:
        """Alternatives that became each other, the most alike first."""
        old = [
            (number, node, _traits(_followed(node, self.old))) for number, node in enumerate(gone)
        ]
        new = [
            (number, node, _traits(_followed(node, self.new))) for number, node in enumerate(come)
        ]
        chances = sorted(
            (_distance(traits, others), number, other)
            for number, _, traits in old
            for other, _, others in new
        )
        paired: dict[int, int] = {}
        for distance, number, other in chances:
            is_free = number not in paired and other not in paired.values()
            if is_free and (distance < 1 or len(gone) == len(come)):
                paired[number] = other
        return [(gone[number], come[other]) for number, other in paired.items()]

    def _members(self, before: list[Node], after: list[Node], path: str) -> Iterator[Difference]:
        """Changes among alternatives: equal ones are pairs, and so is what is left alone."""
        known, known_now = set(map(text_of, before)), set(map(text_of, after))
        gone = [node for node in before if text_of(node) not in known_now or _refers(node)]
        come = [node for node in after if text_of(node) not in known or _refers(node)]
        for old, new in self._pairs(gone, come):
            gone.remove(old)
            come.remove(new)
            yield from self.between(old, new, path)
        for node in gone:
            yield Difference(path, "removed", words_for(_followed(node, self.old)), _ABSENT)
        for node in come:
            yield Difference(path, "added", _ABSENT, words_for(_followed(node, self.new)))


def _traits(node: Node) -> Traits:
    """What tells an alternative: its keywords and its fields."""
    if isinstance(node, bool):
        return frozenset({("", str(node))})
    told = {**node, **node.get("properties", {})}
    return frozenset((key, text_of(value)) for key, value in told.items())


def _distance(one: Traits, other: Traits) -> float:
    """How much two alternatives differ: 0 is not at all, 1 in everything."""
    return 1.0 - len(one & other) / max(1, len(one | other))


def _refers(node: Node) -> bool:
    return '"$ref"' in text_of(node)


def _reference(node: Node) -> str:
    return node.get("$ref", "") if isinstance(node, dict) else ""


def _followed(node: Node, definitions: Mapping[str, Node]) -> Node:
    if not isinstance(node, dict):
        return node
    target = definition_of(node.get("$ref"), definitions)
    return node if target is None else target


def _is_other(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether the two are so different that a list of their keywords would tell less."""
    return any(
        (keyword in before) != (keyword in after) for keyword in _STRUCTURE - {"allOf"}
    ) or before.get("type") != after.get("type")


def _changed(path: str, old: str, new: str, before: Node, after: Node) -> Iterator[Difference]:
    if _differ(before, after):
        yield Difference(path, "changed", old, new)


def _value_words(keyword: str, node: dict[str, Any]) -> str:
    return shortened(f"{keyword} {text_of(node[keyword])}") if keyword in node else f"no {keyword}"


def _field_words(name: str, fields: dict[str, Node], required: set[str]) -> str:
    return f"{'required' if name in required else 'optional'}, {words_for(fields[name])}"
