"""Event classes from the contracts of another service: a module that reads as if written by hand.

What it reads is whatever the schemas accept, as far as pydantic can: it knows no leap seconds and
no year 0, and of numbers in exponential notation only those that a double holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.schema.catalogue import Contract
from penstock.core.schema.codegen_classes import ContractClasses, Module
from penstock.core.schema.codegen_lookup import described_by
from penstock.core.schema.codegen_names import (
    MODULES,
    ClassNames,
    class_like,
    is_identifier,
    property_names,
)
from penstock.core.schema.codegen_source import docstring

_STANDARD_LIBRARY = ("datetime", "decimal", "enum", "typing", "uuid")
_OTHERS = ("penstock", "pydantic")


def render_module(contracts: Sequence[Contract], *, header: str) -> str:
    """The source of a module with a class for every contract; the header is its docstring.

    The same contracts give the same text in whatever order they come. Nothing in them can run:
    names, defaults and descriptions of another service are literals in it, or no part of it.
    """
    ordered = sorted(contracts, key=lambda one: (one.event_type, -one.version))
    module = Module(ClassNames(name for one in ordered for name in property_names(one.json_schema)))
    for contract, event_name, suffix in _named(ordered, module.names):
        ContractClasses(module, contract, event_name, suffix).write_event()
    blocks = ["\n".join(_preamble(header, module.uses)), *module.blocks]
    return "\n\n\n".join(blocks) + "\n"


def _named(ordered: Sequence[Contract], names: ClassNames) -> list[tuple[Contract, str, str]]:
    """Contracts, their classes' names, and what tells the models of an older version apart."""
    newest: dict[str, Contract] = {}
    for contract in ordered:
        newest.setdefault(contract.event_type, contract)
    first = {id(one): names.claim(*_event_names(one)) for one in newest.values()}
    named = []
    for contract in ordered:
        suffix = "" if id(contract) in first else f"V{contract.version}"
        event_name = first.get(id(contract)) or names.claim(*_event_names(contract, suffix))
        named.append((contract, event_name, suffix))
    return named


def _event_names(contract: Contract, suffix: str = "") -> list[str]:
    title = described_by(contract.json_schema).get("title")
    titled = [title] if isinstance(title, str) and is_identifier(title) else []
    of_type = class_like(contract.event_type) or "UnnamedEvent"
    return [*titled, *(f"{one}{suffix}" for one in (*titled, of_type))]


def _preamble(header: str, uses: set[str]) -> list[str]:
    described = docstring(header)
    lines = [described, ""] if described else []
    lines += ["from __future__ import annotations"]
    for group in (_STANDARD_LIBRARY, _OTHERS):
        imports = [_import_from(module, uses) for module in group]
        if any(imports):
            lines += ["", *filter(None, imports)]
    return lines


def _import_from(module: str, uses: set[str]) -> str:
    names = sorted(name for name in uses if MODULES.get(name) == module)
    return f"from {module} import {', '.join(names)}" if names else ""
