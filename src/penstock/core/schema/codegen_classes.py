"""Classes from JSON Schemas: events, the models they hold, and enumerations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core.schema.catalogue import Contract
from penstock.core.schema.codegen_lookup import (
    definition,
    described_by,
    is_model,
    required_names,
)
from penstock.core.schema.codegen_names import (
    NAME_LENGTH_MAX,
    ClassNames,
    class_like,
    field_names,
    is_identifier,
    member_names,
)
from penstock.core.schema.codegen_scalars import (
    NOTHING,
    Default,
    Schema,
    Typed,
    is_scalar,
    literal,
    unchecked,
)
from penstock.core.schema.codegen_source import (
    Atom,
    Brackets,
    Code,
    argument,
    call,
    comment,
    docstring,
    field_lines,
    is_text,
    laid_out,
    member_lines,
    name,
    names_in,
    quoted,
)
from penstock.core.schema.codegen_types import Types, union
from penstock.core.schema.nodes import ALIASES

_INDENT = 4
# Whatever a class says of its fields is said with these.
_USED_BY_FIELDS = frozenset({"AliasChoices", "Field", "dict", "list", "set"})


@dataclass(slots=True)
class Module:
    """The classes written so far, each one after those that it needs."""

    names: ClassNames
    blocks: list[str] = field(default_factory=list)
    uses: set[str] = field(default_factory=set)
    known: dict[str, Typed] = field(default_factory=dict)
    """By what describes them: versions of an event share the models that did not change."""

    def add(self, head: Code, body: Iterable[str], uses: Iterable[str]) -> None:
        """Adds a class."""
        self.blocks.append("\n".join((laid_out(head, 0), *body)))
        self.uses.update(uses, names_in(head))


@dataclass(frozen=True, slots=True)
class _Property:
    """One property of an object, and what its field is."""

    name: str
    described: Schema
    typed: Typed
    default: Default | None
    """None: it is required."""


class ContractClasses:
    """The classes of one contract."""

    def __init__(self, module: Module, contract: Contract, event_name: str, suffix: str) -> None:
        """The suffix is for models that are different in another version."""
        self._module = module
        self._contract = contract
        self._event_name = event_name
        self._suffix = suffix
        self._root = contract.json_schema
        self._types = Types(self._root, self)
        self._keys: dict[str, str] = {}

    def write_event(self) -> None:
        """Writes the event's class, and those that it needs and that are not there yet."""
        contract = self._contract
        root = described_by(self._root)
        fields = self._fields(root, self._event_name, 0)
        keywords = [
            argument("type", Atom(quoted(contract.event_type))),
            argument("version", Atom(str(int(contract.version)))),
        ]
        if contract.key in fields.names:
            keywords.append(argument("key", Atom(quoted(fields.names[contract.key]))))
        description = root.get("description") or contract.description
        self._module.add(
            _class_head(self._event_name, name("Event"), *keywords),
            fields.body(description, notes=_model_notes(root), is_open=not is_model(root)),
            fields.uses,
        )

    def defined(self, reference: str, depth: int) -> Typed | None:
        """The class of a definition; None if the definition is no class."""
        if reference in ("#", self._root.get("$ref")):
            return Typed(code=name(self._event_name))
        schema = definition(self._root, reference)
        if schema is None or not (is_model(schema) or _members_of(schema)):
            return None
        key = self._keys.get(reference) or self._keys.setdefault(reference, self._key_of(schema))
        known = self._module.known.get(key)
        hint = class_like(reference.rpartition("/")[2])
        return known or self._write(schema, key, hint, depth)

    def model(self, schema: Schema, hint: str, depth: int) -> Typed:
        """The class of an object that stands in the schema itself."""
        key = f"{hint} {self._key_of(schema)}"
        return self._module.known.get(key) or self._write(schema, key, hint, depth)

    def _write(self, schema: Schema, key: str, hint: str, depth: int) -> Typed:
        title = schema.get("title")
        titled = title if isinstance(title, str) else ""
        named = titled if is_identifier(titled) else class_like(titled) or hint or "Unnamed"
        named = named[: NAME_LENGTH_MAX - 10]
        class_name = self._module.names.claim(named, f"{named}{self._suffix}")
        if values := _members_of(schema):
            return self._write_enumeration(schema, key, class_name, values)
        # Known before it is written: its fields may be of its own type.
        typed = self._module.known[key] = Typed(code=name(class_name))
        fields = self._fields(schema, class_name, depth)
        self._module.add(
            _class_head(class_name, name("BaseModel")),
            fields.body(schema.get("description"), notes=_model_notes(schema)),
            fields.uses,
        )
        return typed

    def _write_enumeration(
        self, schema: Schema, key: str, class_name: str, values: Sequence[str | int]
    ) -> Typed:
        members = dict(zip(values, member_names(values), strict=True))
        lines = [member_lines(member, literal(value)) for value, member in members.items()]
        described = _docstring_lines(schema.get("description"))
        base = "StrEnum" if isinstance(values[0], str) else "IntEnum"
        notes = comment(unchecked(schema, "type", "enum", "const"), _INDENT)
        head = _class_head(class_name, name(base))
        self._module.add(head, [*described, *notes, *lines], ())

        def default(value: Any) -> Default | None:
            is_member = is_scalar(value) and not isinstance(value, bool) and value in members
            return Default(Atom(f"{class_name}.{members[value]}")) if is_member else None

        typed = Typed(code=name(class_name), default=default, is_hashable=True, is_exact=True)
        self._module.known[key] = typed
        return typed

    def _fields(self, schema: Schema, owner: str, depth: int) -> _Fields:
        properties = schema.get("properties")
        required = required_names(schema)
        found = []
        for one, described in properties.items() if isinstance(properties, Mapping) else ():
            hint = f"{owner}{class_like(one)}"
            typed = self._types.typed(described, hint, depth + 1)
            details = described if isinstance(described, Mapping) else {}
            found.append(_property(one, details, typed, is_required=one in required))
        return _Fields(found, is_open=schema.get("additionalProperties", False) is not False)

    def _key_of(self, schema: Schema) -> str:
        """The same for schemas that say the same, with all that they refer to."""
        told: list[object] = []
        reached: set[object] = set()
        waiting: list[Any] = [schema]
        # Without recursion: how deep a schema goes is not ours to decide.
        while waiting:
            one = waiting.pop()
            if isinstance(one, list):
                told.append(len(one))
                waiting.extend(one)
            elif isinstance(one, Mapping):
                told.append(sorted(one))
                waiting.extend(one[key] for key in sorted(one))
                reference = one.get("$ref")
                if isinstance(reference, str) and reference not in reached:
                    reached.add(reference)
                    waiting.append(definition(self._root, reference))
            else:
                told.append(repr(one))
        told += [self._event_name] if reached & {"#", self._root.get("$ref")} else []
        return repr(told)


