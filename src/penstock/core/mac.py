"""Signatures of what lies on the hot log, where anybody with access to Redis may write."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.require import require
from penstock.errors import MacKeyUnknown

SECRET_BYTES_MIN = 16
# 128 of HMAC-SHA256's 256 bits: nobody guesses them, and every entry carries them.
_MAC_BYTES = 16
_KEY_ID = re.compile(r"[A-Za-z0-9_.-]{1,40}")


@dataclass(frozen=True, slots=True)
class MacKeys:
    """The key that signs, and all keys whose signatures are accepted."""

    key_id: bytes
    secrets: Mapping[bytes, bytes]

    @classmethod
    def parse(cls, text: str) -> MacKeys:
        """Keys out of a setting: `id:hex`, several with commas; the first one signs."""
        secrets: dict[bytes, bytes] = {}
        for part in text.split(","):
            key_id, _, digits = part.strip().partition(":")
            try:
                secret = bytes.fromhex(digits)
            except ValueError:
                secret = b""
            require(
                _KEY_ID.fullmatch(key_id) is not None and len(secret) >= SECRET_BYTES_MIN,
                "mac_key cannot be used. Write id:secret, the secret as at least "
                f"{SECRET_BYTES_MIN} bytes in hexadecimal digits; several keys with commas "
                "between them, first the one that signs.",
            )
            secrets[key_id.encode()] = secret
        return cls(next(iter(secrets)), secrets)

    def as_setting(self) -> str:
        """The same as a setting; a secret."""
        ordered = sorted(self.secrets, key=lambda key_id: key_id != self.key_id)
        return ",".join(f"{key_id.decode()}:{self.secrets[key_id].hex()}" for key_id in ordered)

    def __repr__(self) -> str:
        return f"MacKeys({', '.join(key_id.decode() for key_id in self.secrets)})"

    def sign(self, stream_name: str, position: int, body: bytes) -> bytes:
        """Key id and signature, as they stand in an entry's header."""
        mac = _mac(self.secrets[self.key_id], stream_name, position, body)
        return self.key_id + b" " + mac

    def is_signed(
        self, stream_name: str, position: int, body: bytes, *, key_id: bytes, mac: bytes
    ) -> bool:
        """Whether the body was signed for this very place. Raises MacKeyUnknown."""
        secret = self.secrets.get(key_id)
        if secret is None:
            raise MacKeyUnknown(
                f"{stream_name}/{position}: signed with the unknown key {key_id[:40]!r}"
            )
        return hmac.compare_digest(mac, _mac(secret, stream_name, position, body))


def _mac(secret: bytes, stream_name: str, position: int, body: bytes) -> bytes:
    signed = f"penstock 1\n{stream_name}\n{position}\n".encode() + body
    return hmac.digest(secret, signed, "sha256")[:_MAC_BYTES].hex().encode()
