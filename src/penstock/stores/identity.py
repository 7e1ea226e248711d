"""What a process takes from its surroundings to name things: time, randomness, host, pid."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from uuid import UUID

_VERSION_7 = 0x7 << 76
_VARIANT = 0b10 << 62


def new_event_uuid() -> UUID:
    """A UUIDv7: ids that grow with time keep deduplication inserts on the same pages."""
    milliseconds = time.time_ns() // 1_000_000
    random_bits = int.from_bytes(os.urandom(10))
    high = (milliseconds & 0xFFFF_FFFF_FFFF) << 80
    middle = _VERSION_7 | ((random_bits >> 62) & 0xFFF) << 64
    return UUID(int=high | middle | _VARIANT | (random_bits & 0x3FFF_FFFF_FFFF_FFFF))


def new_token() -> str:
    """Eight hexadecimal digits that no other process has."""
    return secrets.token_hex(4)


def owner_id(role: str, stream_name: str, token: str) -> str:
    """The name of a lease's holder: opaque, compared only for equality."""
    host = socket.gethostname().split(".", 1)[0]
    return f"{role}-{stream_name}-{host}-{os.getpid()}-{token}"


def operator_id() -> str:
    """Who types a command, for audits: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # In a container the user may have a number and no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname().split('.', 1)[0]}"
