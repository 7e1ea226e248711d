"""Data keys as they may lie about: wrapped by a KMS, in the database and in copies beside a stream.

A copy is signed like an entry of the hot log. Whoever can write there can neither have an event
opened with another key, which its KMS and its seal prevent, nor declare a key shredded.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import orjson

from penstock.core.mac import MacKeys
from penstock.errors import EntryForged, MalformedEntry

HASHING_VERSION: Final = 0
"""The version of the secret that keys are hashed with: never rotated, for the sake of order."""
# No event has it, so a signature of the keys is never one of an entry.
_KEYS_POSITION: Final = 0
# No hexadecimal digit: the ids that keys were given before were random ones.
_DERIVED: Final = "k"
_DIGITS: Final = 32


@dataclass(frozen=True, slots=True)
class WrappedKey:
    """One version of a stream's data keys. Without its KMS it tells nothing."""

    stream_name: str
    version: int
    key_id: str
    wrapped: bytes | None
    """None: it was shredded."""
    kms_key_id: str

    @property
    def is_shredded(self) -> bool:
        """Whether nobody can ever unwrap it again."""
        return self.wrapped is None

    def may_be(self, secret: bytes) -> bool:
        """Whether this is its data key: its id tells, but for the first keys that were made."""
        if not self.key_id.startswith(f"v{self.version}-{_DERIVED}"):
            return True
        return self.key_id == key_id_of(self.version, secret)


def key_id_of(version: int, secret: bytes) -> str:
    """A data key's id, by which whoever holds it knows it. It tells nobody else anything of it."""
    digits = hmac.digest(secret, b"penstock data key id", "sha256").hex()[:_DIGITS]
    return f"v{version}-{_DERIVED}{digits}"


def encode_keys(stream_name: str, keys: Iterable[WrappedKey], mac_keys: MacKeys) -> bytes:
    """A copy of a stream's keys, signed, as JSON."""
    body = orjson.dumps(
        [
            {
                "version": key.version,
                "key_id": key.key_id,
                "wrapped": None if key.wrapped is None else base64.b64encode(key.wrapped).decode(),
                "kms_key_id": key.kms_key_id,
            }
            for key in sorted(keys, key=lambda key: key.version)
            if key.version != HASHING_VERSION
        ]
    )
    signature = mac_keys.sign(stream_name, _KEYS_POSITION, body)
    return orjson.dumps({"signature": signature.decode(), "keys": body.decode()})


def decode_keys(stream_name: str, copy: bytes, mac_keys: MacKeys) -> list[WrappedKey]:
    """The keys out of a copy. Raises MalformedEntry; EntryForged where others have written it."""
    try:
        document = orjson.loads(copy)
        key_id, _, mac = document["signature"].encode().partition(b" ")
        body = document["keys"].encode()
        is_signed = mac_keys.is_signed(stream_name, _KEYS_POSITION, body, key_id=key_id, mac=mac)
        found = [
            WrappedKey(
                stream_name,
                int(key["version"]),
                str(key["key_id"]),
                None if key["wrapped"] is None else base64.b64decode(key["wrapped"]),
                str(key["kms_key_id"]),
            )
            for key in orjson.loads(body)
        ]
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise MalformedEntry(
            f"The copy of the data keys of {stream_name} cannot be read ({type(error).__name__})."
        ) from None
    if not is_signed:
        raise EntryForged(f"The copy of the data keys of {stream_name} is not its publisher's.")
    return found
