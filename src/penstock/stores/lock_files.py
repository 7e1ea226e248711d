"""The schema lock: a folder with one JSON Schema file for each event type and version."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

from penstock.core.schema.catalogue import Contract
from penstock.core.schema.documents import contract_in, document_of
from penstock.core.schema.well_formed import require_well_formed
from penstock.errors import UsageError

_NAME_BYTES_MAX = 255
_SHORTENED_TO = 150
_PLAIN = frozenset(string.ascii_letters + string.digits + "._-")


def file_name(event_type: str, version: int) -> str:
    """Where the contract of this type and version is locked; no two have the same."""
    plain = "".join(
        character if character in _PLAIN else "".join(f"%{byte:02X}" for byte in character.encode())
        for character in event_type
    )
    name = f"{plain}.v{version}.json"
    if len(name) <= _NAME_BYTES_MAX:
        return name
    # File systems end there. No other name has a tilde, since that is not plain.
    digest = hashlib.sha256(event_type.encode()).hexdigest()
    return f"{plain[:_SHORTENED_TO]}~{digest}.v{version}.json"


def read_lock(folder: Path) -> list[Contract]:
    """Every contract in the folder, by type and version. Raises UsageError for other files."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder, so there can be no lock in it. Name another.")
    contracts = map(read_file, folder.glob("*.json"))
    return sorted(contracts, key=lambda one: (one.event_type, one.version))


def read_file(path: Path) -> Contract:
    """The contract in one file. Raises UsageError where it is none."""
    try:
        contract = contract_in(json.loads(path.read_bytes()))
        require_well_formed(contract.json_schema)
        # JSON can escape the half of a character, which is no text to anybody.
        render(contract).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is no locked contract: {error}. Nothing was compared; mend it or take it from "
            "version control again. Without looking at what was locked, `penstock schema lock "
            "--force` writes the files of all event classes anew; delete those of no class."
        ) from None
    return contract


def write_lock(folder: Path, contracts: Iterable[Contract]) -> list[Path]:
    """Lock these contracts. Returns the files that changed; the others are as they were."""
    texts = {file_name(one.event_type, one.version): render(one) for one in contracts}
    return write_files(folder, texts)


def write_files(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write texts under these names. Returns the files that changed. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be a folder: {error.strerror}. Nothing was written; name another."
        ) from None
    return [path for name, text in texts.items() if write_file(path := folder / name, text)]


def write_file(path: Path, text: str) -> bool:
    """Write a text; whether that changed the file. Raises UsageError where it cannot be there."""
    try:
        if path.exists() and path.read_bytes() == text.encode():
            return False
        path.write_bytes(text.encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}. It is as it was; name another place."
        ) from None
    return True


def render(contract: Contract) -> str:
    """The file's text: the same for the same contract, and easy to read in a review."""
    return json.dumps(document_of(contract), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
