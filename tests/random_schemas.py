"""Random JSON Schemas, changes of them, and values to try them with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Schema = Any
Edit = Callable[[Random, dict[str, Any], tuple[str, ...]], None]
"""Changes a node in place; the names are those of the definitions it may refer to."""
NAMES = ("a", "ab", "b", "c")
PATTERNS = ("^a", "b$", "^.b")
STRINGS = (
    "",
    "a",
    "ab",
    "abb",
    "b",
    "ba",
    "xyz",
    "2026-11-15",
    "a@b.c",
    "10.0.0.1",
    "f7e6d9c8-1111-4222-8333-444455556666",
)
FORMATS = ("uuid", "date", "email", "ipv4")
NUMBERS = (-2, -1, 0, 1, 2, 3, 4, 6, -0.5, 0.5, 1.5, 2.5, 0.25)
SCALARS: tuple[Any, ...] = (None, True, False, 0, 1, 2, 1.5, "", "a", "ab", "b")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
DEPTH = 3
TRIES = 6


def document(random: Random) -> dict[str, Any]:
    """A whole schema; one in three has definitions that may contain themselves."""
    has_definitions = random.random() < 0.35
    names = ("T", "U") if has_definitions else ()
    maker = _Maker(random, names)
    root = maker.object(DEPTH) if random.random() < 0.7 else maker.node(DEPTH)
    root = root if isinstance(root, dict) else {"not": {}} if root is False else {}
    if has_definitions:
        definitions = {name: maker.definition() for name in names}
        return {**root, "$defs": definitions}
    return root


class _Maker:
    def __init__(self, random: Random, names: tuple[str, ...]) -> None:
        self.random = random
        self.names = names
        self.may_refer = bool(names)

    def definition(self) -> Schema:
        """A schema that refers to others only from inside its values, so that it ends."""
        self.may_refer = False
        return self.object(DEPTH - 1) if self.random.random() < 0.8 else self.array(DEPTH - 1)

    def inside(self, depth: int) -> Schema:
        """A schema for a value inside another: it may refer to anything."""
        before, self.may_refer = self.may_refer, bool(self.names)
        made = self.node(depth - 1)
        self.may_refer = before
        return made

    def node(self, depth: int) -> Schema:
        makers: list[Callable[[int], Schema]] = [self.scalar, self.scalar, self.scalar, self.listed]
        if depth > 0:
            makers += [self.array, self.object, self.object, self.any_of, self.any_of]
            makers += [self.any_of, self.one_of, self.all_of, self.tagged, self.negated, self.many]
        if self.may_refer:
            makers += [self.reference] * 4
        if self.random.random() < 0.06:
            return self.random.choice([True, {}, False])
        return self.random.choice(makers)(depth)

    def scalar(self, _depth: int) -> Schema:
        kind = self.random.choice(["null", "boolean", "integer", "integer", "number", "string"])
        node: dict[str, Any] = {"type": kind}
        if kind in {"integer", "number"}:
            self._some(node, number_limits(self.random))
        elif kind == "string":
            self._some(node, string_limits(self.random))
        return node

    def _some(self, node: dict[str, Any], limits: dict[str, Any]) -> None:
        node.update({key: limit for key, limit in limits.items() if self.random.random() < 0.2})

    def listed(self, _depth: int) -> Schema:
        values = self.random.sample(SCALARS, self.random.randint(1, 4))
        return {"const": values[0]} if len(values) == 1 else {"enum": values}

    def many(self, _depth: int) -> Schema:
        node: dict[str, Any] = {"type": self.random.sample(TYPES, self.random.randint(2, 3))}
        self._some(node, {**number_limits(self.random), **string_limits(self.random)})
        return node

    def array(self, depth: int) -> Schema:
        node: dict[str, Any] = {"type": "array"}
        if self.random.random() < 0.7:
            node["items"] = self.inside(depth)
        if self.random.random() < 0.3:
            node["prefixItems"] = [self.inside(depth) for _ in range(self.random.randint(1, 2))]
        self._some(node, array_limits(self.random))
        if self.random.random() < 0.1:
            node["contains"] = self.inside(0)
        return node

    def object(self, depth: int) -> Schema:
        names = self.random.sample(NAMES, self.random.randint(0, 3))
        node: dict[str, Any] = {"type": "object"}
        if names:
            node["properties"] = {name: self.inside(depth) for name in names}
            node["required"] = [name for name in names if self.random.random() < 0.5]
        choice = self.random.random()
        if choice < 0.55:
            node["additionalProperties"] = False
        elif choice < 0.75:
            node["additionalProperties"] = self.inside(depth)
        elif choice < 0.8:
            node["unevaluatedProperties"] = False
        if self.random.random() < 0.15:
            node["patternProperties"] = {self.random.choice(PATTERNS): self.inside(depth)}
        self._some(node, object_limits(self.random))
        return node

    def any_of(self, depth: int) -> Schema:
        return {"anyOf": self._branches(depth)}

    def one_of(self, depth: int) -> Schema:
        return {"oneOf": self._branches(depth)}

    def all_of(self, depth: int) -> Schema:
        branches = self._branches(depth)
        if self.random.random() < 0.5 and isinstance(branches[0], dict):
            return {**branches[0], "allOf": branches[1:]}
        return {"allOf": branches}

    def _branches(self, depth: int) -> list[Schema]:
        return [self.node(depth - 1) for _ in range(self.random.choice([1, 2, 2, 2, 3]))]

    def negated(self, depth: int) -> Schema:
        return {"not": self.node(depth - 1)}

    def tagged(self, depth: int) -> Schema:
        tags = self.random.sample(["u", "v", "w"], self.random.randint(2, 3))
        branches = []
        for tag in tags:
            branch = self.object(depth - 1)
            branch["properties"] = {**branch.get("properties", {}), "kind": {"const": tag}}
            if self.random.random() < 0.7:
                branch["required"] = [*branch.get("required", []), "kind"]
            branches.append(branch)
        return {"oneOf": branches, "discriminator": {"propertyName": "kind"}}

    def reference(self, _depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self.random.choice(self.names)}"}


def number_limits(random: Random) -> dict[str, Any]:
    return {
        "minimum": random.choice((-1, 0, 1, 1.5)),
        "maximum": random.choice((1, 2, 3, 2.5)),
        "exclusiveMinimum": random.choice((-1, 0, 0.5)),
        "exclusiveMaximum": random.choice((2, 3, 2.5)),
        "multipleOf": random.choice((1, 2, 3, 0.5, 1.5)),
    }


def string_limits(random: Random) -> dict[str, Any]:
    return {
        "minLength": random.randint(0, 2),
        "maxLength": random.randint(1, 3),
        "pattern": random.choice(PATTERNS),
        "format": random.choice(FORMATS),
    }


def array_limits(random: Random) -> dict[str, Any]:
    return {
        "minItems": random.randint(0, 2),
        "maxItems": random.randint(0, 3),
        "uniqueItems": random.choice((True, True, False)),
    }


def object_limits(random: Random) -> dict[str, Any]:
    names = random.choice(
        ({"enum": random.sample(NAMES, 2)}, {"maxLength": 1}, {"pattern": random.choice(PATTERNS)})
    )
    return {
        "minProperties": random.randint(0, 2),
        "maxProperties": random.randint(0, 3),
        "propertyNames": names,
        "dependentRequired": {random.choice(NAMES): [random.choice(NAMES)]},
    }


# ── changes ────────────────────────────────────────────────────────────────────────────────────


def changed(random: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema after one to three changes somewhere in it."""
    made = copy.deepcopy(schema)
    for _ in range(random.randint(1, 3)):
        before = copy.deepcopy(made)
        for _ in range(TRIES):
            nodes = [node for node in _nodes(made) if isinstance(node, dict)]
            _change(random, random.choice(nodes), tuple(made.get("$defs", ())))
            if made != before:
                break
    return made


