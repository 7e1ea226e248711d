"""The rows of the model of PostgreSQL."""

from __future__ import annotations

from typing import NamedTuple

from tests.simulation.machine import NEVER


class OutboxRow(NamedTuple):
    """A row of `outbox_event` and its body without the term."""

    id: int
    event_uuid: str
    key: str | None
    number: int
    """Which one of its key it is."""
    position: int | None = None
    body: str = ""


class LeaseRow(NamedTuple):
    """A row of `stream_lease`."""

    owner_id: str | None = None
    worker_id: str | None = None
    term: int = 0
    until: float = -NEVER
    checkpoint: int = 0
    clean: bool = True
    epoch: int = 1
    lane: int = 0


class ParkedRow(NamedTuple):
    """A row of `parked_event`."""

    position: int
    event_uuid: str
    key_hash: int
    entry: str
    attempts: int
    next_attempt_at: float | None
    held: bool
    depth: int
    setbacks: int
    operation_id: int | None = None
    """Whose redrive it is."""
    parked_at: float = 0.0


class DeadRow(NamedTuple):
    """A row of `dead_letter`."""

    position: int
    reason: str
    key_hash: int = 0
    entry: str = ""
    attempts: int = 1
    """How many are told of."""


class Effect(NamedTuple):
    """What a handler wrote."""

    event_uuid: str
    key: str | None
    number: int
    position: int


class Hole(NamedTuple):
    """A row of `hole`."""

    first: int
    last: int
