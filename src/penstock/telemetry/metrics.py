"""The instruments: what is measured, under which name, with which labels. The only list of them.

Gauges of the pipeline's state are read from PostgreSQL and Redis (`ops/metrics_state.py`), counters
and histograms come from signals (`telemetry/meters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

LABELS_MAX: Final = 1000
"""So many series an instrument has at most from signals; the rest is counted as OTHER."""
OTHER: Final = "other"

SECONDS_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
COUNT_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Kind(StrEnum):
    """How an instrument's value behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Instrument:
    """One metric, by its OpenTelemetry name."""

    name: str
    kind: Kind
    unit: str
    """As OpenTelemetry writes it: ms, s, By, or what is counted in braces."""
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """The upper limits of a histogram's buckets, without the infinite one."""

    @property
    def prometheus_name(self) -> str:
        """Without dots, and with _total where it counts."""
        plain = self.name.replace(".", "_")
        return f"{plain}_total" if self.kind is Kind.COUNTER else plain


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has seen: how often each bucket, the last without a limit, and the sum."""

    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One series at one moment."""

    instrument: Instrument
    labels: tuple[str, ...]
    value: float | Distribution


_INSTRUMENTS: dict[str, Instrument] = {}
CONSUMER: Final = ("consumer", "stream")
STREAM: Final = ("stream",)


def _add(instrument: Instrument) -> Instrument:
    _INSTRUMENTS[instrument.name] = instrument
    return instrument


