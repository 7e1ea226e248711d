"""Counts signals: totals and histograms in plain dictionaries, for whoever collects them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from penstock.telemetry import metrics, signals
from penstock.telemetry.bus import subscribe, unsubscribe
from penstock.telemetry.metrics import LABELS_MAX, OTHER, Distribution, Instrument, Reading

MICROSECONDS = 1_000_000
_OF_CONSUMERS = (
    metrics.HANDLED,
    metrics.SKIPPED,
    metrics.FAILED,
    metrics.PARKED,
    metrics.BURIED,
    metrics.UNKNOWN_EVENT_TYPE,
    metrics.SHREDDED,
    metrics.BEGUN_EARLY,
    metrics.BEGUN_IN_VAIN,
)
_OF_PUBLISHERS = (metrics.PUBLISHED, metrics.HOT_LOG_REFILLED, metrics.HOT_LOG_LOST)

Labels = tuple[str, ...]
_Series = tuple[Instrument, Labels]


class Sums:
    """Adds up, for any number of threads; each instrument has LABELS_MAX series and one more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[_Series, float] = {}
        self._seen: dict[_Series, tuple[list[int], float]] = {}
        self._labels: dict[Instrument, set[Labels]] = {}

    def count(self, instrument: Instrument, labels: Labels, by: float = 1) -> None:
        """Add to a counter; nothing is enough to make it known."""
        with self._lock:
            series = self._series(instrument, labels)
            self._counts[series] = self._counts.get(series, 0) + by

    def observe(self, instrument: Instrument, labels: Labels, value: float) -> None:
        """Add one value to a histogram."""
        counts = [0] * (len(instrument.buckets) + 1)
        counts[bisect_left(instrument.buckets, value)] = 1
        self.merge(instrument, labels, counts, value)

    def merge(
        self, instrument: Instrument, labels: Labels, counts: Sequence[int], total: float
    ) -> None:
        """Add many values to a histogram, by bucket."""
        with self._lock:
            series = self._series(instrument, labels)
            known, sum_before = self._seen.get(series, ((), 0.0))
            added = [a + b for a, b in zip(known, counts, strict=True)] if known else [*counts]
            self._seen[series] = (added, sum_before + total)

    def add(self, readings: Iterable[Reading]) -> None:
        """Add what another has taken."""
        for reading in readings:
            if isinstance(reading.value, Distribution):
                seen = reading.value
                self.merge(reading.instrument, reading.labels, seen.counts, seen.total)
            else:
                self.count(reading.instrument, reading.labels, reading.value)

    def readings(self) -> list[Reading]:
        """Everything, since the beginning or since it was last taken."""
        with self._lock:
            return self._readings()

    def take(self) -> list[Reading]:
        """What has come since it was last taken."""
        with self._lock:
            taken = self._readings()
            self._counts, self._seen = {}, {}
            return taken

    def _readings(self) -> list[Reading]:
        counts = [Reading(*series, value) for series, value in self._counts.items()]
        return counts + [
            Reading(*series, Distribution(tuple(seen), total))
            for series, (seen, total) in self._seen.items()
        ]

    def _series(self, instrument: Instrument, labels: Labels) -> _Series:
        known = self._labels.setdefault(instrument, set())
        if labels not in known:
            if len(known) >= LABELS_MAX:
                return instrument, (OTHER,) * len(labels)
            known.add(labels)
        return instrument, labels