def _nodes(node: Schema) -> Iterator[Schema]:
    yield node
    if not isinstance(node, dict):
        return
    for keyword in ("items", "additionalProperties", "not", "propertyNames", "contains"):
        if keyword in node:
            yield from _nodes(node[keyword])
    for keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for member in node.get(keyword, ()):
            yield from _nodes(member)
    for keyword in ("properties", "patternProperties", "$defs"):
        for member in node.get(keyword, {}).values():
            yield from _nodes(member)


def _change(random: Random, node: dict[str, Any], names: tuple[str, ...]) -> None:
    changes: list[Edit] = [_drop_keyword, _add_limit, _change_limit, _change_field]
    changes += [_change_required]
    changes += [_make_optional, _change_values, _change_branches, _widen_type, _close]
    random.choice(changes)(random, node, names)


def _drop_keyword(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    keywords = sorted(node.keys() - {"$defs", "$ref", "discriminator", "oneOf"})
    if keywords:
        del node[random.choice(keywords)]


def _limits(random: Random, node: dict[str, Any]) -> dict[str, Any]:
    by_type = {
        "integer": number_limits,
        "number": number_limits,
        "string": string_limits,
        "array": array_limits,
        "object": object_limits,
    }
    kind = node.get("type")
    return by_type[kind](random) if isinstance(kind, str) and kind in by_type else {}


def _add_limit(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    limits = _limits(random, node)
    if limits:
        keyword = random.choice(sorted(limits))
        node[keyword] = limits[keyword]


def _change_limit(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    limits = {keyword: limit for keyword, limit in _limits(random, node).items() if keyword in node}
    if limits:
        keyword = random.choice(sorted(limits))
        node[keyword] = limits[keyword]


def _change_field(random: Random, node: dict[str, Any], names: tuple[str, ...]) -> None:
    if node.get("type") == "object":
        fields = node.setdefault("properties", {})
        name = random.choice(NAMES)
        if name in fields and random.random() < 0.5:
            del fields[name]
            node["required"] = [other for other in node.get("required", ()) if other != name]
        else:
            fields[name] = _Maker(random, names).inside(1)


def _change_required(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    if node.get("properties"):
        name = random.choice(sorted(node["properties"]))
        required = set(node.get("required", ())) ^ {name}
        node["required"] = sorted(required)


def _make_optional(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    other = random.choice([{"type": "null"}, {"type": "string"}, {"const": 1}, {"type": "object"}])
    inner = {key: node.pop(key) for key in list(node) if key != "$defs"}
    node["anyOf"] = [inner, other]


def _change_values(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    if "enum" in node and len(node["enum"]) > 1 and random.random() < 0.5:
        node["enum"] = node["enum"][1:]
    elif "enum" in node:
        node["enum"] = [*node["enum"], random.choice(["zz", 7])]
    elif "const" in node:
        node["enum"] = [node.pop("const"), random.choice(["zz", 7])]


def _change_branches(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    for keyword in ("anyOf", "allOf"):
        if keyword in node:
            # Without references: a definition that is a choice of itself never ends.
            node[keyword].append(_Maker(random, ()).inside(1))
            if random.random() < 0.5:
                node[keyword].pop(0)
            random.shuffle(node[keyword])


def _widen_type(_random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    if node.get("type") == "integer":
        node["type"] = "number"
    elif isinstance(node.get("type"), str):
        node["type"] = [node["type"], "null"]


def _close(random: Random, node: dict[str, Any], names: tuple[str, ...]) -> None:
    if node.get("type") == "object":
        node["additionalProperties"] = random.choice([True, False, _Maker(random, names).inside(1)])
    elif "prefixItems" in node:
        node["items"] = random.choice([True, False, {"type": "integer"}])


def with_alias(random: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with one of its fields renamed, and its old name kept as an alias."""
    fields = schema.get("properties", {})
    named = [name for name, field in fields.items() if isinstance(field, dict)]
    if not named:
        return schema
    old, new = random.choice(named), random.choice([*NAMES, "d"])
    renamed = {new if name == old else name: field for name, field in fields.items()}
    renamed[new] = {**fields[old], "x-penstock-aliases": random.choice([[old], ["e", old]])}
    required = [new if name == old else name for name in schema.get("required", ())]
    return {**schema, "properties": renamed, "required": required}


def widened(random: Random, schema: dict[str, Any]) -> dict[str, Any]:
    """A plain schema after changes that every one of its instances survives."""
    made = copy.deepcopy(schema)
    for _ in range(random.randint(1, 4)):
        nodes = [
            node for node in _nodes(made) if isinstance(node, dict) and "kind" not in str(node)
        ]
        if nodes:
            _widen(random, random.choice(nodes))
    return made


def _widen(random: Random, node: dict[str, Any]) -> None:
    changes: list[Edit] = [
        _widen_type,
        _make_optional,
        _free,
        _free,
        _more_values,
        _not_required,
        _new_field,
    ]
    random.choice(changes)(random, node, ())


def _free(random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    limits = "minimum maximum minLength maxLength pattern format minItems maxItems uniqueItems"
    for keyword in random.sample(limits.split(), 5):
        # Without a limit to its length, a tuple has members that nobody has described.
        if "prefixItems" not in node:
            node.pop(keyword, None)


def _more_values(_random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    if "enum" in node or "const" in node:
        node["enum"] = [*(node.pop("enum", None) or [node.pop("const")]), "new"]


def _not_required(_random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    node.pop("required", None)


def _new_field(_random: Random, node: dict[str, Any], _names: tuple[str, ...]) -> None:
    if "properties" in node and node.get("additionalProperties") is False:
        node["properties"]["new"] = {"type": "string"}


def plain_document(random: Random, depth: int = DEPTH) -> dict[str, Any]:
    """A schema as models have it: closed objects, lists, unions with null, values, limits."""
    names = random.sample(NAMES, random.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _plain(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.5],
        "additionalProperties": False,
    }


def _plain(random: Random, depth: int) -> Schema:
    maker = _Maker(random, ())
    choice = random.random()
    if depth == 0 or choice < 0.4:
        return maker.scalar(0) if random.random() < 0.7 else {"enum": random.sample(STRINGS, 2)}
    if choice < 0.55:
        return plain_document(random, depth)
    if choice < 0.7:
        return {"anyOf": [_plain(random, depth - 1), {"type": "null"}]}
    if choice < 0.8:
        return {"type": "array", "items": _plain(random, depth - 1)}
    if choice < 0.9:
        return {"type": "object", "additionalProperties": _plain(random, depth - 1)}
    items = [_plain(random, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "minItems": 2, "maxItems": 2}


# ── values ─────────────────────────────────────────────────────────────────────────────────────


def instance(random: Random, schema: Schema, root: dict[str, Any], depth: int = 7) -> Any:
    """A value that may well be valid under the schema."""
    if isinstance(schema, bool) or not schema or depth == 0:
        return _anything(random, depth)
    if "$ref" in schema:
        target = root["$defs"][schema["$ref"].removeprefix("#/$defs/")]
        return instance(random, target, root, depth - 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return random.choice(schema["enum"])
    for keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(keyword) and (random.random() < 0.8 or "type" not in schema):
            chosen = random.choice(schema[keyword])
            made = instance(random, chosen, root, depth - 1)
            tag = schema.get("discriminator", {}).get("propertyName")
            if tag and isinstance(made, dict):
                made[tag] = instance(random, _field(chosen, tag), root, depth - 1)
            return made
    kind = schema.get("type", random.choice(TYPES))
    kind = random.choice(kind) if isinstance(kind, list) else kind
    return _of_type(random, kind, schema, root, depth)


def _field(schema: Schema, name: str) -> Schema:
    return schema.get("properties", {}).get(name, True) if isinstance(schema, dict) else True


def _of_type(random: Random, kind: str, schema: Any, root: dict[str, Any], depth: int) -> Any:
    if kind == "object":
        return _object(random, schema, root, depth)
    if kind == "array":
        return _array(random, schema, root, depth)
    if kind == "string":
        return random.choice(STRINGS)
    if kind in {"integer", "number"}:
        return _number(random, kind, schema)
    return None if kind == "null" else random.random() < 0.5


def _number(random: Random, kind: str, schema: dict[str, Any]) -> Any:
    pool = [number for number in NUMBERS if kind == "number" or isinstance(number, int)]
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    pool += [
        schema[keyword] + step for keyword in limits if keyword in schema for step in (-1, 0, 1)
    ]
    return random.choice(pool)


def _array(random: Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> list[Any]:
    prefix = schema.get("prefixItems", [])
    fewest = schema.get("minItems", 0)
    count = random.randint(fewest, max(fewest, min(schema.get("maxItems", 3), len(prefix) + 2)))
    rest = schema.get("items", True)
    nodes = [prefix[place] if place < len(prefix) else rest for place in range(count)]
    return [instance(random, node, root, depth - 1) for node in nodes]


def _object(random: Random, schema: dict[str, Any], root: dict[str, Any], depth: int) -> Any:
    fields = schema.get("properties", {})
    made = {}
    for name, node in fields.items():
        if name in schema.get("required", ()) or random.random() < 0.5:
            made[name] = instance(random, node, root, depth - 1)
    for name in schema.get("required", ()):
        made.setdefault(name, _anything(random, 1))
    rest = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    patterns = list(schema.get("patternProperties", {}).values())
    if rest is not False or patterns:
        for name in random.sample([*NAMES, "d", "e", "kind"], random.randint(0, 2)):
            chosen = random.choice([*patterns, rest])
            made.setdefault(name, instance(random, chosen, root, depth - 1))
    return made


def _anything(random: Random, depth: int) -> Any:
    choice = random.random()
    if depth > 0 and choice < 0.15:
        return [_anything(random, depth - 1) for _ in range(random.randint(0, 2))]
    if depth > 0 and choice < 0.35:
        names = random.sample(NAMES, random.randint(0, 2))
        return {name: _anything(random, depth - 1) for name in names}
    return random.choice(random.choice([SCALARS, STRINGS, NUMBERS]))
