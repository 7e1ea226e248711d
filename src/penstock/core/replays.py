"""A replay: a range of a stream, delivered again to one consumer only."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from penstock.core.require import require
from penstock.errors import UsageError

MARK = "@"
"""Between a consumer's name and its replay's: no registered name contains it."""
CANCELLED = "cancelled"
"""Why a replay is paused whose worker has to let go before it can be deleted."""
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,49}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A temporary consumer, under a name of its own, with the handler of the original."""

    name: str
    original: str
    """The full name of the consumer whose handler is called."""
    stream_name: str
    first: int
    last: int


def replay_name(original: str, label: str) -> str:
    """The full name of a replay. Raises UsageError for a label that cannot be part of one."""
    require(
        _LABEL.fullmatch(label) is not None,
        f"--name {label!r} cannot name a replay: start with a letter or digit and go on with "
        "letters, digits, '_', '.' and '-', at most 50 of them. Nothing was changed.",
        UsageError,
    )
    return f"{original}{MARK}{label}"


def is_replay_name(name: str) -> bool:
    """Whether a consumer of this name is a replay."""
    return MARK in name


class ReplayState(StrEnum):
    """What a replay does, in one word or few."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """Nobody works on it, and nobody said that it should rest: its process died."""
    PAUSED = "paused"
    HELD = "held"
    """Only keys are left that wait for an operator."""
    FINISHED = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayProgress:
    """How far a replay is."""

    replay: Replay
    operation_id: int
    """Its record, which stays when it is over."""
    requested_by: str
    started_at: datetime
    is_paused: bool
    workers: int
    """Processes alive that work on it."""
    checkpoint: int
    """Everything up to here is settled or parked."""
    passed: int
    """How many positions its lanes have passed, on the average."""
    parked: int
    due: int
    """Parked events that have a time for their next attempt."""
    dead: int
    pause_reason: str | None = None
    is_cancelled: bool = False
    """Somebody has begun to delete it, and has not come to the end."""
    is_redriven: bool = False
    """A redrive is at work that may still bring back some of its dead letters."""

    @property
    def total(self) -> int:
        """How many positions there are to pass, holes among them."""
        return self.replay.last - self.replay.first + 1

    @property
    def state(self) -> ReplayState:
        """What became of it first; then what an operator decided; then whether it runs."""
        is_at_end = self.checkpoint >= self.replay.last
        if is_at_end and not self.parked:
            return ReplayState.FINISHED
        if self.is_paused:
            return ReplayState.PAUSED
        if is_at_end and not self.due:
            return ReplayState.HELD
        return ReplayState.RUNNING if self.workers else ReplayState.INTERRUPTED

    @property
    def has_work(self) -> bool:
        """Whether its lanes have, or may soon have, something to do."""
        if self.state is ReplayState.PAUSED:
            return False
        is_at_rest = self.state in (ReplayState.FINISHED, ReplayState.HELD)
        return not is_at_rest or (self.is_redriven and self.dead > 0)

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        values = asdict(self)
        return {**values.pop("replay"), **values, "total": self.total, "state": self.state.value}


@dataclass(frozen=True, slots=True)
class ReplayTally:
    """What became of a replay's events."""

    handled: int
    skipped: int
    discarded: int
    dead: int

    @property
    def settled(self) -> int:
        """All of them."""
        return self.handled + self.skipped + self.discarded + self.dead
