"""A claim on an event of another bus: who handles what, checked, and the number of its lock."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final
from uuid import UUID

from penstock.core.encoding import is_unstorable_text
from penstock.core.require import require
from penstock.errors import UsageError

CONSUMER_LENGTH_MAX: Final = 200
EVENT_ID_LENGTH_MAX: Final = 500
# PostgreSQL indexes no more than 2704 bytes of a row, and some of them are its own.
BYTES_MAX: Final = 2600

_NAMESPACE = "penstock inbox"


@dataclass(frozen=True, slots=True)
class Claim:
    """An event that is this transaction's to handle; it is done when the transaction commits."""

    consumer: str
    event_id: str


def parse_claim(consumer: object, event_id: object) -> Claim:
    """The claim, if the inbox can hold it. Raises UsageError."""
    if isinstance(event_id, UUID):
        event_id = str(event_id)
    claim = Claim(
        _text("consumer", consumer, CONSUMER_LENGTH_MAX),
        _text("event_id", event_id, EVENT_ID_LENGTH_MAX),
    )
    require(
        len(claim.consumer.encode()) + len(claim.event_id.encode()) <= BYTES_MAX,
        f"consumer and event_id have more than {BYTES_MAX} bytes together. Nothing was claimed; "
        "pass a digest of the event_id.",
        UsageError,
    )
    return claim


def lock_number(claim: Claim) -> int:
    """The advisory lock of a claim, the same on every host and for ever."""
    # A NUL can be in none of the parts, so no two claims come to the same text.
    text = "\0".join((_NAMESPACE, claim.consumer, claim.event_id))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _text(name: str, value: object, length_max: int) -> str:
    if isinstance(value, str) and 1 <= len(value) <= length_max and not is_unstorable_text(value):
        return value
    raise UsageError(
        f"{name} must be a text of 1 to {length_max} characters without NUL or half surrogate "
        "pairs; an event_id may be a UUID too. Nothing was claimed; pass who handles the event, "
        "and what the other side calls it, the same at every delivery."
    )