class Meters:
    """Hears the signals of this process, once started. Called in whichever thread emits."""

    def __init__(self) -> None:
        self.sums = Sums()
        # A consumer reads one stream, and says so before anything else.
        self._streams: dict[str, str] = {}

    def start(self) -> None:
        """Count from now on."""
        for server in ("PostgreSQL", "Redis"):
            self.sums.count(metrics.SERVERS_LOST, (server,), 0)
        for signal_type, listener in self._listeners():
            subscribe(signal_type, listener)

    def stop(self) -> None:
        """Count no more."""
        for _, listener in self._listeners():
            unsubscribe(listener)

    def _listeners(self) -> list[tuple[type[signals.Signal], Callable[[Any], None]]]:
        return [
            (signals.ConsumerRegistered, self._registered),
            (signals.BatchCommitted, self._committed),
            (signals.ParkedHandled, self._parked_handled),
            (signals.AttemptEnded, self._attempt_ended),
            (signals.EventFailed, self._failed),
            (signals.EventParked, self._parked),
            (signals.KeyHeld, self._parked),
            (signals.SuccessorsParked, self._successors_parked),
            (signals.EventBuried, self._buried),
            (signals.EventsUnknown, self._unknown),
            (signals.EventShredded, self._shredded),
            (signals.EarlyEventRead, self._begun_early),
            (signals.EarlyEventGivenUp, self._begun_in_vain),
            (signals.HotTierRead, self._hot_read),
            (signals.WarmTierRead, self._warm_read),
            (signals.ColdTierRead, self._cold_read),
            (signals.BatchAppended, self._appended),
            (signals.BatchConfirmed, self._confirmed),
            (signals.HotLogLost, self._hot_log_lost),
            (signals.LeaseAcquired, self._acquired),
            (signals.LeaseLost, self._lease_lost),
            (signals.LeaseReleased, self._released),
            (signals.TimersFired, self._fired),
            (signals.ServerLost, self._server_lost),
        ]

    # ── consumers ─────────────────────────────────────────────────────────────────────────────

    def _registered(self, signal: signals.ConsumerRegistered) -> None:
        self._streams[signal.consumer] = signal.stream_name
        for instrument in _OF_CONSUMERS:
            # Known from the start: a rise from nothing to one would be no rise.
            self._count(instrument, signal.consumer, 0)

    def _committed(self, signal: signals.BatchCommitted) -> None:
        self._count(metrics.HANDLED, signal.consumer, signal.handled)
        if signal.skipped:
            self._count(metrics.SKIPPED, signal.consumer, signal.skipped)

    def _parked_handled(self, signal: signals.ParkedHandled) -> None:
        self._count(metrics.HANDLED, signal.consumer, signal.count)

    def _attempt_ended(self, signal: signals.AttemptEnded) -> None:
        labels = self._of(signal.consumer)
        if sum(signal.calls):
            self.sums.merge(metrics.HANDLER_SECONDS, labels, signal.calls, signal.handler_seconds)
        if signal.events:
            self.sums.observe(metrics.BATCH_SECONDS, labels, signal.seconds)
            self.sums.observe(metrics.BATCH_EVENTS, labels, signal.events)

    def _failed(self, signal: signals.EventFailed) -> None:
        self._count(metrics.FAILED, signal.consumer)

    def _parked(self, signal: signals.EventParked | signals.KeyHeld) -> None:
        self._count(metrics.PARKED, signal.consumer)

    def _successors_parked(self, signal: signals.SuccessorsParked) -> None:
        self._count(metrics.PARKED, signal.consumer, signal.count)

    def _buried(self, signal: signals.EventBuried) -> None:
        self._count(metrics.BURIED, signal.consumer)

    def _unknown(self, signal: signals.EventsUnknown) -> None:
        self._count(metrics.UNKNOWN_EVENT_TYPE, signal.consumer, signal.count)

    def _shredded(self, signal: signals.EventShredded) -> None:
        self._count(metrics.SHREDDED, signal.consumer)

    def _begun_early(self, signal: signals.EarlyEventRead) -> None:
        self._count(metrics.BEGUN_EARLY, signal.consumer)

    def _begun_in_vain(self, signal: signals.EarlyEventGivenUp) -> None:
        self._count(metrics.BEGUN_IN_VAIN, signal.consumer)

    def _hot_read(self, signal: signals.HotTierRead) -> None:
        self._read(signal, "hot")

    def _warm_read(self, signal: signals.WarmTierRead) -> None:
        self._read(signal, "warm")

    def _cold_read(self, signal: signals.ColdTierRead) -> None:
        self._read(signal, "cold")

    def _read(
        self, signal: signals.HotTierRead | signals.WarmTierRead | signals.ColdTierRead, tier: str
    ) -> None:
        count = signal.last - signal.first + 1
        self.sums.count(metrics.TIER_READS, (signal.consumer, tier), count)

    def _of(self, consumer: str) -> Labels:
        return consumer, self._streams.get(consumer, "")

    def _count(self, instrument: Instrument, consumer: str, by: float = 1) -> None:
        self.sums.count(instrument, self._of(consumer), by)

    # ── publisher ─────────────────────────────────────────────────────────────────────────────

    def _appended(self, signal: signals.BatchAppended) -> None:
        stream = (signal.stream_name,)
        if signal.refilled:
            self.sums.count(metrics.HOT_LOG_REFILLED, stream, signal.refilled)
        elif signal.first_sent_us:
            seconds = time.time() - signal.first_sent_us / MICROSECONDS
            self.sums.observe(metrics.PUBLISH_SECONDS, stream, max(0.0, seconds))

    def _confirmed(self, signal: signals.BatchConfirmed) -> None:
        self.sums.count(metrics.PUBLISHED, (signal.stream_name,), signal.count)

    def _hot_log_lost(self, signal: signals.HotLogLost) -> None:
        self.sums.count(metrics.HOT_LOG_LOST, (signal.stream_name,))

    # ── everybody ─────────────────────────────────────────────────────────────────────────────

    def _acquired(self, signal: signals.LeaseAcquired) -> None:
        self._changed(signal.role, "acquired")
        if signal.role == "publisher":
            for instrument in _OF_PUBLISHERS:
                self.sums.count(instrument, (signal.stream_name,), 0)

    def _lease_lost(self, signal: signals.LeaseLost) -> None:
        self._changed(signal.role, "lost")

    def _released(self, signal: signals.LeaseReleased) -> None:
        self._changed(signal.role, "released")

    def _changed(self, role: str, change: str) -> None:
        self.sums.count(metrics.LEASE_CHANGES, (role.partition(":")[0], change))

    def _fired(self, signal: signals.TimersFired) -> None:
        self.sums.count(metrics.TIMERS_FIRED, (), signal.count)

    def _server_lost(self, signal: signals.ServerLost) -> None:
        self.sums.count(metrics.SERVERS_LOST, (signal.server,))
