"""The signals, typed and in the past tense: the only instrumentation there is.

`Signal.registry` lists them all; the crash matrix kills a process at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar


class Level(StrEnum):
    """How loudly a log tells of a signal."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Signal:
    """Something that happened."""

    registry: ClassVar[dict[str, type[Signal]]] = {}
    level: ClassVar[Level] = Level.DEBUG

    def __init_subclass__(cls, level: Level | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A dataclass with slots is made twice, the second time without its keywords.
        if level is not None:
            cls.level = level
        Signal.registry[cls.__name__] = cls


# ── send ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EventsInserted(Signal):
    """Events are in the outbox, in a transaction that has not committed yet."""

    count: int


# ── leases ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class LeaseAcquired(Signal, level=Level.INFO):
    """This process may work on a stream in a role."""

    stream_name: str
    role: str
    owner_id: str
    term: int


@dataclass(frozen=True, slots=True)
class LeaseRenewed(Signal):
    """The leases of this process run on."""

    count: int


@dataclass(frozen=True, slots=True)
class LeaseLost(Signal, level=Level.WARNING):
    """Another worker holds the lease; nothing was lost or repeated."""

    stream_name: str
    role: str
    owner_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseReleased(Signal, level=Level.INFO):
    """A lease was given back on a clean stop."""

    stream_name: str
    role: str


@dataclass(frozen=True, slots=True)
class PredecessorEnded(Signal, level=Level.WARNING):
    """The open transaction of a lease's former holder was ended."""

    stream_name: str
    role: str
    count: int


# ── publish ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BatchNumbered(Signal):
    """Events have their positions, durably; they are not in the hot log yet."""

    stream_name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BatchAppended(Signal):
    """Events are in the hot log; PostgreSQL has not recorded that yet."""

    stream_name: str
    last: int
    count: int


@dataclass(frozen=True, slots=True)
class BatchConfirmed(Signal):
    """PostgreSQL has recorded how far the hot log reaches."""

    stream_name: str
    last: int


@dataclass(frozen=True, slots=True)
class HotLogOpened(Signal, level=Level.INFO):
    """The hot log of a stream is ready for this term's appends."""

    stream_name: str
    term: int
    base: int


@dataclass(frozen=True, slots=True)
class HotLogLost(Signal, level=Level.WARNING):
    """Entries are missing from the hot log; it is being filled again from PostgreSQL."""

    stream_name: str
    last: int
    published: int


@dataclass(frozen=True, slots=True)
class HotLogRebuilt(Signal, level=Level.WARNING):
    """The hot log held entries that are not Penstock's; it was deleted and starts anew."""

    stream_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class StreamRefused(Signal, level=Level.ERROR):
    """A stream cannot be published from this database as things are."""

    stream_name: str
    reason: str


@dataclass(frozen=True, slots=True)
class PublisherSlept(Signal):
    """Nothing to publish: waiting for a sender's notification."""

    streams: int


@dataclass(frozen=True, slots=True)
class WakeupSilent(Signal, level=Level.WARNING):
    """LISTEN receives nothing here (a transaction pooler?); the publisher polls instead."""

    poll_seconds: float


# ── consume ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ConsumerRegistered(Signal, level=Level.INFO):
    """A consumer is in the books, with the first position that it has to settle."""

    consumer: str
    stream_name: str
    start_position: int


@dataclass(frozen=True, slots=True)
class BatchRead(Signal):
    """Entries were read after the checkpoint, contiguous."""

    consumer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class GapFound(Signal, level=Level.INFO):
    """The hot log does not hold a position; it is read from the outbox instead."""

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
class BatchClaimed(Signal):
    """Deduplication rows are written in an open transaction; handlers run next."""

    consumer: str
    count: int
    new: int


@dataclass(frozen=True, slots=True)
class EventHandled(Signal):
    """A handler returned; its effects are not committed yet."""

    consumer: str
    position: int
    event_uuid: str


@dataclass(frozen=True, slots=True)
class EventSkipped(Signal):
    """An event of a type that the handler does not name passes by."""

    consumer: str
    position: int
    event_type: str


@dataclass(frozen=True, slots=True)
class BatchSealed(Signal):
    """All handlers are done and their writes are sent; fence and COMMIT come next."""

    consumer: str
    last: int


@dataclass(frozen=True, slots=True)
class BatchCommitted(Signal):
    """Effects, deduplication rows and checkpoint are durable, together."""

    consumer: str
    first: int
    last: int
    handled: int


@dataclass(frozen=True, slots=True)
class BatchRolledBack(Signal):
    """A batch failed; nothing of it happened, and its events are handled again apart."""

    consumer: str
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class EventFailed(Signal, level=Level.ERROR):
    """A handler failed on an event; it is tried again after a while."""

    consumer: str
    position: int
    event_uuid: str
    attempt: int
    retry_after_seconds: float
    error: str


@dataclass(frozen=True, slots=True)
class ConsumerBlocked(Signal, level=Level.ERROR):
    """A consumer cannot go on without help; it has skipped nothing."""

    consumer: str
    position: int
    reason: str


# ── processes ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class WorkerStarted(Signal, level=Level.INFO):
    """A worker process is ready."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerStopped(Signal, level=Level.INFO):
    """A worker process has finished what it had in hand."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDied(Signal, level=Level.ERROR):
    """A worker process ended without being asked to; it is started again."""

    worker: str
    pid: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class ServerLost(Signal, level=Level.WARNING):
    """PostgreSQL or Redis went away; said once, then waited for."""

    worker: str
    server: str
    error: str


@dataclass(frozen=True, slots=True)
class ServerFound(Signal, level=Level.INFO):
    """The server is back; work goes on where it stopped."""

    worker: str
    server: str
    after_seconds: float