class _Fields:
    """The fields of a class."""

    def __init__(self, properties: Sequence[_Property], *, is_open: bool) -> None:
        readable = [one for one in properties if is_text(one.name)]
        self._skipped = len(readable) < len(properties)
        self._properties = readable
        self._is_open = is_open
        types = {used for one in readable for used in names_in(one.typed.code)}
        self.names = field_names((one.name for one in readable), frozenset(types) | _USED_BY_FIELDS)
        self.uses: set[str] = types

    def body(
        self, description: object, *, notes: Sequence[str], is_open: bool = False
    ) -> list[str]:
        """The lines of the class below its head."""
        skipped = ["a property whose name is no text"] if self._skipped else []
        lines = _docstring_lines(description) + comment([*notes, *skipped], _INDENT)
        if self._is_open or is_open:
            self.uses.add("ConfigDict")
            lines += ['    model_config = ConfigDict(extra="allow")', ""]
        for one in self._properties:
            value = self._value(one)
            self.uses.update(names_in(value) if value else ())
            lines += comment(one.typed.notes, _INDENT)
            lines.append(field_lines(self.names[one.name], one.typed.code, value))
        is_empty = all(not line or line.lstrip().startswith("#") for line in lines)
        return [*lines, "    pass"] if is_empty else _without_last_blank(lines)

    def _value(self, one: _Property) -> Atom | Brackets | None:
        arguments = [*self._aliases(one)]
        description = one.described.get("description")
        if isinstance(description, str) and description:
            arguments.append(argument("description", Atom(quoted(_readable(description)))))
        if one.default is None:
            return call("Field", *arguments) if arguments else None
        if one.default.is_factory:
            return call("Field", argument("default_factory", one.default.code), *arguments)
        if arguments:
            return call("Field", argument("default", one.default.code), *arguments)
        return one.default.code

    def _aliases(self, one: _Property) -> list[Atom | Brackets]:
        own = Atom(quoted(one.name))
        is_renamed = self.names[one.name] != one.name
        given = one.described.get(ALIASES)
        # The name of another property stays with that one: what it holds need not fit here.
        others = {
            other: Atom(quoted(other))
            for other in (given if isinstance(given, list) else ())
            if is_text(other) and other not in self.names
        }
        if others:
            choices = argument("validation_alias", call("AliasChoices", own, *others.values()))
            return [choices, *([argument("serialization_alias", own)] if is_renamed else [])]
        return [argument("alias", own)] if is_renamed else []


def _property(one: str, described: Schema, typed: Typed, *, is_required: bool) -> _Property:
    if is_required:
        return _Property(one, described, typed, None)
    if described.get("default") is not None and (default := typed.default(described["default"])):
        return _Property(one, described, typed, default)
    if typed.factory and "default" not in described:
        factory = Default(name(typed.factory), is_factory=True)
        return _Property(one, described, typed, factory)
    lost = ("default",) if described.get("default") is not None else ()
    return _Property(one, described, union([typed, NOTHING], lost), Default(Atom("None")))


def _class_head(class_name: str, base: Code, *keywords: Code) -> Code:
    return Brackets(f"class {class_name}(", (base, *keywords), "):")


def _members_of(schema: Schema) -> list[str | int]:
    """The values of an enumeration; none if it has others than different texts or integers."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return []
    is_one_kind = all(map(is_text, values)) or all(type(one) is int for one in values)
    return list(dict.fromkeys(values)) if is_one_kind else []


def _model_notes(schema: Schema) -> tuple[str, ...]:
    checked = ["type", "properties", "required"]
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        checked += [keyword] if isinstance(schema.get(keyword), bool) else []
    return unchecked(schema, *checked)


def _docstring_lines(description: object) -> list[str]:
    text = docstring(_readable(description), _INDENT) if isinstance(description, str) else ""
    return [text, ""] if text else []


def _readable(text: str) -> str:
    """Without what UTF-8 cannot hold."""
    return text.encode(errors="replace").decode()


def _without_last_blank(lines: list[str]) -> list[str]:
    return lines if lines[-1] else lines[:-1]
