"""An event on its way into the outbox: encoded, and known to be storable as it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final
from uuid import UUID

import orjson

from penstock.core.contracts import Promise
from penstock.core.encoding import (
    PATH_LENGTH_MAX,
    encode_plain,
    encode_typed,
    is_unstorable_text,
    require_size,
)
from penstock.core.events import Event, RawEvent
from penstock.errors import InvalidEvent

KEY_LENGTH_MAX: Final = 1000
_KEY_NUMBERS_END: Final = 10**KEY_LENGTH_MAX
VERSION_MAX: Final = 2**31 - 1
# PostgreSQL refuses arrays beyond 256 MiB; the limit leaves room for its own bookkeeping.
BATCH_BYTES_MAX: Final = 192 * 1024 * 1024

# The same rules as the CHECKs of outbox_event, found out before anything is written.
_STREAM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
_EVENT_TYPE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]{1,200}")


class Unset(Enum):
    """The type of UNSET."""

    UNSET = "UNSET"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET
"""Not given, where None has a meaning of its own."""

Key = str | int | UUID | None


@dataclass(frozen=True, slots=True)
class Limits:
    """How large an event may be."""

    payload_bytes_max: int
    metadata_bytes_max: int


@dataclass(frozen=True, slots=True)
class OutgoingEvent:
    """An event as the outbox takes it; payload and metadata are JSON texts."""

    event_uuid: UUID
    stream_name: str
    event_type: str
    version: int
    key: str | None
    payload: str
    metadata: str
    promise: Promise | None = field(default=None, compare=False)
    """What others are told of it; an event without a class, or without a version, has none."""
    key_id: str | None = None
    """The data key that it is sealed with; None: it is plain."""
    producer: str | None = field(default=None, compare=False)
    """The pipeline that sends it, as policies name it; None: a program without one."""


def encode_event(
    stream_name: str,
    event: Event | RawEvent,
    *,
    event_uuid: UUID,
    limits: Limits,
    key: Key | Unset = UNSET,
    metadata: Mapping[str, Any] | None = None,
    promise: Promise | None = None,
    producer: str | None = None,
) -> OutgoingEvent:
    """The event as the outbox takes it. Raises InvalidEvent for what it could not give back."""
    _require_stream_name(stream_name)
    _require_uuid(event_uuid)
    if isinstance(event, Event):
        event_type, version, own_key = _identity_of(event)
        payload = encode_typed(event, event_type)
    elif isinstance(event, RawEvent):
        event_type, version, own_key = event.event_type, event.version, event.key
        payload = encode_plain(event.payload, f"the payload of {event_type}", "payload")
    else:
        raise InvalidEvent(
            f"{type(event).__name__} is not an event, so it was not sent. Pass an instance of an "
            "Event class, or RawEvent(event_type, payload)."
        )
    _require_event_type(event_type)
    require_size(payload, limits.payload_bytes_max, f"the payload of {event_type}", "payload")
    return OutgoingEvent(
        event_uuid,
        stream_name,
        event_type,
        _checked_version(event_type, version),
        _encode_key(event_type, own_key if isinstance(key, Unset) else key),
        payload.decode(),
        _encode_metadata(event_type, metadata, limits.metadata_bytes_max),
        promise,
        producer=producer,
    )


def batch_json(events: Sequence[OutgoingEvent]) -> str:
    """The argument of `events.send_many`; payload and metadata go in as they are."""
    batch = "[" + ",".join(map(_event_json, events)) + "]"
    size_bytes = len(batch) if batch.isascii() else len(batch.encode())
    if size_bytes > BATCH_BYTES_MAX:
        raise InvalidEvent(
            f"{len(events)} events of together {size_bytes} bytes are more than one transaction "
            f"may send ({BATCH_BYTES_MAX} bytes). Nothing was sent; commit in smaller portions."
        )
    return batch


def _event_json(event: OutgoingEvent) -> str:
    identity = {
        "event_uuid": event.event_uuid,
        "stream_name": event.stream_name,
        "event_type": event.event_type,
        "version": event.version,
        "key": event.key,
    }
    if event.key_id is not None:
        identity["key_id"] = event.key_id
    names = orjson.dumps(identity).decode()
    return f'{names[:-1]},"payload":{event.payload},"metadata":{event.metadata}}}'


# ── the event's names ──────────────────────────────────────────────────────────────────────────


def _identity_of(event: Event) -> tuple[str, int, Any]:
    event_class = type(event)
    event_type = getattr(event_class, "__event_type__", None)
    if event_type is None:
        raise InvalidEvent(
            "Event itself says nothing, so it was not sent. Send an instance of a subclass."
        )
    key_field = event_class.__event_key__
    own_key = None if key_field is None else getattr(event, key_field)
    version = event_class.__event_version__
    return event_type, 1 if version is None else version, own_key


def is_stream_name(name: object) -> bool:
    """Whether a stream can have this name."""
    return isinstance(name, str) and _STREAM_NAME.fullmatch(name) is not None


def _require_stream_name(stream_name: object) -> None:
    if not is_stream_name(stream_name):
        raise InvalidEvent(
            f"{_shortened(stream_name)} cannot name a stream, so nothing was sent. Start with a "
            "letter or digit and go on with letters, digits and . _ : / - (200 at most)."
        )


def _require_event_type(event_type: object) -> None:
    if not isinstance(event_type, str) or not _EVENT_TYPE.fullmatch(event_type):
        raise InvalidEvent(
            f"{_shortened(event_type)} cannot be an event type, so nothing was sent. Use 1 to 200 "
            "characters without control characters."
        )


def _require_uuid(event_uuid: object) -> None:
    if not isinstance(event_uuid, UUID):
        raise InvalidEvent(
            f"event_uuid is a {type(event_uuid).__name__}, so nothing was sent. Pass a uuid.UUID."
        )


def _checked_version(event_type: str, version: Any) -> int:
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= VERSION_MAX:
        raise InvalidEvent(
            f"{event_type}: version {_shortened(version)} was not sent. "
            f"Use an integer from 1 to {VERSION_MAX}."
        )
    return version


def _encode_key(event_type: str, key: Any) -> str | None:
    if key is None:
        return None
    if isinstance(key, str):
        # The text itself, as with numbers, also where an Enum's __str__ would print its name.
        text = str.__str__(key)
    elif isinstance(key, int) and not isinstance(key, bool):
        if abs(key) >= _KEY_NUMBERS_END:
            raise _key_too_long(event_type, f"more than {KEY_LENGTH_MAX}")
        text = int.__repr__(key)
    elif isinstance(key, UUID):
        text = str(key)
    else:
        raise InvalidEvent(
            f"{event_type}: a key of type {type(key).__name__} was not sent. "
            "Use a str, an int or a UUID, or None for an event without a key."
        )
    if len(text) > KEY_LENGTH_MAX:
        raise _key_too_long(event_type, str(len(text)))
    if is_unstorable_text(text):
        raise InvalidEvent(
            f"{event_type}: the key holds a NUL or half a surrogate pair, which PostgreSQL cannot "
            "store. Nothing was sent; remove or encode it."
        )
    return text


def _key_too_long(event_type: str, length: str) -> InvalidEvent:
    return InvalidEvent(
        f"{event_type}: a key of {length} characters was not sent. A key names one thing "
        f"whose events stay in order; use {KEY_LENGTH_MAX} characters at most."
    )


def _encode_metadata(
    event_type: str, metadata: Mapping[str, Any] | None, size_bytes_max: int
) -> str:
    if metadata is None:
        return "{}"
    what = f"the metadata of {event_type}"
    if not isinstance(metadata, Mapping):
        raise InvalidEvent(
            f"{what} is a {type(metadata).__name__}, so nothing was sent. Pass a dict."
        )
    encoded = encode_plain(dict(metadata), what, "metadata")
    require_size(encoded, size_bytes_max, what, "metadata")
    return encoded.decode()


def _shortened(value: object) -> str:
    try:
        return repr(value)[:PATH_LENGTH_MAX]
    except ValueError:
        # Python does not write numbers of thousands of digits.
        return f"(a long {type(value).__name__})"
