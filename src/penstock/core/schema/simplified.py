"""Many ways of saying the same in one schema, brought to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.core.schema.nodes import Node, in_order, plain, text_of

# What a keyword says where it is absent, so that saying it changes nothing.
_SAYS_NOTHING: Final[dict[str, Any]] = {
    "additionalProperties": True,
    "allOf": [],
    "dependentRequired": {},
    "dependentSchemas": {},
    "items": True,
    "minItems": 0,
    "minLength": 0,
    "minProperties": 0,
    "patternProperties": {},
    "prefixItems": [],
    "properties": {},
    "propertyNames": True,
    "required": [],
    "unevaluatedItems": True,
    "unevaluatedProperties": True,
    "uniqueItems": False,
}
UNEVALUATED: Final = frozenset({"unevaluatedItems", "unevaluatedProperties"})
# Where something is said of what was not evaluated, "anything" evaluates, and has to stay.
_EVALUATES: Final = frozenset({"additionalProperties", "items"}) | UNEVALUATED


def simplified(node: dict[str, Any], *, keeps_true: bool) -> Node:
    """The same in the fewest words: every way of saying it ends in the same text."""
    for keyword, rewrite in _REWRITES.items():
        if keyword in node:
            node = rewrite(node)
    node = {
        keyword: value
        for keyword, value in node.items()
        if not _says_nothing(keyword, value) or (keeps_true and keyword in _EVALUATES)
    }
    if node.get("not") is True or any(member is False for member in node.get("allOf", ())):
        return False
    if list(node) == ["allOf"] and len(node["allOf"]) == 1:
        only: Node = node["allOf"][0]
        return only
    return dict(sorted(node.items())) if node else True


def _says_nothing(keyword: str, value: object) -> bool:
    nothing = _SAYS_NOTHING.get(keyword)
    return nothing is not None and type(value) is type(nothing) and value == nothing


def _rewrite_const(node: dict[str, Any]) -> dict[str, Any]:
    rest = {keyword: value for keyword, value in node.items() if keyword != "const"}
    allowed = rest.get("enum", [node["const"]])
    rest["enum"] = [value for value in allowed if text_of(value) == text_of(node["const"])]
    return rest


def _rewrite_discriminator(node: dict[str, Any]) -> dict[str, Any]:
    """Whoever reads by a tag refuses what has none, also where the tag has a default."""
    rest = {keyword: value for keyword, value in node.items() if keyword != "discriminator"}
    name = node["discriminator"].get("propertyName")
    if isinstance(name, str):
        rest["required"] = [*rest.get("required", ()), name]
    return rest


def _rewrite_type(node: dict[str, Any]) -> dict[str, Any]:
    types = node["type"] if isinstance(node["type"], list) else [node["type"]]
    if "number" in types:
        types = [name for name in types if name != "integer"]
    types = in_order(types)
    return {**node, "type": types[0] if len(types) == 1 else types}


def _rewrite_union(keyword: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def rewrite(node: dict[str, Any]) -> dict[str, Any]:
        members = [member for member in node[keyword] if member is not False]
        if keyword == "anyOf":
            members = in_order(_spliced(members, keyword))
        else:
            # A branch that is there twice is never the only one that matches.
            members = sorted(members, key=text_of)
        if not members:
            return {"not": True}
        if len(members) > 1:
            return {**node, keyword: members}
        rest = {other: value for other, value in node.items() if other != keyword}
        return {**rest, "allOf": [*rest.get("allOf", ()), members[0]]}

    return rewrite


def _rewrite_all_of(node: dict[str, Any]) -> dict[str, Any]:
    members = in_order(_spliced(node["allOf"], "allOf"))
    return {**node, "allOf": [member for member in members if member is not True]}


def _spliced(members: list[Node], keyword: str) -> list[Node]:
    """A member that is nothing but such a list again gives its own members."""
    flat: list[Node] = []
    for member in members:
        if isinstance(member, dict) and list(member) == [keyword]:
            flat += member[keyword]
        else:
            flat.append(member)
    return flat


def _sorted_list(keyword: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: {**node, keyword: in_order(plain(node[keyword]))}


def _plain_number(keyword: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda node: {**node, keyword: plain(node[keyword])}


_NUMBERS: Final = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
]
# In this order: a union of one becomes a member of allOf.
_REWRITES: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "const": _rewrite_const,
    "discriminator": _rewrite_discriminator,
    "enum": _sorted_list("enum"),
    "required": _sorted_list("required"),
    "type": _rewrite_type,
    "anyOf": _rewrite_union("anyOf"),
    "oneOf": _rewrite_union("oneOf"),
    "allOf": _rewrite_all_of,
    **{keyword: _plain_number(keyword) for keyword in _NUMBERS},
}
