"""The bytes of an entry: the same on every tier.

An entry on the hot log is one Redis field. Its first line belongs to the transport: format
version, id of the MAC key, MAC. What follows is the body, one field a line, printed by PostgreSQL
(`events.entry`, `events.hole_entry`); the payload comes last and is never touched.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

import orjson

from penstock.core.events import StreamEvent
from penstock.core.mac import MacKeys
from penstock.errors import ContractError, EntryForged, MalformedEntry

FORMAT_VERSION = b"1"
KIND_EVENT = b"event"
KIND_HOLE = b"hole"
_BODY_FIELDS = 12
_HOLE_FIELDS = 4
_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Entry(NamedTuple):
    """One event as it lies on a tier, decoded as far as every reader needs it.

    A named tuple, because every event is one: it costs half of what a frozen dataclass does.
    """

    stream_name: str
    position: int
    origin: str
    event_uuid: str
    event_type: str
    version: int
    fields: tuple[bytes, ...]
    """term, outbox id, key id, creation time in microseconds, key, metadata."""
    payload: bytes

    @property
    def key(self) -> str | None:
        """The key whose order this event belongs to."""
        key: str | None = orjson.loads(self.fields[4])
        return key

    @property
    def key_id(self) -> str:
        """The data key that the event is sealed with; empty: it is plain."""
        return self.fields[2].decode()

    @property
    def created_at_ms(self) -> int:
        """When the event was sent, by the database's clock."""
        return int(self.fields[3]) // 1000

    def metadata(self) -> dict[str, Any]:
        """The event's metadata."""
        decoded: dict[str, Any] = self._json("metadata", self.fields[5])
        return decoded

    def as_stream_event(self, payload: Any) -> StreamEvent[Any]:
        """The handler's view, around a payload that has been decoded already."""
        _term, outbox_id, _key_id, created_us, key, _metadata = self.fields
        return StreamEvent(
            stream_name=self.stream_name,
            position=self.position,
            event_type=self.event_type,
            version=self.version,
            outbox_id=int(outbox_id),
            event_uuid=UUID(self.event_uuid),
            key=orjson.loads(key),
            payload=payload,
            metadata=self.metadata(),
            created_at=_EPOCH + timedelta(microseconds=int(created_us)),
        )

    def plain_payload(self) -> Any:
        """The payload as plain Python values."""
        return self._json("payload", self.payload)

    def _json(self, name: str, raw: bytes) -> Any:
        try:
            # orjson reads a number of more than 64 bits as a float.
            return json.loads(raw) if _LONG_NUMBER.search(raw) else orjson.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ContractError(
                f"The {name} of {self.stream_name}/{self.position} cannot be read: {error}"
            ) from None


class Hole(NamedTuple):
    """Positions that no event will ever have. Its place in the stream is its last one."""

    stream_name: str
    first: int
    last: int
    origin: str


def is_hole(body: str) -> bool:
    """Whether a body from PostgreSQL is a hole's."""
    return body.startswith("hole\n")


def sent_us_of(body: str) -> int:
    """When a body's event was sent, in microseconds since 1970; 0 for a hole."""
    return 0 if is_hole(body) else int(body.split("\n", 9)[8])


def encode_entry(stream_name: str, position: int, body: str, keys: MacKeys) -> bytes:
    """A body from PostgreSQL as it goes onto the hot log, signed for its place."""
    raw = body.encode()
    return b"%b %b\n%b" % (FORMAT_VERSION, keys.sign(stream_name, position, raw), raw)


def body_of(entry: Entry) -> bytes:
    """The body that an entry was decoded from, byte for byte."""
    term, outbox_id, key_id, created_us, key, metadata = entry.fields
    parts = (
        *(KIND_EVENT, entry.origin.encode(), term, outbox_id, entry.event_uuid.encode()),
        *(entry.event_type.encode(), str(entry.version).encode(), key_id, created_us, key),
        *(metadata, entry.payload),
    )
    return b"\n".join(parts)


def decode_entry(stream_name: str, position: int, raw: bytes, keys: MacKeys) -> Entry | Hole:
    """An entry of the hot log. Raises MalformedEntry for anything else, EntryForged included."""
    header, _, body = raw.partition(b"\n")
    parts = header.split(b" ")
    if len(parts) != 3 or parts[0] != FORMAT_VERSION:
        raise MalformedEntry(f"{stream_name}/{position}: unknown entry format {raw[:20]!r}")
    if not keys.is_signed(stream_name, position, body, key_id=parts[1], mac=parts[2]):
        raise EntryForged(f"{stream_name}/{position}: not signed for this place")
    return decode_record(stream_name, position, body)


def decode_record(stream_name: str, position: int, body: bytes) -> Entry | Hole:
    """What stands at a position, from any tier. Raises MalformedEntry."""
    if body.startswith(KIND_HOLE):
        return _decode_hole(stream_name, position, body.split(b"\n"))
    return decode_body(stream_name, position, body)


def decode_body(stream_name: str, position: int, body: bytes) -> Entry:
    """An event's body, from any tier. Raises MalformedEntry for anything else."""
    if b"\0" in body or not (body.isascii() or _is_text(body)):
        # PostgreSQL never printed this, and could not keep it either.
        raise MalformedEntry(f"{stream_name}/{position}: not text")
    return _decode(stream_name, position, body.split(b"\n", _BODY_FIELDS - 1))


def _decode_hole(stream_name: str, position: int, parts: list[bytes]) -> Hole:
    is_hole = len(parts) == _HOLE_FIELDS and parts[2].isdigit() and parts[3].isdigit()
    if not is_hole or not 0 < int(parts[2]) <= int(parts[3]) == position:
        raise MalformedEntry(f"{stream_name}/{position}: not a hole")
    return Hole(stream_name, int(parts[2]), position, parts[1].decode(errors="replace"))


def _decode(stream_name: str, position: int, parts: list[bytes]) -> Entry:
    if len(parts) != _BODY_FIELDS or parts[0] != KIND_EVENT or not _UUID.fullmatch(parts[4]):
        raise MalformedEntry(f"{stream_name}/{position}: not an event entry")
    if not (parts[2].isdigit() and parts[3].isdigit() and parts[8].isdigit()):
        raise MalformedEntry(f"{stream_name}/{position}: a field is not a number")
    if parts[9] != b"null" and not _is_json_text(parts[9]):
        raise MalformedEntry(f"{stream_name}/{position}: the key is not text")
    try:
        return Entry(
            stream_name,
            position,
            parts[1].decode(),
            parts[4].decode(),
            parts[5].decode(),
            int(parts[6]),
            (parts[2], parts[3], parts[7], parts[8], parts[9], parts[10]),
            parts[11],
        )
    except ValueError as error:
        raise MalformedEntry(f"{stream_name}/{position}: {error}") from None


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_json_text(raw: bytes) -> bool:
    try:
        return isinstance(orjson.loads(raw), str)
    except orjson.JSONDecodeError:
        return False
