"""What happens to replays: ranges that are delivered again, to one consumer only."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal


@dataclass(frozen=True, slots=True)
class ReplayBegan(Signal, level=Level.INFO):
    """A replay is in the books; whoever resumes it from now on continues it."""

    replay: str
    stream_name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ReplayFinished(Signal, level=Level.INFO):
    """Everything of a replay is settled, and its rows are gone."""

    replay: str
    handled: int
    skipped: int


@dataclass(frozen=True, slots=True)
class ReplayCancelled(Signal, level=Level.WARNING):
    """An operator gave up a replay; what it had handled stays."""

    replay: str
