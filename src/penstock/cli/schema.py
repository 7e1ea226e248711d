"""`penstock schema`: lock what events look like, and know before a deployment who would break."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.output import print_json, print_note
from penstock.cli.schema_annotations import annotation, command
from penstock.core.schema import Rule
from penstock.core.schema.asyncapi import asyncapi_document
from penstock.core.schema.catalogue import Catalogue, Contract
from penstock.core.schema.codegen import render_module
from penstock.core.schema.markdown import render_pages
from penstock.errors import OperationRefused, UsageError
from penstock.ops.contracts import (
    ContractDiff,
    Finding,
    Gate,
    breaking,
    compare,
    pass_gate,
    read_catalogue,
)
from penstock.stores.lock_files import read_file, read_lock, write_file, write_files, write_lock
from penstock.stores.migrations import require_current
from penstock.stores.postgres import connect
from penstock.stores.queries import DEFAULT_SCHEMA

FOLDER = Path("schemas")
CODE = "code"
_FORMER = (
    "files were locked by a former release, which did not write down all that readers demand (a "
    "time zone, the scheme of a URL, numbers as keys); `penstock schema lock` completes them."
)
PULLED = "Written by `penstock schema pull`"

application = typer.Typer(
    no_args_is_help=True, help="Lock, check, compare, fetch and document what events look like."
)

Folder = Annotated[
    Path, typer.Option("--folder", metavar="FOLDER", help="Where the lock is: schemas.")
]
RuleOption = Annotated[
    Rule,
    typer.Option(
        "--rule",
        help="backward: new code reads old events; forward: old code reads new ones; full: both.",
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="URL|FOLDER",
        help="A database that has recorded contracts, or a folder with a lock.",
    ),
]


class Format(StrEnum):
    """How findings are printed."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"


FormatOption = Annotated[
    Format, typer.Option("--format", help="text, json, or github for annotations.")
]


# ── the gate ───────────────────────────────────────────────────────────────────────────────────


@application.command("lock")
def lock(
    context: typer.Context,
    *,
    folder: Folder = FOLDER,
    rule: RuleOption = Rule.BACKWARD,
    force: Annotated[
        bool, typer.Option("--force", help="Lock a version although somebody breaks.")
    ] = False,
) -> None:
    """Write a JSON Schema file for each event class, to be committed and reviewed."""
    contracts = _contracts_in_code(invocation_of(context))
    if not force and (findings := breaking(read_lock(folder), contracts, rule)):
        _print_text(findings)
        raise OperationRefused(
            f"{len(findings)} changes would break somebody under the same version, so nothing was "
            "written. Raise the version and write an upcaster; if no such event was ever sent, "
            "--force locks it."
        )
    changed = write_lock(folder, contracts)
    for path in changed:
        print(path)
    print_note(f"{len(contracts)} contracts are locked in {folder}, {len(changed)} files changed.")


@application.command("check")
def check(
    context: typer.Context,
    *,
    folder: Folder = FOLDER,
    rule: RuleOption = Rule.BACKWARD,
    output: FormatOption = Format.TEXT,
    json_output: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Compare the code with the lock; exit 1 if somebody would break."""
    gate = pass_gate(read_lock(folder), _contracts_in_code(invocation_of(context)), rule)
    if json_output or output is Format.JSON:
        print_json(_gate_as_plain(gate, rule))
    elif output is Format.GITHUB:
        for finding in gate.findings:
            print(annotation(finding, folder))
    else:
        _print_text(gate.findings)
        _print_verdict(gate, rule, folder)
    raise typer.Exit(1 if gate.findings else 0)


def _print_text(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(finding)


def _print_verdict(gate: Gate, rule: Rule, folder: Path) -> None:
    for event_type, version in gate.changed:
        print_note(
            f"{event_type} v{version} has changed and breaks nobody; `penstock schema lock` "
            "brings its file up to date."
        )
    if gate.former:
        print_note(f"{gate.former} {_FORMER}")
    if gate.findings:
        print_note(f"{len(gate.findings)} findings under the rule {rule}.")
    else:
        print_note(f"{gate.compared} contracts in {folder} hold under the rule {rule}.")


def _gate_as_plain(gate: Gate, rule: Rule) -> dict[str, Any]:
    return {
        "rule": rule,
        "compared": gate.compared,
        "findings": [asdict(finding) for finding in gate.findings],
        "changed": [{"event_type": name, "version": number} for name, number in gate.changed],
        "former": gate.former,
        "holds": not gate.findings,
    }


# ── comparing ──────────────────────────────────────────────────────────────────────────────────


@application.command("diff")
def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="code, a folder, a file, or a URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; the newer of the two.")],
    *,
    output: FormatOption = Format.TEXT,
    json_output: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Show in what two sets of contracts differ, and for whom it matters; exit 1 if they do."""
    invocation = invocation_of(context)
    found = compare(_contracts_in(invocation, a), _contracts_in(invocation, b))
    if json_output or output is Format.JSON:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            _print_diff(each, a, b, is_for_github=output is Format.GITHUB)
        if not found:
            print_note("They are the same.")
    raise typer.Exit(1 if found else 0)


def _print_diff(each: ContractDiff, a: str, b: str, *, is_for_github: bool) -> None:
    name = f"{each.event_type} v{each.version}"
    if each.only_in is not None:
        lines = [f"only in {a if each.only_in == 'a' else b}"]
    else:
        verdicts = {"backward": each.backward, "forward": each.forward}
        words = ", ".join(
            f"{rule} {'compatible' if holds else 'BREAKS'}" for rule, holds in verdicts.items()
        )
        lines = [words, *(f"  {difference}" for difference in each.differences)]
    if is_for_github:
        level = "notice" if each.backward and each.forward else "warning"
        print(command(level, {"title": name}, "\n".join(lines)))
        return
    print(f"{name}: {lines[0]}")
    for line in lines[1:]:
        print(line)


# ── of other services, and for people ──────────────────────────────────────────────────────────


@application.command("pull")
def pull(
    context: typer.Context,
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="A stream of another service.")],
    *,
    origin: From = None,
    source_schema: Annotated[
        str, typer.Option(metavar="NAME", help="Penstock's schema in that database: events.")
    ] = DEFAULT_SCHEMA,
    to: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where to write them; else to stdout."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite a file that was written by hand.")
    ] = False,
) -> None:
    """Write the event classes of a stream as Python, from what its service has recorded."""
    contracts = _contracts_of(invocation_of(context), stream, origin, source_schema)
    header = f"{PULLED} {stream}; change it there, and pull again."
    text = render_module(contracts, header=header)
    if to is None:
        print(text, end="")
        return
    if to.is_file() and not force and PULLED.encode() not in to.read_bytes():
        raise OperationRefused(
            f"{to} was not written by `penstock schema pull`, so it is left alone. Name another "
            "file, or add --force."
        )
    write_file(to, text)
    print_note(f"{len(contracts)} event classes are in {to}.")


