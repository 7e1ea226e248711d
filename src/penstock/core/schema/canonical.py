"""One form for all schemas that say the same in other words, and its hash."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

from penstock.core.require import require
from penstock.core.schema.nodes import (
    DEFINITIONS,
    HOLDS_MANY,
    HOLDS_NAMED,
    HOLDS_ONE,
    Node,
    children,
    is_editorial,
    mapped,
    text_of,
)
from penstock.core.schema.simplified import UNEVALUATED, simplified
from penstock.errors import ContractError

NODES_MAX: Final = 50_000
_SCHEMAS: Final = HOLDS_ONE | HOLDS_MANY | HOLDS_NAMED
_NAME_LENGTH: Final = 16
LOCAL: Final = "#/$defs/"


def canonical(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in a form that only changes if what it accepts or calls its fields may change.

    Independent of the order of keys and members, of the names of definitions and of editorial
    keywords. A reference is replaced by its target unless that contains itself.
    """
    return _settled(schema, keeps_editorial=False)


def with_editorial(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The canonical form, except that titles, defaults and the like are kept."""
    return _settled(schema, keeps_editorial=True)


def schema_hash(schema: Mapping[str, Any]) -> str:
    """The SHA-256 of the canonical form, in hexadecimal digits."""
    return hashlib.sha256(text_of(canonical(schema)).encode()).hexdigest()


def definition_of(reference: object, definitions: Mapping[str, Node]) -> Node | None:
    """What a reference in a canonical schema stands for; None: nobody here knows."""
    if not isinstance(reference, str) or not reference.startswith(LOCAL):
        return None
    return definitions.get(reference.removeprefix(LOCAL))


def as_document(node: Node) -> dict[str, Any]:
    """The node as an object, which a whole schema has to be."""
    if isinstance(node, bool):
        return {} if node else {"not": {}}
    return node


def _settled(schema: Mapping[str, Any], *, keeps_editorial: bool) -> dict[str, Any]:
    """The document once there is nothing more to simplify.

    A reference may vanish, since what it stood beside accepts nothing. Then a definition that
    contained itself through it no longer does, and takes the place of the references to it.
    """
    document = _document(schema, keeps_editorial=keeps_editorial)
    while "$defs" in document:
        simpler = _document(document, keeps_editorial=keeps_editorial)
        if text_of(simpler) == text_of(document):
            break
        document = simpler
    return document


def _document(schema: Mapping[str, Any], *, keeps_editorial: bool) -> dict[str, Any]:
    inlining = _Inlining(dict(schema), keeps_editorial=keeps_editorial)
    names = _names_by_content(inlining)
    root = inlining.normal(inlining.root, names)
    definitions = {
        name: inlining.normal(target, names)
        for pointer, name in names.items()
        if (target := inlining.target_of(pointer)) is not None
    }
    if not definitions:
        return as_document(root)
    return {**as_document(root), "$defs": dict(sorted(definitions.items()))}


class _Inlining:
    """A raw schema, and which of its references can be replaced by their target."""

    def __init__(self, root: dict[str, Any], *, keeps_editorial: bool) -> None:
        self.root = root
        self.keeps_editorial = keeps_editorial
        self.recursive: frozenset[str] = frozenset()
        self.keeps_true = False
        self._nodes = 0
        self._find_recursion()

    def target_of(self, reference: object) -> Node | None:
        """What a JSON pointer into this schema points at; None: it leads elsewhere."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        place: Any = self.root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and key.isdigit() and int(key) < len(place):
                place = place[int(key)]
            else:
                return None
        is_pointer = reference == "#" or reference.startswith("#/")
        return place if is_pointer and isinstance(place, bool | dict) else None

    def normal(self, node: Any, names: Mapping[str, str]) -> Node:
        """The node in normal form, recursive references under the given names."""
        self._nodes = 0
        return self._normal(node, names)

    def _normal(self, node: Any, names: Mapping[str, str]) -> Node:
        self._nodes += 1
        require(
            self._nodes <= NODES_MAX,
            f"The schema has more than {NODES_MAX} parts with its references followed. "
            "Nothing was compared; give some of its parts an event type of their own.",
            ContractError,
        )
        require(
            isinstance(node, bool | dict),
            f"{node!r} stands where a JSON Schema is expected. Nothing was compared.",
            ContractError,
        )
        if isinstance(node, bool):
            return node
        kept = {
            keyword: value
            for keyword, value in node.items()
            if keyword not in DEFINITIONS and (self.keeps_editorial or not is_editorial(keyword))
        }
        target = self.target_of(kept.get("$ref"))
        reference = kept.pop("$ref") if target is not None else None
        inner = mapped(kept, lambda child: self._normal(child, names), _SCHEMAS)
        assert isinstance(inner, dict)
        if reference is not None:
            # A reference is one more thing that has to hold.
            is_named = reference in self.recursive
            held = {"$ref": LOCAL + names[reference]} if is_named else self._normal(target, names)
            inner["allOf"] = [*inner.get("allOf", ()), held]
        return simplified(inner, keeps_true=self.keeps_true)

    def _find_recursion(self) -> None:
        direct: dict[str, set[str]] = {}
        waiting = self._references_below(self.root)
        while waiting:
            pointer = waiting.pop()
            if pointer not in direct:
                direct[pointer] = self._references_below(self.target_of(pointer))
                waiting |= direct[pointer]
        self.recursive = frozenset(name for name in direct if name in _reachable(name, direct))

    def _references_below(self, node: Any) -> set[str]:
        """The local references in a node, those behind other references left out."""
        if not isinstance(node, dict):
            return set()
        found = {node["$ref"]} if self.target_of(node.get("$ref")) is not None else set()
        self.keeps_true = self.keeps_true or not UNEVALUATED.isdisjoint(node)
        for child in children(node):
            found |= self._references_below(child)
        return found


def _reachable(start: str, direct: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(direct[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += direct[name]
    return seen


def _names_by_content(inlining: _Inlining) -> dict[str, str]:
    """A name for every recursive definition that depends on what it says, not on its old name.

    All begin alike and are told apart by their text, then by the texts they refer to, and so on
    until no round tells more. Those that never differ say the same and share their name.
    """
    names = dict.fromkeys(inlining.recursive, "")
    while names:
        told_apart = len(set(names.values()))
        # Its own last name is part of the next one: what was told apart stays apart.
        names = {
            pointer: _digest(name + text_of(inlining.normal(inlining.target_of(pointer), names)))
            for pointer, name in names.items()
        }
        if len(set(names.values())) == told_apart:
            break
    return names


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_NAME_LENGTH]