def _gauge(name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Instrument:
    return _add(Instrument(name, Kind.GAUGE, unit, text, labels))


def _counter(name: str, unit: str, text: str, labels: tuple[str, ...] = ()) -> Instrument:
    return _add(Instrument(name, Kind.COUNTER, unit, text, labels))


def _seconds(name: str, text: str, labels: tuple[str, ...]) -> Instrument:
    return _add(Instrument(name, Kind.HISTOGRAM, "s", text, labels, SECONDS_BUCKETS))


# ── state of consumers ────────────────────────────────────────────────────────────────────────────

LAG_MS = _gauge(
    "events_pipeline.consumer.lag_ms",
    "ms",
    "Age of the next unhandled event since it was sent; 0 when caught up. Absent where the outbox "
    "does not hold that event: it is another service's, or archived and pruned.",
    CONSUMER,
)
LAG_EVENTS = _gauge(
    "events_pipeline.consumer.lag_events_count",
    "{event}",
    "Positions behind the stream's head; exact with one lane, an upper bound with several.",
    CONSUMER,
)
PARKED_KEYS = _gauge(
    "events_pipeline.consumer.parked_keys",
    "{key}",
    "Keys that wait for another attempt at their first event.",
    CONSUMER,
)
HELD_KEYS = _gauge(
    "events_pipeline.consumer.held_keys",
    "{key}",
    "Keys that wait until an operator redrives or discards their first event.",
    CONSUMER,
)
PARKED_EVENTS = _gauge(
    "events_pipeline.consumer.parked_events",
    "{event}",
    "Events that are parked, with those that wait behind them.",
    CONSUMER,
)
DEAD_LETTERS = _gauge(
    "events_pipeline.consumer.dead_letters",
    "{event}",
    "Dead letters that nobody has redriven or discarded.",
    CONSUMER,
)
IS_PAUSED = _gauge(
    "events_pipeline.consumer.is_paused", "1", "1 while an operator has paused it.", CONSUMER
)
IS_QUARANTINED = _gauge(
    "events_pipeline.consumer.is_quarantined",
    "1",
    "1 while it is set aside because its workers crashed too often.",
    CONSUMER,
)

# ── state of streams, archive and timers ──────────────────────────────────────────────────────────

OUTBOX_BACKLOG = _gauge(
    "events_pipeline.outbox.backlog_events",
    "{event}",
    "Events that were sent and are not published yet; of those without a position at most 10,000 "
    "are counted.",
    STREAM,
)
OUTBOX_AGE = _gauge(
    "events_pipeline.outbox.age_ms",
    "ms",
    "Age of the oldest event that is not published yet; 0 when there is none.",
    STREAM,
)
STREAM_HEAD = _gauge(
    "events_pipeline.stream.head", "{event}", "The last position that was given out.", STREAM
)
STREAM_PUBLISHED = _gauge(
    "events_pipeline.stream.published",
    "{event}",
    "The last position that is known to be in the hot log.",
    STREAM,
)
HOT_LOG_LENGTH = _gauge(
    "events_pipeline.hot_log.length", "{event}", "Entries in the hot log.", STREAM
)
HOT_LOG_BYTES = _gauge(
    "events_pipeline.hot_log.bytes", "By", "Memory that the hot log takes in Redis.", STREAM
)
ARCHIVE_LAG_EVENTS = _gauge(
    "events_pipeline.archive.lag_events",
    "{event}",
    "Positions that are not archived yet, where a stream is archived.",
    STREAM,
)
ARCHIVE_LAG_MS = _gauge(
    "events_pipeline.archive.lag_ms",
    "ms",
    "Age of the oldest event that is not archived yet; 0 when there is none.",
    STREAM,
)
TIMERS_PENDING = _gauge(
    "events_pipeline.timers.pending", "{timer}", "Timers that wait, counted up to 10,000."
)
TIMERS_LATE = _gauge(
    "events_pipeline.timers.late_ms",
    "ms",
    "How long the first due timer is due and not fired; 0 when none is.",
)
TIMERS_HELD = _gauge(
    "events_pipeline.timers.held", "{timer}", "Timers that cannot be fired until rescheduled."
)

# ── supervisor ────────────────────────────────────────────────────────────────────────────────────

WORKER_QUARANTINED = _counter(
    "supervisor.worker.quarantined",
    "{quarantine}",
    "How often this supervisor has set a worker aside.",
)
WORKERS_QUARANTINED = _gauge(
    "supervisor.workers.quarantined",
    "{worker}",
    "How many of this supervisor's workers are set aside now.",
)
WORKERS_RUNNING = _gauge(
    "supervisor.workers.running", "{worker}", "Worker processes that run and give signs of life."
)
WORKERS_WANTED = _gauge(
    "supervisor.workers.wanted", "{worker}", "Worker processes that this supervisor should run."
)
WORKER_RESTARTS = _counter(
    "supervisor.worker.restarts",
    "{restart}",
    "How often a worker process was started again.",
    ("worker",),
)

# ── what consumers do ─────────────────────────────────────────────────────────────────────────────

HANDLED = _counter(
    "events_pipeline.consumer.handled",
    "{event}",
    "Events whose handling is committed, those that were parked included.",
    CONSUMER,
)
SKIPPED = _counter(
    "events_pipeline.consumer.skipped",
    "{event}",
    "Events that passed by: the handler does not name their type, or their key was shredded.",
    CONSUMER,
)
FAILED = _counter(
    "events_pipeline.consumer.failed", "{attempt}", "Attempts at one event that failed.", CONSUMER
)
PARKED = _counter(
    "events_pipeline.consumer.parked",
    "{event}",
    "Events that were parked or held after a failure, or queued up behind such a one.",
    CONSUMER,
)
BURIED = _counter(
    "events_pipeline.consumer.buried", "{event}", "Events that became dead letters.", CONSUMER
)
UNKNOWN_EVENT_TYPE = _counter(
    "events_pipeline.consumer.unknown_event_type",
    "{event}",
    "Events of a type or version that no event class here knows, whether skipped or waited at.",
    CONSUMER,
)
SHREDDED = _counter(
    "events_pipeline.consumer.shredded",
    "{event}",
    "Events that were passed by because their data key was destroyed on purpose.",
    CONSUMER,
)
BEGUN_EARLY = _counter(
    "events_pipeline.consumer.begun_early",
    "{event}",
    "Events that an idle consumer began with before they were published.",
    CONSUMER,
)
BEGUN_IN_VAIN = _counter(
    "events_pipeline.consumer.begun_in_vain",
    "{event}",
    "Those of them that were given up, and handled again once they were published.",
    CONSUMER,
)
HANDLER_SECONDS = _seconds(
    "events_pipeline.consumer.handler_seconds",
    "One call of a handler, whether it succeeds or fails.",
    CONSUMER,
)
BATCH_SECONDS = _seconds(
    "events_pipeline.consumer.batch_seconds",
    "One batch from its claim to its COMMIT.",
    CONSUMER,
)
BATCH_EVENTS = _add(
    Instrument(
        "events_pipeline.consumer.batch_events",
        Kind.HISTOGRAM,
        "{event}",
        "Events in a batch that was committed.",
        CONSUMER,
        COUNT_BUCKETS,
    )
)
TIER_READS = _counter(
    "events_pipeline.reader.tier_reads",
    "{event}",
    "Events read, by tier: hot is Redis, warm the outbox, cold the archive.",
    ("consumer", "tier"),
)

# ── what everybody else does ──────────────────────────────────────────────────────────────────────

PUBLISHED = _counter(
    "events_pipeline.publisher.published",
    "{event}",
    "Positions that were published for the first time.",
    STREAM,
)
PUBLISH_SECONDS = _seconds(
    "events_pipeline.publisher.publish_seconds",
    "From the sending of a batch's first event, by PostgreSQL's clock, until the batch is in the "
    "hot log, by this host's.",
    STREAM,
)
HOT_LOG_REFILLED = _counter(
    "events_pipeline.hot_log.refilled",
    "{event}",
    "Events that were put into the hot log again after it had lost them.",
    STREAM,
)
HOT_LOG_LOST = _counter(
    "events_pipeline.hot_log.lost",
    "{loss}",
    "How often entries were found missing from the hot log.",
    STREAM,
)
LEASE_CHANGES = _counter(
    "events_pipeline.leases.changes",
    "{change}",
    "Leases acquired, lost and released, by role.",
    ("role", "change"),
)
TIMERS_FIRED = _counter(
    "events_pipeline.timers.fired", "{timer}", "Timers that were due and became events."
)
SERVERS_LOST = _counter(
    "events_pipeline.servers.lost",
    "{outage}",
    "How often a worker found PostgreSQL, Redis or the archive away.",
    ("server",),
)

INSTRUMENTS: Final = tuple(_INSTRUMENTS.values())
BY_NAME: Final = dict(_INSTRUMENTS)
STATE: Final = INSTRUMENTS[: INSTRUMENTS.index(WORKER_QUARANTINED)]
"""The gauges that are read from the servers, the same by every supervisor."""
FROM_SIGNALS: Final = INSTRUMENTS[INSTRUMENTS.index(HANDLED) :]
"""What worker processes count by themselves."""
