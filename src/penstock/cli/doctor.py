"""`penstock doctor`: whether the surroundings are as they should be, and how to mend them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, plain, print_json
from penstock.core.diagnosis import Finding, Level
from penstock.ops.doctor import examine

EXIT_NO = 1
_MARKS = {Level.GOOD: "ok  ", Level.WARNING: "WARN", Level.PROBLEM: "FAIL"}


def doctor(
    context: typer.Context,
    *,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check servers, rights, schema, clocks and who is in the way; 1 if something does not work."""
    findings: list[Finding] = []
    for finding in examine(invocation_of(context).settings):
        findings.append(finding)
        if not json_output:
            _print(finding)
    if json_output:
        print_json([asdict(finding) for finding in findings])
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(EXIT_NO)


def _print(finding: Finding) -> None:
    console.print(f"{_MARKS[finding.level]}  {finding.check:<13} {plain(finding.what)}")
    if finding.fix:
        console.print(f"{'':<20}→ {plain(finding.fix)}")
