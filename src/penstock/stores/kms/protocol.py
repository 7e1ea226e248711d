"""What every key management service can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

Context = Mapping[str, str]
"""What a wrapped key belongs to; it cannot be unwrapped for anything else."""


def wrapping_context(stream_name: str, version: int) -> Context:
    """The context of a stream's data key: no wrapped key passes for that of another."""
    return {"penstock:stream": stream_name, "penstock:version": str(version)}


@dataclass(frozen=True, slots=True)
class NewKey:
    """A data key that was made just now."""

    secret: bytes = field(repr=False)
    wrapped: bytes
    kms_key_id: str
    """What has wrapped it, precisely: an alias may lead elsewhere tomorrow."""


class Kms(Protocol):
    """One wrapping key.

    Every method raises KeyUnavailable where no answer can be had now, KeyRefused for a no, and
    ExtraMissing where the package that it needs is not installed.
    """

    def generate(self, context: Context) -> NewKey:
        """A new data key, wrapped for the context."""

    def wrap(self, secret: bytes, context: Context) -> NewKey:
        """A data key that exists, wrapped for the context."""

    def unwrap(self, wrapped: bytes, context: Context) -> bytes:
        """The data key. Only for the context that it was wrapped for."""
