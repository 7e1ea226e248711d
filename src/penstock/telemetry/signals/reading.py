"""What readers come across, from tier to tier."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class GapFound(Signal, level=Level.INFO):
    """The hot log does not hold a position; it is read from the outbox instead."""

    consumer: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForgeryFound(Signal, level=Level.ERROR):
    """Somebody but the publisher wrote into the hot log; the event is read from the outbox."""

    consumer: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class HolePassed(Signal, level=Level.INFO):
    """Positions that no event has were stepped over."""

    consumer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class HotTierRead(Signal):
    """Entries were read from the hot log."""

    consumer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class EarlyEventRead(Signal):
    """A consumer with nothing else to do begins with an event that is not published yet."""

    consumer: str
    position: int


@dataclass(frozen=True, slots=True)
class EarlyEventGivenUp(Signal):
    """It was begun with for nothing, nothing of it happened, and it is handled once published."""

    consumer: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class WarmTierRead(Signal):
    """Entries were read from the outbox instead of the hot log."""

    consumer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ColdTierRead(Signal):
    """Entries that PostgreSQL no longer holds were read from the archive."""

    consumer: str
    first: int
    last: int
