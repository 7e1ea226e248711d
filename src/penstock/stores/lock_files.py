"""The schema lock: a folder with one JSON Schema file for each event type and version."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path

from penstock.core.schema.catalogue import Contract
from penstock.core.schema.documents import contract_in, document_of
from penstock.errors import UsageError

_PLAIN = frozenset(string.ascii_letters + string.digits + "._-")


def file_name(event_type: str, version: int) -> str:
    """Where the contract of this type and version is locked; no two have the same."""
    plain = "".join(
        character if character in _PLAIN else "".join(f"%{byte:02X}" for byte in character.encode())
        for character in event_type
    )
    return f"{plain}.v{version}.json"


def read_lock(folder: Path) -> list[Contract]:
    """Every contract in the folder, by type and version. Raises UsageError for other files."""
    contracts = map(read_file, folder.glob("*.json"))
    return sorted(contracts, key=lambda one: (one.event_type, one.version))


def read_file(path: Path) -> Contract:
    """The contract in one file. Raises UsageError where it is none."""
    try:
        return contract_in(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is no locked contract: {error}. Nothing was compared; take it from version "
            "control again, or write it with `penstock schema lock`."
        ) from None


def write_lock(folder: Path, contracts: Iterable[Contract]) -> list[Path]:
    """Lock these contracts. Returns the files that changed; the others are as they were."""
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for contract in contracts:
        path = folder / file_name(contract.event_type, contract.version)
        text = render(contract)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    return changed


def render(contract: Contract) -> str:
    """The file's text: the same for the same contract, and easy to read in a review."""
    return json.dumps(document_of(contract), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
