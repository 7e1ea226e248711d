"""Whether everything that passes one schema passes another, and what does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from penstock.core.schema.arrays import array_breaks
from penstock.core.schema.breaks import Break, Cause, not_provable
from penstock.core.schema.canonical import definition_of
from penstock.core.schema.facts import ObjectFacts
from penstock.core.schema.nodes import ALIASES, DEMANDS, KEYS, Node, node_text, text_of
from penstock.core.schema.objects import object_breaks
from penstock.core.schema.opened import Opening, without_aliases
from penstock.core.schema.place import Pair, Place
from penstock.core.schema.rendering import words_for, words_for_all, words_for_values
from penstock.core.schema.scalars import demand_breaks, format_breaks, number_breaks, string_breaks
from penstock.core.schema.shapes import Shape, Shapes, Together
from penstock.core.schema.values import accepts, kind_of, kinds_of_type

PIECES_MAX: Final = 40
_NEAREST_BREAKS_MAX: Final = 5
_BREAKS_MAX: Final = 200
_ABSENT: Final = object()

_NUMBERS: Final = frozenset(
    {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_STRINGS: Final = frozenset({"minLength", "maxLength", "pattern"})
_ARRAYS: Final = frozenset({"items", "prefixItems", "minItems", "maxItems", "uniqueItems"})
_OBJECTS: Final = frozenset(
    {
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        KEYS,
    }
)
_GENERAL: Final = frozenset(
    {"$ref", "$defs", "allOf", "anyOf", "oneOf", "not", "type", "enum", "format"}
    | {ALIASES, DEMANDS}
)
_UNDERSTOOD: Final = _NUMBERS | _STRINGS | _ARRAYS | _OBJECTS | _GENERAL

# Keywords that only mean something together; equal ones refuse the same values.
_IF: Final = ("if", "then", "else")
_CONTAINS: Final = ("contains", "minContains", "maxContains")
_GROUPS: Final = {keyword: group for group in (_IF, _CONTAINS) for keyword in group}
_ONLY_FOR: Final = {
    **dict.fromkeys((*_CONTAINS, "unevaluatedItems"), "array"),
    **dict.fromkeys(("contentEncoding", "contentMediaType", "contentSchema"), "string"),
    **dict.fromkeys(("dependentSchemas", "unevaluatedProperties"), "object"),
}
# These depend on everything around them, so an equal one may refuse something else.
_NEVER_EQUAL: Final = frozenset({"unevaluatedItems", "unevaluatedProperties"})


class Comparison:
    """Compares schemas of a writer with schemas of a reader in its open form."""

    def __init__(self, written: Mapping[str, Node], read: Mapping[str, Node]) -> None:
        """Take the definitions of both sides; those of the reader have to be opened already."""
        self.shapes = Shapes({**written, **read})
        self._opening = Opening(written)
        self._read_as: dict[str, str] = {}
        # What was found out about pairs; a proved one holds if those hold that it leans on.
        self._refuted: set[Pair] = set()
        self._proved: dict[Pair, frozenset[Pair]] = {}
        self._leant_on: set[Pair] = set()

    def breaks(self, together: Together, node: Node, at: Place) -> Iterator[Break]:
        """What passes all schemas of the writer and not the reader's; nothing: all is read."""
        if node is True or self._is_same(together, node):
            return
        for shape in self.shapes.of(together):
            yield from self._shape_breaks(shape, node, at)

    def _is_same(self, together: Together, node: Node) -> bool:
        text = node_text(node)
        written = [node_text(member) for member in together]
        for member, own in zip(together, written, strict=True):
            if own not in self._read_as:
                self._read_as[own] = node_text(self._opening.opened(member))
        return any(text in (own, self._read_as[own]) for own in written)

    def _shape_breaks(self, shape: Shape, node: Node, at: Place) -> Iterator[Break]:
        self.shapes.spend_step()
        if node is True or self._takes_values(shape, node):
            return
        if isinstance(node, bool):
            yield at.breaks(
                Cause.FORBIDDEN,
                words_for_all(shape.source),
                words_for(node),
                "something can be written where the reader takes nothing",
            )
        elif not self._is_of_kind(shape, node):
            yield self._wrong_kind(shape, node, at)
        elif "enum" in node and (refused := _refused(shape, node["enum"])) is not None:
            yield _wrong_value(shape, refused, node, at)
        else:
            yield from self._keyword_breaks(shape, node, at)

    def _takes_values(self, shape: Shape, node: Node) -> bool:
        definitions = self.shapes.definitions
        return shape.values is not None and all(
            accepts(node, value, definitions) is True for value in shape.values
        )

    def _is_of_kind(self, shape: Shape, node: dict[str, Any]) -> bool:
        if "type" in node and shape.kind not in kinds_of_type(node["type"]):
            return False
        return "enum" not in node or shape.kind in map(kind_of, node["enum"])

    def _wrong_kind(self, shape: Shape, node: dict[str, Any], at: Place) -> Break:
        written = self.shapes.kinds(shape.source)
        read = self.shapes.kinds((node,))
        is_narrowed = bool(read) and read < written
        return at.breaks(
            Cause.TYPE_NARROWED if is_narrowed else Cause.TYPE_CHANGED,
            words_for_all(shape.source),
            words_for(node),
            f"{_kind_words(shape.kind)} can be written, which the reader does not take",
        )

    def _keyword_breaks(self, shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
        if "$ref" in node:
            yield from self._reference_breaks(shape, node, at)
        for member in node.get("allOf", ()):
            yield from self._shape_breaks(shape, member, at)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                yield from self._union_breaks(shape, node, keyword, at)
        if "not" in node and self._meets(shape, node["not"]) and not _says(shape, node, ("not",)):
            yield not_provable(at.path, "not", words_for_all(shape.source), words_for(node))
        if "format" in node:
            yield from format_breaks(shape, node, at)
        yield from demand_breaks(shape, node, at)
        yield from self._kind_breaks(shape, node, at)
        yield from self._unknown_breaks(shape, node, at)

    def _kind_breaks(self, shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
        if shape.kind in {"integer", "fraction"}:
            yield from number_breaks(shape, node, at)
        elif shape.kind == "string":
            yield from string_breaks(shape, node, at)
        elif shape.kind == "array" and not _ARRAYS.isdisjoint(node):
            yield from array_breaks(self, shape, node, at)
        elif shape.kind == "object" and not _OBJECTS.isdisjoint(node):
            yield from object_breaks(self, shape, node, at)

    def _reference_breaks(self, shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
        target = definition_of(node["$ref"], self.shapes.definitions)
        if target is None:
            if not _says(shape, node, ("$ref",)):
                yield not_provable(at.path, "$ref")
            return
        pair = (shape.key, node["$ref"])
        if pair in at.assumed:
            self._leant_on.add(pair)
            if not at.may_lean_on([pair]):
                # It leads back here without a step into the value: nothing was compared.
                yield not_provable(at.path, "$ref")
        elif pair in self._proved and at.may_lean_on(self._proved[pair]):
            self._leant_on |= self._proved[pair]
        elif at.is_trial and pair in self._refuted:
            yield not_provable(at.path, "$ref")
        else:
            yield from self._pair_breaks(pair, shape, target, at)

    def _pair_breaks(self, pair: Pair, shape: Shape, target: Node, at: Place) -> list[Break]:
        """The breaks of a pair that may contain itself, remembered."""
        leant_on_before, self._leant_on = self._leant_on, set()
        inside = self._shape_breaks(shape, target, at.assuming(pair))
        found = list(islice(inside, 1 if at.is_trial else _BREAKS_MAX))
        leant_on = frozenset(self._leant_on - {pair})
        self._leant_on = leant_on_before | leant_on
        if found:
            self._refuted.add(pair)
        else:
            self._proved[pair] = leant_on
        return found

    def _unknown_breaks(self, shape: Shape, node: dict[str, Any], at: Place) -> Iterator[Break]:
        for keyword in node.keys() - _UNDERSTOOD:
            if _ONLY_FOR.get(keyword, shape.kind) != shape.kind:
                continue
            group = _GROUPS.get(keyword, (keyword,))
            if keyword in _NEVER_EQUAL or not _says(shape, node, group):
                yield not_provable(at.path, keyword, words_for_all(shape.source), words_for(node))

    # ── unions ─────────────────────────────────────────────────────────────────────────────────

    def _union_breaks(
        self, shape: Shape, node: dict[str, Any], keyword: str, at: Place
    ) -> Iterator[Break]:
        if self._union_takes(shape, node, keyword, at):
            return
        refused = [shape]
        for pieces in self._divided(shape):
            left = [piece for piece in pieces if not self._union_takes(piece, node, keyword, at)]
            if not left:
                return
            refused = left if shape.values is not None else refused
        if shape.values is not None:
            values = tuple(value for piece in refused for value in piece.values or ())
            refused = [replace(shape, values=values)]
        for piece in refused:
            yield from self._explained(piece, node, keyword, at)

    def _union_takes(self, shape: Shape, node: dict[str, Any], keyword: str, at: Place) -> bool:
        """Whether one branch takes the whole shape and, for oneOf, no other takes any of it."""
        branches: list[Node] = node[keyword]
        for number, branch in enumerate(branches):
            if self._fits(shape, branch, at):
                others = branches[:number] + branches[number + 1 :]
                return keyword == "anyOf" or not any(self._meets(shape, one) for one in others)
        return False

    def _fits(self, shape: Shape, node: Node, at: Place) -> bool:
        return next(self._shape_breaks(shape, node, at.trial()), None) is None

    def _meets(self, shape: Shape, node: Node) -> bool:
        """Whether some value of the shape may pass the schema, under whatever names."""
        kind = {"type": "number" if shape.kind == "fraction" else shape.kind}
        values = True if shape.values is None else {"enum": list(shape.values)}
        widened = without_aliases(node, self.shapes.definitions)
        found = self.shapes.of((*shape.parts, kind, values, widened))
        return any(other.kind == shape.kind for other in found)

    def _divided(self, shape: Shape) -> Iterator[list[Shape]]:
        """Ways to cut a shape into pieces that together are the whole."""
        if shape.values is not None:
            if 1 < len(shape.values) <= PIECES_MAX:
                yield [replace(shape, values=(value,)) for value in shape.values]
        elif shape.kind == "object":
            facts = ObjectFacts.of(shape.parts, self.shapes.definitions)
            for name in sorted(facts.required):
                yield from self._divided_by_tag(shape, name, facts.value(name))

    def _divided_by_tag(self, shape: Shape, name: str, value: Together) -> Iterator[list[Shape]]:
        found = self.shapes.of(value) if value else ()
        tags = [tag for inner in found for tag in inner.values or ()]
        is_listed = all(inner.values is not None for inner in found)
        if is_listed and 1 < len(tags) <= PIECES_MAX:
            yield [
                replace(shape, parts=(*shape.parts, {"properties": {name: {"enum": [tag]}}}))
                for tag in tags
            ]

    def _explained(
        self, shape: Shape, node: dict[str, Any], keyword: str, at: Place
    ) -> Iterator[Break]:
        """Why no branch takes the shape, told by the one branch that was meant if that is clear."""
        general = at.breaks(
            Cause.UNION_NARROWED,
            words_for_all(shape.source),
            words_for(node),
            "no variant of the reader takes all that can be written",
        )
        if at.is_trial:
            yield general
            return
        near = [branch for branch in node[keyword] if self._resembles(shape, branch)]
        if not near and self.shapes.kinds((node,)).isdisjoint({shape.kind}):
            yield self._wrong_kind(shape, node, at)
        elif not near and shape.values is not None:
            yield _wrong_value(shape, shape.values, node, at)
        elif len(near) == 1:
            yield from list(self._shape_breaks(shape, near[0], at)) or [general]
        elif any(self._fits(shape, branch, at) for branch in near):
            yield replace(
                not_provable(at.path, keyword, general.before, general.after),
                reason="more than one variant of the reader's `oneOf` may take it",
            )
        else:
            yield from self._nearest(shape, near, general, at)

    def _resembles(self, shape: Shape, branch: Node) -> bool:
        """Whether they would meet if no field had to be there: what is there tells variants."""
        return any(
            self._meets(shape, {"allOf": [_without_required(part) for part in other.parts]})
            for other in self.shapes.of((branch,))
            if other.kind == shape.kind
        )

    def _nearest(
        self, shape: Shape, near: list[Node], general: Break, at: Place
    ) -> Iterator[Break]:
        tried = [
            list(islice(self._shape_breaks(shape, branch, at), _NEAREST_BREAKS_MAX))
            for branch in near
        ]
        closest = min(tried, key=len, default=[])
        if not closest:
            yield general
            return
        why = f"the nearest fails at {closest[0].place}: {closest[0].reason}"
        yield replace(general, reason=f"{general.reason}; {why}")


def _without_required(part: dict[str, Any]) -> Node:
    return {key: value for key, value in part.items() if key != "required"}


def _says(shape: Shape, node: dict[str, Any], keywords: tuple[str, ...]) -> bool:
    """Whether the writer's side asserts the very same under these keywords."""
    wanted = [node_text(node[keyword]) if keyword in node else _ABSENT for keyword in keywords]
    return any(
        wanted == [node_text(part[key]) if key in part else _ABSENT for key in keywords]
        for part in shape.parts
    )


def _refused(shape: Shape, values: list[Any]) -> tuple[Any, ...] | None:
    """The values that can be written and are not among these; None: there are none."""
    if shape.values is None:
        return ()
    allowed = set(map(text_of, values))
    return tuple(value for value in shape.values if text_of(value) not in allowed) or None


def _wrong_value(shape: Shape, refused: tuple[Any, ...], node: Node, at: Place) -> Break:
    told = words_for_values(refused) if refused else f"any {shape.kind}"
    return at.breaks(
        Cause.ENUM_NARROWED,
        words_for_all(shape.source),
        words_for(node),
        f"{told} can be written, which the reader does not take",
    )


def _kind_words(kind: str) -> str:
    return {"fraction": "a number that is not whole", "null": "null"}.get(
        kind, f"an {kind}" if kind[0] in "aio" else f"a {kind}"
    )
