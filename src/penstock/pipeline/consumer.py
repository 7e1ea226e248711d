"""A consumer in one worker process: takes its share of the lanes, and gives back what is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from penstock.core.lanes import LaneView, lanes_for
from penstock.core.progress import AGAIN, Progress
from penstock.errors import ServerUnavailable
from penstock.pipeline.attempt import may_run_ahead
from penstock.pipeline.consuming import Consuming, Crew
from penstock.pipeline.foreign_stream import ForeignStream
from penstock.pipeline.lane import Lane
from penstock.pipeline.reader import Reader, TierReader
from penstock.pipeline.replaying import RangeReader
from penstock.pipeline.window import StreamWindow
from penstock.stores.cold_tier import ColdTier, own_cold_tier
from penstock.stores.eager_ear import EagerEar
from penstock.stores.hot_log import HotLog
from penstock.stores.inbox import Inbox, Registration
from penstock.stores.lanes import Lanes
from penstock.stores.migrations import require_current
from penstock.stores.postgres import connect_stage
from penstock.stores.replays import NoStart
from penstock.stores.sources import Sources
from penstock.stores.starts import StartChooser, Starts
from penstock.stores.streams import Streams
from penstock.stores.warm_tier import OwnWarmTier, WarmTier
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

# How soon a worker notices that others came, or that its consumer was paused or moved; and, where
# others hold lanes, that one of these is free.
WATCH_SECONDS = 0.5
WATCH_OTHERS_SECONDS = 0.25
AFTER_SECONDS = 0.01


class Consumer:
    """Registers a consumer and keeps as many of its lanes running as are this worker's share."""

    def __init__(
        self,
        consuming: Consuming,
        crew: Crew,
        open_log: Callable[[], HotLog],
        *,
        deployed_at: datetime,
        excused: AbstractContextManager[Any],
    ) -> None:
        self._consuming = consuming
        self._name = consuming.name
        self._crew = crew
        self._deployed_at = deployed_at
        self._excused = excused
        self._lanes = Lanes(consuming.settings.schema)
        self._working: dict[int, str] = {}
        self._is_paused = False
        self._hot_log = open_log()
        self._ear: EagerEar | None = None
        self._foreign: ForeignStream | None = None
        if consuming.source is not None:
            self._foreign = ForeignStream(consuming, consuming.source, self._hot_log)
        try:
            self._known = self._register()
        except BaseException:
            self._close_tiers()
            raise
        self._window = self._open_window()
        # A replay reports nothing: the producer would keep waiting for it when it is over.
        if self._foreign is not None and consuming.replay is None:
            foreign = self._foreign
            crew.start(self._report_role, lambda _stop, _in_handler: foreign.reporting())

    def step(self) -> Progress:
        """Look who is there and what is free, and adjust."""
        worker_id = self._consuming.leases.worker_id
        view = self._lanes.watch(self._consuming.control(), self._name, worker_id)
        known = self._known
        if view is None or view.epoch != known.epoch or len(view.holders) != known.lanes:
            self._stop_lanes(set(self._working))
            self._known = self._register()
            self._window = self._open_window()
            return AGAIN
        if worker_id not in view.workers:
            self._consuming.leases.join(self._consuming.control(), self._name)
            return AGAIN
        self._note_pause(view)
        if self._ear is not None:
            self._ear.tend()
        wanted = lanes_for(view, worker_id)
        self._adjust(wanted)
        self._write_letters()
        pause_seconds = WATCH_SECONDS if len(wanted) == view.lanes else WATCH_OTHERS_SECONDS
        if view.next_end_seconds is not None:
            # If it is not renewed by then, its holder is dead and the lane is free at that moment.
            pause_seconds = min(pause_seconds, view.next_end_seconds + AFTER_SECONDS)
        return Progress(0, pause_seconds=pause_seconds)

    def wait(self, stop: threading.Event) -> None:
        """Every step says itself how long to wait."""

    def close(self) -> None:
        """Let the lanes finish what they have in hand, and leave."""
        roles = set(self._working.values())
        self._stop_lanes(set(self._working))
        # First the share, so that the others take the lanes as soon as they are given back. If
        # that fails, the books notice by themselves that this worker is gone.
        with suppress(psycopg.Error, ServerUnavailable):
            self._consuming.leases.leave(self._consuming.control(), self._name)
        # They have handlers to finish, also where it is a broken connection that ends this one.
        with self._excused:
            self._crew.wait(roles)
        with suppress(psycopg.Error, ServerUnavailable):
            self._write_letters()
        if self._foreign is not None:
            self._crew.stop(self._report_role)
            self._crew.wait({self._report_role})
        self._close_tiers()

    @property
    def _report_role(self) -> str:
        return f"source:{self._name}"

    def _close_tiers(self) -> None:
        if self._foreign is not None:
            self._foreign.close()
        self._close_ear()
        self._hot_log.close()

    def _open_cold_tier(self) -> ColdTier | None:
        """One for each who reads: what they unpack they share anyway."""
        if self._foreign is not None:
            return self._foreign.open_cold_tier()
        consuming = self._consuming
        return own_cold_tier(consuming.settings, consuming.stream_name, consuming.control)

    def _register(self) -> Registration:
        consuming, settings = self._consuming, self._consuming.settings
        # A connection of its own for this once: registering is a transaction, and may wait.
        with connect_stage(settings.database_url, f"penstock {self._name}") as connection:
            require_current(connection, settings.schema)
            starts: StartChooser = Starts(settings.schema, self._open_cold_tier())
            sources = Sources(settings.schema)
            if self._foreign is not None:
                starts = self._foreign.enter(connection)
                choose = partial(starts.choose, connection, self._name, consuming.options)
                sources.replace_start(connection, self._name, choose)
            else:
                sources.require_own(connection, consuming.stream_name)
                Streams(settings.schema).register(connection, consuming.stream_name)
            if consuming.replay is not None:
                starts = NoStart()
            known = Inbox(settings.schema, starts).register(
                connection, self._name, consuming.options, self._deployed_at
            )
        emit(signals.ConsumerRegistered(self._name, consuming.stream_name, known.start_position))
        consuming.leases.join(consuming.control(), self._name)
        return known

    def _open_window(self) -> StreamWindow:
        consuming = self._consuming
        brownout = consuming.settings.brownout
        warm_tier: WarmTier = OwnWarmTier(
            consuming.settings, consuming.stream_name, consuming.control
        )
        if self._foreign is not None and consuming.source is not None:
            warm_tier, brownout = self._foreign.tier, consuming.source.brownout
        streams = Streams(consuming.settings.schema)

        def incarnation() -> str:
            return streams.incarnation(consuming.control())

        def reader() -> Reader:
            reader = TierReader(
                self._name,
                consuming.stream_name,
                self._hot_log,
                warm_tier,
                self._open_cold_tier(),
                brownout=brownout,
                incarnation=incarnation if self._foreign is None else None,
            )
            replay = consuming.replay
            return reader if replay is None else RangeReader(reader, replay.last)

        self._close_ear()
        if self._is_eager:
            self._ear = EagerEar(
                consuming.settings.database_url, consuming.stream_name, consuming.settings.schema
            )
        return StreamWindow(
            self._known.lanes, consuming.options.batch_size, ahead=reader(), behind=reader()
        )

    @property
    def _is_eager(self) -> bool:
        """Whether to begin with events that are not published yet, where nothing else is to do."""
        consuming, settings = self._consuming, self._consuming.settings
        return (
            settings.early_events
            and settings.wakeup == "notify"
            and self._hot_log.keeps_entries
            and self._foreign is None
            and consuming.replay is None
            and self._known.lanes == 1
            and may_run_ahead(consuming.options, consuming.plan)
        )

    def _close_ear(self) -> None:
        if self._ear is not None:
            self._ear.close()
            self._ear = None

    def _adjust(self, wanted: set[int]) -> None:
        before = set(self._working)
        self._stop_lanes(before - wanted)
        for lane in wanted:
            role = self._working[lane] = self._known.role(lane)
            self._crew.start(role, self.lane_opener(lane))
        if wanted != before:
            known = self._known
            emit(signals.LanesShared(self._name, tuple(sorted(wanted)), known.lanes, known.epoch))

    def lane_opener(
        self, lane: int
    ) -> Callable[[threading.Event, AbstractContextManager[Any]], Lane]:
        """Opens the stage of one lane, in the epoch that is known now."""
        known, window, ear = self._known, self._window, self._ear
        return lambda stop, in_handler: Lane(
            self._consuming, known, lane, window, ear, stop=stop, in_handler=in_handler
        )

    def _stop_lanes(self, lanes: set[int]) -> None:
        for lane in lanes:
            self._crew.stop(self._working.pop(lane))

    def _write_letters(self) -> None:
        """What a lane has left that this worker has no more; every lane begins and ends with it."""
        if self._consuming.losses.letters and not self._working:
            self.lane_opener(0)(threading.Event(), nullcontext()).close()

    def _note_pause(self, view: LaneView) -> None:
        if view.is_paused != self._is_paused:
            self._is_paused = view.is_paused
            noted = signals.ConsumerPaused if view.is_paused else signals.ConsumerResumed
            emit(noted(self._name))
