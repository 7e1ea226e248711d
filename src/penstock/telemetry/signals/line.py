"""What happens to events on their way: sent, published, handled."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.telemetry.signals.signal import Level, Signal

# ── send ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class EventsInserted(Signal):
    """Events are in the outbox, in a transaction that has not committed yet."""

    count: int


# ── publish ───────────────────────────────────────────────────────────────────────────────────────


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
    refilled: int = 0
    """How many of them it had before, and lost."""
    first_sent_us: int = 0
    """When the first of them was sent, in microseconds since 1970; 0 for a hole."""


@dataclass(frozen=True, slots=True)
class BatchConfirmed(Signal):
    """PostgreSQL has recorded how far the hot log reaches."""

    stream_name: str
    last: int
    count: int = 0
    """By how many positions that is further than before."""


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
class PositionsSkipped(Signal, level=Level.ERROR):
    """The head was moved: PostgreSQL may not know all positions in use. Nothing sent is lost."""

    stream_name: str
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class PublishingDelayed(Signal, level=Level.ERROR):
    """The hot log is far behind the outbox, which grows: see why it takes nothing."""

    stream_name: str
    behind: int
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


# ── consume ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ConsumerRegistered(Signal, level=Level.INFO):
    """A consumer is in the books, with the first position that it has to settle."""

    consumer: str
    stream_name: str
    start_position: int


@dataclass(frozen=True, slots=True)
class ConsumerStartedLate(Signal, level=Level.WARNING):
    """A new consumer begins at the first event that is retained, later than it asked for."""

    consumer: str
    stream_name: str
    asked: str
    start_position: int


@dataclass(frozen=True, slots=True)
class HotWindowOnly(Signal, level=Level.WARNING):
    """A source has neither source_url nor archive: what its hot log drops stops the consumer."""

    consumer: str
    stream_name: str


@dataclass(frozen=True, slots=True)
class LanesShared(Signal, level=Level.INFO):
    """The lanes of a consumer that this worker works on are others than before."""

    consumer: str
    lanes: tuple[int, ...]
    of: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ConsumerPaused(Signal, level=Level.WARNING):
    """An operator paused a consumer; its lanes are given back until it is resumed."""

    consumer: str


@dataclass(frozen=True, slots=True)
class ConsumerResumed(Signal, level=Level.INFO):
    """A paused consumer goes on."""

    consumer: str


@dataclass(frozen=True, slots=True)
class BatchRead(Signal):
    """Entries were read after the checkpoint, contiguous."""

    consumer: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class BatchClaimed(Signal):
    """The claim of a batch is sent, in an open transaction; handlers run next.

    Where nobody waited for its answer, `new` is an assumption, and means all of them.
    """

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
class EventsUnknown(Signal):
    """Events are of a type or version that no event class here knows; the first one's type."""

    consumer: str
    count: int
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
    skipped: int = 0
    """Those that passed by: of a type that the handler does not name, or shredded."""


@dataclass(frozen=True, slots=True)
class AttemptEnded(Signal):
    """An attempt at a batch took so long, and so did the calls of its handler."""

    consumer: str
    events: int
    """Those that it has settled; 0 where it failed."""
    seconds: float
    calls: tuple[int, ...]
    """By their duration, in the buckets of handler_seconds."""
    handler_seconds: float


@dataclass(frozen=True, slots=True)
class BatchRolledBack(Signal):
    """A batch failed; nothing of it happened, and its events are handled again apart."""

    consumer: str
    first: int
    last: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConsumerBlocked(Signal, level=Level.ERROR):
    """A consumer cannot go on without help; it has skipped nothing."""

    consumer: str
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class ConsumerFarBehind(Signal, level=Level.WARNING):
    """A consumer has a long way to go; said once, by whoever reads metrics."""

    consumer: str
    stream_name: str
    lag_events: int
