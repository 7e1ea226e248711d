"""The schema gate: what is in the code, compared with what was agreed on before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from penstock.core.schema import Break, Difference, Rule, check, differences, schema_hash
from penstock.core.schema.catalogue import Catalogue, Contract, StreamEntry, comparable
from penstock.core.schema.documents import contract_in
from penstock.stores.queries import Queries

Identity = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason not to deploy: whom it hurts, and what to do."""

    event_type: str
    version: int
    path: str
    """The field; empty: the event itself."""
    rule: str
    reason: str
    who: str
    fix: str

    def __str__(self) -> str:
        place = f" {self.path}" if self.path else ""
        return (
            f"{self.event_type} v{self.version}{place}: {self.reason} [{self.rule}]\n"
            f"    breaks: {self.who}\n"
            f"    fix: {self.fix}"
        )


@dataclass(frozen=True, slots=True)
class Gate:
    """What the gate says."""

    findings: tuple[Finding, ...]
    changed: tuple[Identity, ...]
    """Differ from their lock and break nobody."""
    compared: int
    former: int
    """Were locked by a former release, and do not name all that readers demand."""


def pass_gate(locked: Sequence[Contract], code: Sequence[Contract], rule: Rule) -> Gate:
    """Compare the code with its lock."""
    present = _by_identity(code)
    findings: list[Finding] = []
    changed: list[Identity] = []
    for contract in locked:
        identity = (contract.event_type, contract.version)
        if identity not in present:
            findings += _judge_missing(contract, code)
            continue
        old, new = comparable(contract, present[identity])
        breaks = check(old, new, rule)
        findings += [_finding(identity, each) for each in breaks]
        findings += _judge_upcasters(contract, present[identity])
        findings += _judge_key(contract, present[identity])
        if not breaks and schema_hash(old) != schema_hash(new):
            changed.append(identity)
    known = _by_identity(locked)
    findings += [
        Finding(
            *identity,
            path="",
            rule="not-locked",
            reason="it is in the code and not in the lock, so nobody watches over it",
            who="nobody yet; the next change would go unnoticed",
            fix="Run `penstock schema lock` and commit the file.",
        )
        for identity in present
        if identity not in known
    ]
    former = sum(not contract.names_demands for contract in locked)
    return Gate(tuple(findings), tuple(changed), len(locked), former)


def breaking(locked: Sequence[Contract], code: Sequence[Contract], rule: Rule) -> list[Finding]:
    """What must not be locked over: the same version, changed so that somebody breaks."""
    findings = pass_gate(locked, code, rule).findings
    present = _by_identity(code)
    return [
        each
        for each in findings
        if each.rule != "not-locked" and (each.event_type, each.version) in present
    ]


def _judge_missing(contract: Contract, code: Sequence[Contract]) -> Iterator[Finding]:
    """A locked version that no class has any more: it has to be readable as a later one."""
    event_type, version = contract.event_type, contract.version
    versions = {one.version: one for one in code if one.event_type == event_type}
    later = [one for one in versions.values() if one.version > version]
    if any(version in one.upcasts_from for one in later):
        return
    if later:
        latest = max(later, key=lambda one: one.version)
        yield Finding(
            event_type,
            version,
            path="",
            rule="upcaster-missing",
            reason=f"the code has version {latest.version}, and no upcaster leads there from "
            f"version {version}",
            who="consumers on the new code, reading events that are already written",
            fix=f"Write one with @….upcast(from_version={version}), or keep the class of version "
            f"{version}; if no such event is left anywhere, delete its file.",
        )
        return
    yield Finding(
        event_type,
        version,
        path="",
        rule="event-removed",
        reason="it is locked, and no class has this type any more"
        if not versions
        else f"it is locked, and the code has version {max(versions)} only",
        who="consumers on the new code, reading events that are already written",
        fix="Bring the class back; if nobody sends or reads it any more, delete its file.",
    )


def _judge_upcasters(locked: Contract, present: Contract) -> Iterator[Finding]:
    for version in sorted(set(locked.upcasts_from) - set(present.upcasts_from)):
        yield Finding(
            locked.event_type,
            locked.version,
            path="",
            rule="upcaster-removed",
            reason=f"events of version {version} could be read as this, and cannot any more",
            who="consumers on the new code, reading events that are already written",
            fix=f"Bring the upcaster from version {version} back.",
        )


def _judge_key(locked: Contract, present: Contract) -> Iterator[Finding]:
    if locked.key != present.key:
        yield Finding(
            locked.event_type,
            locked.version,
            path="",
            rule="key-changed",
            reason=f"its key was {locked.key or 'none'} and is {present.key or 'none'}",
            who="consumers that rely on the order of a key: old and new events of one thing are "
            "in no order to each other",
            fix="Keep the key, or send under a new event type.",
        )


def _finding(identity: Identity, found: Break) -> Finding:
    return Finding(*identity, found.path, found.rule, found.reason, found.who, found.fix)


def _by_identity(contracts: Sequence[Contract]) -> dict[Identity, Contract]:
    return {(one.event_type, one.version): one for one in contracts}


# ── what differs ───────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ContractDiff:
    """What differs between two descriptions of one type and version, and for whom that matters."""

    event_type: str
    version: int
    only_in: str | None
    """`a` or `b`, where the other side does not have it."""
    differences: tuple[Difference, ...] = ()
    backward: bool = True
    forward: bool = True


def compare(a: Sequence[Contract], b: Sequence[Contract]) -> list[ContractDiff]:
    """Everything in which two sets of contracts differ; `a` is the older one."""
    older, newer = _by_identity(a), _by_identity(b)
    found = []
    for identity in sorted(older.keys() | newer.keys()):
        if identity not in newer or identity not in older:
            side = "a" if identity in older else "b"
            found.append(ContractDiff(*identity, only_in=side))
            continue
        old, new = comparable(older[identity], newer[identity])
        changes = tuple(differences(old, new))
        if changes:
            found.append(
                ContractDiff(
                    *identity,
                    only_in=None,
                    differences=changes,
                    backward=not check(old, new, Rule.BACKWARD),
                    forward=not check(old, new, Rule.FORWARD),
                )
            )
    return found


# ── what a database knows ──────────────────────────────────────────────────────────────────────


def read_catalogue(
    connection: psycopg.Connection[Any], schema: str, stream_name: str | None = None
) -> Catalogue:
    """The streams, or one of them, with what is sent to them, by whom, and for whom."""
    sql = Queries("contract.sql", schema)
    readers: dict[str, list[str]] = {}
    for stream, name in connection.execute(sql["readers"]).fetchall():
        readers.setdefault(stream, []).append(name)
    contracts: dict[str, list[Contract]] = {}
    producers: dict[str, set[str]] = {}
    rows = connection.execute(sql["catalogue"], {"stream_name": stream_name}).fetchall()
    for stream, described, names in rows:
        contracts.setdefault(stream, []).append(contract_in(described))
        producers.setdefault(stream, set()).update(names)
    return Catalogue(
        title="Events",
        version="recorded",
        streams=tuple(
            StreamEntry(
                name=stream,
                contracts=tuple(found),
                producers=tuple(sorted(producers[stream])),
                consumers=tuple(readers.get(stream, ())),
            )
            for stream, found in contracts.items()
        ),
    )
