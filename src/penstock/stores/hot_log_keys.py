"""The keys of a stream in Redis. The braces keep them together on one node of a cluster."""

from __future__ import annotations


def log_key(prefix: str, stream_name: str) -> str:
    """Where a stream's entries are."""
    return f"{prefix}:{{{stream_name}}}:log"


def record_key(prefix: str, stream_name: str) -> str:
    """Where is written who writes the log."""
    return f"{prefix}:{{{stream_name}}}:meta"


def data_keys_key(prefix: str, stream_name: str) -> str:
    """Where the copy of a stream's wrapped data keys is."""
    return f"{prefix}:{{{stream_name}}}:keys"
