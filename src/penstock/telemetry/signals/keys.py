"""What happens to data keys, and to events that they do not open."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class KeyUnwrapped(Signal):
    """The KMS has unwrapped a data key for this process."""

    stream_name: str
    key_id: str


@dataclass(frozen=True, slots=True)
class KeyOutlived(Signal, level=Level.ERROR):
    """The KMS does not answer, so a key is used for longer than it should be."""

    stream_name: str
    key_id: str
    age_seconds: int


@dataclass(frozen=True, slots=True)
class KeyWithdrawn(Signal, level=Level.ERROR):
    """The KMS refuses a data key; this process has forgotten it and goes no further with it."""

    stream_name: str
    key_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class KeyRotated(Signal, level=Level.INFO):
    """A stream's events are sealed with a new data key from now on."""

    stream_name: str
    version: int


@dataclass(frozen=True, slots=True)
class KeyRotationFailed(Signal, level=Level.ERROR):
    """A data key that should be replaced is still in use; the next round tries again."""

    stream_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class KeysCopied(Signal):
    """The wrapped keys beside a stream are those that the database has."""

    stream_name: str
    keys: int


@dataclass(frozen=True, slots=True)
class TamperingFound(Signal, level=Level.ERROR):
    """A sealed event is not what was sent; no handler sees it, and it becomes a dead letter."""

    consumer: str
    position: int
    event_uuid: str
    key_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class EventShredded(Signal, level=Level.INFO):
    """An event's key was destroyed on purpose; its consumer has passed it by."""

    consumer: str
    position: int
    event_uuid: str
    key_id: str
