"""Findings as annotations of pull requests: workflow commands of GitHub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.ops.contracts import Finding
from penstock.stores.lock_files import file_name


def annotation(finding: Finding, folder: Path) -> str:
    """The command that shows a finding at its lock file."""
    file = folder / file_name(finding.event_type, finding.version)
    title = f"{finding.event_type} v{finding.version}: {finding.rule}"
    place = f"{finding.path}: " if finding.path else ""
    message = f"{place}{finding.reason}. Breaks: {finding.who}. {finding.fix}"
    return command("error", {"file": str(file), "title": title}, message)


def command(level: str, properties: Mapping[str, str], message: str) -> str:
    """A workflow command; its own syntax has to be escaped in what it says."""
    told = ",".join(
        f"{name}={_escaped(text).replace(':', '%3A').replace(',', '%2C')}"
        for name, text in properties.items()
    )
    return f"::{level} {told}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
