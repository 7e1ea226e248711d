"""A stream of another service as a consumer reads it: its tiers, its start, how far it is."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import psycopg

from penstock.core.progress import Progress
from penstock.core.sources import Source
from penstock.errors import ServerUnavailable, ServerUnsuitable
from penstock.pipeline.consuming import Consuming
from penstock.stores.cold_tier import ColdTier, source_cold_tier
from penstock.stores.hot_log import HotLog
from penstock.stores.source_tier import NoWarmTier, SourceTier, SourceWarmTier
from penstock.stores.sources import Bounds, Pin, Sources
from penstock.stores.starts import SourceStarts
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

REPORT_SECONDS = 1.0


class ForeignStream:
    """One consumer's way to a stream that another database numbers."""

    def __init__(self, consuming: Consuming, source: Source, hot_log: HotLog) -> None:
        self._consuming = consuming
        self._source = source
        self._hot_log = hot_log
        self._sources = Sources(consuming.settings.schema)
        self._tier: SourceTier | None = None
        if source.source_url is None and source.archive_url is None:
            emit(signals.HotWindowOnly(consuming.name, source.stream_name))

    @property
    def tier(self) -> SourceTier:
        """What is below its hot log."""
        assert self._tier is not None, "the stream is entered before it is read"
        return self._tier

    def enter(self, connection: psycopg.Connection[Any]) -> SourceStarts:
        """See to it that nobody here takes the stream for his own."""
        name, stream_name = self._consuming.name, self._source.stream_name
        self._sources.register(connection, stream_name)
        if self._tier is None:
            seen = self._sources.read(connection, stream_name) or Bounds(1, 0)
            pin = Pin(self._sources, name, self._consuming.control)
            if self._source.source_url is None:
                self._tier = NoWarmTier(
                    *(name, self._source, pin, seen, self._hot_log),
                    cold_tier=self.open_cold_tier(),
                )
            else:
                self._tier = SourceWarmTier(name, self._source, pin, seen)
        return SourceStarts(self._consuming.settings.schema, self._tier, self.open_cold_tier())

    def open_cold_tier(self) -> ColdTier | None:
        """Its archive, for one reader, if it was named."""
        source = self._source
        if source.archive_url is None:
            return None
        return source_cold_tier(source.archive_url, source.stream_name)

    def reporting(self) -> SourceReport:
        """The stage that tells both sides how far the other is."""
        return SourceReport(self._consuming, self._sources, self.tier)

    def close(self) -> None:
        """Give connections back."""
        if self._tier is not None:
            self._tier.close()


class SourceReport:
    """Tells the producer how far its consumer is, and the own books how far the stream is.

    A stage of its own: a producer that does not answer keeps nobody waiting.
    """

    def __init__(self, consuming: Consuming, sources: Sources, tier: SourceTier) -> None:
        self._consuming = consuming
        self._sources = sources
        self._tier = tier

    def step(self) -> Progress:
        """Report once."""
        self._tell_producer()
        # The tier has said that it is away; the books keep what was seen last.
        with suppress(ServerUnavailable, ServerUnsuitable):
            bounds = self._tier.bounds()
            self._sources.see(self._consuming.control(), self._consuming.stream_name, bounds)
        return Progress(0, pause_seconds=REPORT_SECONDS)

    def wait(self, stop: threading.Event) -> None:
        """Every step says itself how long to wait."""

    def close(self) -> None:
        """The last word: pruning need not wait for what was handled since the last report."""
        with suppress(ServerUnavailable, psycopg.Error):
            self._tell_producer()

    def _tell_producer(self) -> None:
        name = self._consuming.name
        progress = self._sources.progress(self._consuming.control(), name)
        if progress is not None:
            self._tier.record(name, progress)