@application.command("docs")
def docs(
    context: typer.Context,
    *,
    origin: From = None,
    to: Annotated[
        Path | None,
        typer.Option("--output", metavar="FOLDER", help="Where to write asyncapi.json and pages."),
    ] = None,
) -> None:
    """Write an AsyncAPI 3 document and pages for people; without --output, print the document."""
    invocation = invocation_of(context)
    catalogue = (
        _required_app(invocation).pipeline.catalogue()
        if origin is None
        else _recorded_in(origin, DEFAULT_SCHEMA)
    )
    document = json.dumps(asyncapi_document(catalogue), indent=2, ensure_ascii=False) + "\n"
    if to is None:
        sys.stdout.write(document)
        return
    texts = {"asyncapi.json": document, **render_pages(catalogue)}
    write_files(to, texts)
    for name in texts:
        print(to / name)


# ── where contracts come from ──────────────────────────────────────────────────────────────────


def _contracts_in_code(invocation: Invocation) -> list[Contract]:
    contracts = _required_app(invocation).pipeline.contracts()
    if not contracts:
        raise UsageError(
            f"{invocation.app} imports no event class that has a version, so there is nothing to "
            "compare. Import your event classes where the pipeline is, and give each a version."
        )
    return contracts


def _required_app(invocation: Invocation) -> Invocation:
    if invocation.app is None:
        raise UsageError("Event classes are in your code: say where, with --app module:attribute.")
    return invocation


def _contracts_in(invocation: Invocation, place: str) -> list[Contract]:
    if place == CODE:
        return _contracts_in_code(invocation)
    if Path(place).is_file():
        return [read_file(Path(place))]
    if Path(place).is_dir():
        return read_lock(Path(place))
    streams = _recorded_in(place, DEFAULT_SCHEMA).streams
    found = {(one.event_type, one.version): one for each in streams for one in each.contracts}
    return list(found.values())


def _contracts_of(
    invocation: Invocation, stream: str, origin: str | None, schema: str
) -> Sequence[Contract]:
    """What a stream carries: all of a lock, or what is recorded about it in a database."""
    if origin is not None and Path(origin).is_dir():
        return read_lock(Path(origin))
    streams = _recorded_in(origin or _source_of(invocation, stream), schema).streams
    for entry in streams:
        if entry.name == stream:
            return entry.contracts
    known = ", ".join(entry.name for entry in streams) or "none"
    raise OperationRefused(
        f"Nothing is recorded about a stream {stream!r} there; known are: {known}. Contracts are "
        "recorded when typed events are sent. Or name a folder that its service has written with "
        "`penstock schema lock`: --from FOLDER."
    )


def _recorded_in(url: str, schema: str) -> Catalogue:
    if not url.startswith(("postgresql:", "postgres:", "postgresql+")):
        raise UsageError(f"{url!r} is neither a folder, nor a file, nor a postgresql:// URL.")
    with connect(url, "penstock schema") as connection:
        require_current(connection, schema)
        return read_catalogue(connection, schema)


def _source_of(invocation: Invocation, stream: str) -> str:
    """Where a stream's own service keeps its records: as declared, or else here."""
    if invocation.app is not None and (source := invocation.pipeline.sources.get(stream)):
        if source.source_url is None:
            raise UsageError(
                f"pipeline.source({stream!r}, …) has no source_url, so its database is not known. "
                "Name it, or a folder with its lock, with --from."
            )
        return str(source.source_url)
    return invocation.settings.database_url
