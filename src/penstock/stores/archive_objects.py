"""Archived objects as bytes: lines through a compressor, and back, with their checksums."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType

from penstock.core.archive import ArchivedObject, ArchivePlan, folder_of
from penstock.core.archive_lines import body_of_line, line_of, position_of
from penstock.core.wire import is_hole, sent_us_of
from penstock.errors import ArchiveDamaged, SettingsError
from penstock.stores.objects import ObjectStore

LEVEL = 3


@dataclass(frozen=True, slots=True)
class PackedObject:
    """A range as it will be stored."""

    plan: ArchivePlan
    data: bytes

    def as_stored(self) -> ArchivedObject:
        """What the books will say of it."""
        return as_stored(self.plan, self.data)


class Packer:
    """Packs rows of the outbox into one object; only what is compressed stays in memory."""

    def __init__(self, stream_name: str, after: int) -> None:
        self._stream_name = stream_name
        self._first = after + 1
        self.last = after
        """The last position that was packed."""
        self.lines = 0
        """How many events and holes were packed."""
        self._events = 0
        self.raw_bytes = 0
        self._newest_us = 0
        self._digest = hashlib.sha256()
        self._compressor = _zstandard().ZstdCompressor(level=LEVEL).compressobj()
        self._chunks: list[bytes] = []

    def add(self, rows: list[tuple[int, str]]) -> None:
        """Pack what follows the last position."""
        lines = [line_of(position, body) for position, body in rows]
        content = "".join(f"{line}\n" for line in lines).encode()
        self._digest.update(content)
        self._chunks.append(self._compressor.compress(content))
        self.raw_bytes += len(content)
        self.lines += len(lines)
        self._events += sum(not is_hole(body) for _, body in rows)
        self._newest_us = max(self._newest_us, *(sent_us_of(body) for _, body in rows))
        self.last = rows[-1][0]

    def finish(self) -> PackedObject:
        """The object; nothing can be added any more."""
        self._chunks.append(self._compressor.flush())
        plan = ArchivePlan(
            stream_name=self._stream_name,
            first=self._first,
            last=self.last,
            events=self._events,
            raw_bytes=self.raw_bytes,
            content_sha256=self._digest.hexdigest(),
            newest_us=self._newest_us,
        )
        return PackedObject(plan, b"".join(self._chunks))


class UnpackedObject:
    """The lines of an object, and the bodies that they were made from."""

    def __init__(self, plan: ArchivePlan, content: bytes) -> None:
        self.plan = plan
        self.lines = content.removesuffix(b"\n").split(b"\n")
        self._positions = [position_of(line) for line in self.lines]

    def index_behind(self, after: int) -> int:
        """Which line comes first behind a position."""
        return bisect_right(self._positions, after)

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        """Positions and bodies behind `after`, in order, holes among them."""
        start = self.index_behind(after)
        end = start + count
        return [
            (position, body_of_line(line.decode()))
            for position, line in zip(
                self._positions[start:end], self.lines[start:end], strict=True
            )
        ]


def as_stored(plan: ArchivePlan, data: bytes) -> ArchivedObject:
    """What the books say of a plan that is stored as these bytes."""
    sha256 = hashlib.sha256(data).hexdigest()
    return ArchivedObject(**asdict(plan), stored_bytes=len(data), sha256=sha256)


def unpack(plan: ArchivePlan, data: bytes) -> UnpackedObject:
    """What an object holds, if that is what was planned. Raises ArchiveDamaged."""
    zstandard = _zstandard()
    try:
        # Not a byte more than was planned: a few stored ones can pretend to be any number.
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            content = reader.read(plan.raw_bytes + 1)
    except zstandard.ZstdError as error:
        raise _damaged(plan, f"it cannot be decompressed ({error})") from None
    if hashlib.sha256(content).hexdigest() != plan.content_sha256:
        raise _damaged(plan, "its content has another checksum")
    return UnpackedObject(plan, content)


def load(store: ObjectStore, plan: ArchivePlan) -> UnpackedObject:
    """Fetch an object and unpack it. Raises ArchiveDamaged, also where it is not there.

    Raises ServerUnavailable where nothing of its stream is: its volume may be away.
    """
    data = store.get(plan.name)
    if data is None:
        store.require_folders([folder_of(plan.stream_name)])
        raise _damaged(plan, f"{store.url} does not hold it")
    return unpack(plan, data)


def _damaged(plan: ArchivePlan, why: str) -> ArchiveDamaged:
    return ArchiveDamaged(
        f"The archived object {plan.name} is not what was archived: {why}. Nothing of it was given "
        "out, and nothing was skipped. Restore it from a copy or an older version of the store; "
        "`penstock archive verify` finds all that are damaged."
    )


@cache
def _zstandard() -> ModuleType:
    try:
        import zstandard  # noqa: PLC0415 - an extra, and only for who archives
    except ImportError:
        raise SettingsError(
            'An archive needs more than the core: pip install "penstock[archive]".'
        ) from None
    return zstandard
