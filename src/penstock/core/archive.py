"""Archived objects: a range of positions each, and the names under which a store holds them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import orjson

from penstock.errors import ArchiveDamaged

SUFFIX = ".ndjson.zst"
MANIFEST_FORMAT = 1
PROBES = ".penstock"
"""The folder for what is written only to see how a store behaves; no stream is called so."""
_RANGE = re.compile(r"(?P<first>\d{20})-(?P<last>\d{20})\.ndjson\.zst")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivePlan:
    """A range that will be, or is, one object; what it holds is fixed from now on."""

    stream_name: str
    first: int
    last: int
    """Holes count: the object of a stream reaches from its first to its last position."""
    events: int
    raw_bytes: int
    content_sha256: str
    """Of the lines, whatever a compressor makes of them."""
    newest_us: int
    """When its latest event was sent, in microseconds; 0 where it holds only holes."""

    @property
    def name(self) -> str:
        """Where the store holds it."""
        return object_name(self.stream_name, self.first, self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedObject(ArchivePlan):
    """An object that is in the store."""

    stored_bytes: int
    sha256: str
    """Of what is stored."""


@dataclass(frozen=True, slots=True)
class CutLimits:
    """When what waits becomes an object, and how large that may be."""

    count_max: int
    bytes_max: int
    age_seconds: float

    def are_reached(self, *, count: int, size_bytes: int, oldest_seconds: float) -> bool:
        """Whether what waits is enough, or has waited long enough."""
        return count > 0 and (
            count >= self.count_max
            or size_bytes >= self.bytes_max
            or oldest_seconds >= self.age_seconds
        )

    def are_full(self, *, count: int, size_bytes: int) -> bool:
        """Whether an object takes no more."""
        return count >= self.count_max or size_bytes >= self.bytes_max


def folder_of(stream_name: str) -> str:
    """The stream's folder; a slash would make streams lie within each other."""
    return stream_name.replace("/", "~")


def object_name(stream_name: str, first: int, last: int) -> str:
    """Names that sort as their ranges do."""
    return f"{folder_of(stream_name)}/{first:020d}-{last:020d}{SUFFIX}"


def range_of(stream_name: str, name: str) -> tuple[int, int] | None:
    """The range in an object's name; None for anything else that lies in the folder."""
    folder, _, file_name = name.rpartition("/")
    found = _RANGE.fullmatch(file_name)
    if folder != folder_of(stream_name) or found is None:
        return None
    return int(found["first"]), int(found["last"])


def superseded_name(stream_name: str, name: str, token: str) -> str:
    """Where an object goes that belongs to a past which PostgreSQL has lost."""
    file_name = name.rpartition("/")[2].removesuffix(SUFFIX)
    return f"{folder_of(stream_name)}/superseded/{file_name}-{token}{SUFFIX}"


def manifest_name(stream_name: str) -> str:
    """Where readers without the database find what is archived."""
    return f"{folder_of(stream_name)}/manifest.json"


def manifest_json(stream_name: str, objects: Iterable[ArchivedObject]) -> bytes:
    """What is archived of a stream, for readers without the database."""
    listed = [asdict(found) | {"name": found.name} for found in objects]
    for found in listed:
        del found["stream_name"]
    described = {"format": MANIFEST_FORMAT, "stream": stream_name, "objects": listed}
    return orjson.dumps(described, option=orjson.OPT_INDENT_2)


def parse_manifest(stream_name: str, raw: bytes) -> list[ArchivedObject]:
    """What a manifest lists, in order. Raises ArchiveDamaged for anything else."""
    try:
        described: dict[str, Any] = orjson.loads(raw)
        if (described["format"], described["stream"]) != (MANIFEST_FORMAT, stream_name):
            raise ValueError(f"not a manifest of {stream_name} in format {MANIFEST_FORMAT}")
        return [_listed(stream_name, listed) for listed in described["objects"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArchiveDamaged(
            f"{manifest_name(stream_name)} in the archive cannot be read: {error}. Nothing was "
            "skipped. The archiver writes it again after its next object."
        ) from None


def _listed(stream_name: str, listed: dict[str, Any]) -> ArchivedObject:
    names = [field.name for field in fields(ArchivedObject) if field.name != "stream_name"]
    given = {name: listed[name] for name in names}
    for name, value in given.items():
        expected = str if name.endswith("sha256") else int
        if type(value) is not expected:
            raise TypeError(f"{name} is {value!r}")
    return ArchivedObject(stream_name=stream_name, **given)
