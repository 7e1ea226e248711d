"""Sealing: a confidential event is ciphertext from its sender's process to its handler's.

An event is sealed with AES-256-GCM together with what it is: its stream, identity, type, version,
data key and hashed key. Taken to another place, or altered in one bit, it does not open. Nonces
come from the caller.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import replace
from typing import Any, Final, Protocol

import orjson

from penstock.core.outgoing import OutgoingEvent
from penstock.core.wire import Entry
from penstock.errors import ExtraMissing, SealBroken

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
_TAG_BYTES: Final = 16
_EVENT_FORMAT: Final = "penstock event 1"
_TEXT_FORMAT: Final = "penstock text 1"
SEALED_TEXT_PREFIX: Final = "penstock-sealed:"


class DataKey:
    """A key that seals and opens. It is never printed."""

    __slots__ = ("_cipher", "key_id")

    def __init__(self, key_id: str, secret: bytes) -> None:
        self.key_id = key_id
        self._cipher = cipher_of(secret)

    def __repr__(self) -> str:
        return f"DataKey({self.key_id!r})"

    def seal(self, plain: bytes, bound_to: bytes, nonce: bytes) -> str:
        """The ciphertext as text, which opens only together with `bound_to`."""
        sealed: bytes = nonce + self._cipher.encrypt(nonce, plain, bound_to)
        return base64.b64encode(sealed).decode()

    def open(self, sealed: str, bound_to: bytes) -> bytes:
        """The plaintext. Raises SealBroken for anything that was not sealed just so."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - an extra

        try:
            raw = base64.b64decode(sealed, validate=True)
            if len(raw) < NONCE_BYTES + _TAG_BYTES:
                raise SealBroken(f"it is too short to be sealed with {self.key_id}")
            plain: bytes = self._cipher.decrypt(raw[:NONCE_BYTES], raw[NONCE_BYTES:], bound_to)
        except (InvalidTag, binascii.Error):
            raise SealBroken(f"it was not sealed like this with {self.key_id}") from None
        return plain


def cipher_of(secret: bytes) -> Any:
    """AES-256-GCM with this key. Raises ExtraMissing where the package is not installed."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - an extra
    except ImportError:
        raise ExtraMissing("Encryption", "cryptography", "crypto") from None
    assert len(secret) == KEY_BYTES, "AES-256 takes keys of 32 bytes"
    return AESGCM(secret)


# ── events ─────────────────────────────────────────────────────────────────────────────────────


def hashed_key(key: str, secret: bytes) -> str:
    """What stands for an event's key where everybody may look: equal for equal keys."""
    return hmac.digest(secret, key.encode(), "sha256").hex()


def sealed_event(
    event: OutgoingEvent, key: DataKey, hashing_secret: bytes, nonce: bytes
) -> OutgoingEvent:
    """The same event with key, metadata and payload for nobody without the data key."""
    hashed = None if event.key is None else hashed_key(event.key, hashing_secret)
    # One field a line and the payload last, as in every entry: JSON has no line breaks of its own.
    plain = b"\n".join((orjson.dumps(event.key), event.metadata.encode(), event.payload.encode()))
    bound_to = _identity(
        event.stream_name,
        str(event.event_uuid),
        event.event_type,
        event.version,
        key.key_id,
        hashed,
    )
    payload = f'"{key.seal(plain, bound_to, nonce)}"'
    return replace(event, key=hashed, metadata="{}", payload=payload, key_id=key.key_id)


def opened_event(event: OutgoingEvent, key: DataKey) -> OutgoingEvent:
    """The event that `sealed_event` was given. Raises SealBroken where anything was altered."""
    bound_to = _identity(
        event.stream_name,
        str(event.event_uuid),
        event.event_type,
        event.version,
        event.key_id,
        event.key,
    )
    plain_key, metadata, payload = _opened(event.payload, event.key_id, key, bound_to)
    return replace(
        event,
        key=orjson.loads(plain_key),
        metadata=metadata.decode(),
        payload=payload.decode(),
        key_id=None,
    )


def opened_entry(entry: Entry, key: DataKey) -> Entry:
    """The entry as it was sent, for a handler's eyes; its key id still tells that it was sealed.

    Raises SealBroken where anything of it was altered, or it stands for another event.
    """
    bound_to = _identity(
        entry.stream_name,
        entry.event_uuid,
        entry.event_type,
        entry.version,
        entry.key_id,
        entry.key,
    )
    plain_key, metadata, payload = _opened(entry.payload, entry.key_id, key, bound_to)
    term, outbox_id, key_id, created_us, _, _ = entry.fields
    metadata = _with_creation_time(metadata, entry.created_at_ms)
    fields = (term, outbox_id, key_id, created_us, plain_key, metadata)
    return entry._replace(fields=fields, payload=payload)


def _opened(
    payload: bytes | str, key_id: str | None, key: DataKey, bound_to: bytes
) -> tuple[bytes, bytes, bytes]:
    """Key, metadata and payload, each as JSON."""
    try:
        sealed = orjson.loads(payload)
    except orjson.JSONDecodeError:
        sealed = None
    if not isinstance(sealed, str) or key.key_id != key_id:
        raise SealBroken(f"it carries the name of {key_id} and is not sealed")
    plain_key, metadata, opened = key.open(sealed, bound_to).split(b"\n", 2)
    return plain_key, metadata, opened


def _with_creation_time(metadata: bytes, created_at_ms: int) -> bytes:
    """PostgreSQL adds the time to every event's metadata; a sealed one's it could not reach."""
    separator = b"" if metadata == b"{}" else b","
    return b'%b%b"__creation_timestamp_ms__":%d}' % (metadata[:-1], separator, created_at_ms)


def _identity(*parts: str | int | None) -> bytes:
    return orjson.dumps([_EVENT_FORMAT, *parts])


# ── texts about events ─────────────────────────────────────────────────────────────────────────


class Box(Protocol):
    """Keeps texts about one sealed event, under the event's own key."""

    def seal(self, text: str, purpose: str) -> str:
        """The text for nobody without the key; it opens for the same purpose only."""

    def open(self, sealed: str, purpose: str) -> str:
        """The text again. Raises SealBroken."""


def seal_text(text: str, entry: Entry, purpose: str, key: DataKey, nonce: bytes) -> str:
    """A text that may quote the event, kept beside it under the same key."""
    sealed = key.seal(text.encode(), _purpose(entry, purpose, key.key_id), nonce)
    return f"{SEALED_TEXT_PREFIX}{key.key_id}:{sealed}"


def is_sealed_text(text: str | None) -> bool:
    """Whether this is what `seal_text` made."""
    return text is not None and text.startswith(SEALED_TEXT_PREFIX)


def open_text(text: str, entry: Entry, purpose: str, key: DataKey) -> str:
    """The text again. Raises SealBroken where it was altered, or written beside another event."""
    key_id, _, sealed = text.removeprefix(SEALED_TEXT_PREFIX).partition(":")
    if not is_sealed_text(text) or key_id != key.key_id:
        raise SealBroken(f"it is not sealed with {key.key_id}")
    return key.open(sealed, _purpose(entry, purpose, key.key_id)).decode()


def _purpose(entry: Entry, purpose: str, key_id: str) -> bytes:
    return orjson.dumps([_TEXT_FORMAT, entry.stream_name, entry.event_uuid, purpose, key_id])
