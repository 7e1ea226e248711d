"""Signatures of what lies on the hot log, where anybody with access to Redis may write."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    _begun: dict[bytes, hmac.HMAC] = field(default_factory=dict, init=False, compare=False)
    """Signatures with each secret, begun once: that is a third of what signing an entry takes."""

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
        return self.key_id + b" " + self._mac(self.key_id, stream_name, position, body)

    def is_signed(
        self, stream_name: str, position: int, body: bytes, *, key_id: bytes, mac: bytes
    ) -> bool:
        """Whether the body was signed for this very place. Raises MacKeyUnknown."""
        if key_id not in self.secrets:
            raise MacKeyUnknown(
                f"{stream_name}/{position}: signed with the unknown key {key_id[:40]!r}"
            )
        return hmac.compare_digest(mac, self._mac(key_id, stream_name, position, body))

    def _mac(self, key_id: bytes, stream_name: str, position: int, body: bytes) -> bytes:
        begun = self._begun.get(key_id)
        if begun is None:
            begun = self._begun[key_id] = hmac.new(self.secrets[key_id], digestmod="sha256")
        mac = begun.copy()
        mac.update(f"penstock 1\n{stream_name}\n{position}\n".encode() + body)
        return mac.digest()[:_MAC_BYTES].hex().encode()
