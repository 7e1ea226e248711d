"""What a replay would deliver: which range, how many events, and from which tiers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg

from penstock.core.outgoing import Unset
from penstock.core.replays import Replay, replay_name
from penstock.core.settings import Settings
from penstock.core.sources import Source
from penstock.errors import (
    ConsumerUnknown,
    OperationRefused,
    ServerUnavailable,
    ServerUnsuitable,
    UsageError,
)
from penstock.stores.cold_tier import ColdTier, own_cold_tier, source_cold_tier
from penstock.stores.queries import Queries
from penstock.stores.redis_log import RedisLog
from penstock.stores.replays import Replays
from penstock.stores.sources import Bounds
from penstock.stores.starts import Extent, OutboxExtent, with_archive

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """What an operator asks for: one beginning, and at most one end."""

    original: str
    """The consumer's full name."""
    stream_name: str | None = None
    first: int | None = None
    last: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        if (self.first is None) is (self.since is None):
            raise UsageError("Write where the replay begins: either --from, or --since.")
        if self.last is not None and self.until is not None:
            raise UsageError("Write where the replay ends with --to or with --until, not both.")


@dataclass(frozen=True, slots=True)
class TierShare:
    """The positions of a range that are read from one tier."""

    tier: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """A replay as it would begin now."""

    replay: Replay
    events: int
    """Without the holes."""
    shares: tuple[TierShare, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the original stands."""

    stream_name: str
    epoch: int
    floor: int
    first: int
    head: int
    is_foreign: bool


class ReplayPlanner:
    """Plans replays and enters them into the books, on a connection in autocommit."""

    def __init__(
        self, connection: Connection, settings: Settings, source: Source | None = None
    ) -> None:
        assert connection.autocommit, "planning is a transaction of its own"
        self._connection = connection
        self._settings = settings
        self._source = source
        self._replays = Replays(settings.schema)
        self._operator_sql = Queries("operator.sql", settings.schema)
        self._cleanup_sql = Queries("cleanup.sql", settings.schema)

    def plan(self, request: ReplayRequest) -> ReplayPlan:
        """Find out what a replay would deliver. Raises OperationRefused where it cannot."""
        place = self._place(request)
        kept = self._kept(place)
        cold_tier = self._cold_tier(place)
        replay = self._replay(request, place, with_archive(kept, cold_tier))
        return ReplayPlan(
            replay,
            self._replays.count_events(self._connection, replay),
            tuple(self._shares(replay, kept.bounds().first)),
        )

    def begin(self, request: ReplayRequest, *, by: str, reason: str = "") -> ReplayPlan:
        """Plan a replay and enter it: nothing that it needs is pruned in between, or later."""
        with self._connection.transaction():
            stream = {"stream_name": self._place(request).stream_name}
            self._connection.execute(self._cleanup_sql["hold_pruning"], stream)
            plan = self.plan(request)
            self._replays.begin(self._connection, plan.replay, by=by, reason=reason)
        return plan

    # ── the range ─────────────────────────────────────────────────────────────────────────────

    def _place(self, request: ReplayRequest) -> _Place:
        row = self._connection.execute(
            self._operator_sql["place"], {"consumer": request.original}
        ).fetchone()
        if row is None:
            raise ConsumerUnknown(
                f"{request.original} is not in the books: it has handled nothing yet, so there is "
                "nothing to deliver again. Nothing was changed."
            )
        place = _Place(*row)
        if request.stream_name not in (None, place.stream_name):
            raise UsageError(
                f"{request.original} reads {place.stream_name}, not {request.stream_name}. "
                "Nothing was changed."
            )
        return place

    def _replay(self, request: ReplayRequest, place: _Place, extent: Extent) -> Replay:
        first, last = self._range(request, place, extent)
        if first > last:
            raise OperationRefused(
                f"There is nothing to deliver again: {request.original} has finished "
                f"{place.stream_name} up to {place.floor}, and the range is empty. Nothing was "
                "changed."
            )
        _require_readable(first, last, place, extent.bounds())
        label = request.label or self._replays.free_label(self._connection, request.original)
        return Replay(
            name=replay_name(request.original, label),
            original=request.original,
            stream_name=place.stream_name,
            first=first,
            last=last,
        )

    def _range(self, request: ReplayRequest, place: _Place, extent: Extent) -> tuple[int, int]:
        first, last = request.first, request.last
        if request.since is not None:
            first = extent.position_at(request.since) or place.head + 1
        if request.until is not None:
            behind = extent.position_at(request.until)
            last = place.floor if behind is None else min(behind - 1, place.floor)
        assert first is not None, "a request has a beginning"
        return first, place.floor if last is None else last

    # ── the tiers ─────────────────────────────────────────────────────────────────────────────

    def _kept(self, place: _Place) -> Extent:
        if place.is_foreign:
            return _SeenExtent(place)
        return OutboxExtent(self._connection, place.stream_name, self._settings.schema)

    def _cold_tier(self, place: _Place) -> ColdTier | None:
        if self._source is None:
            return own_cold_tier(self._settings, place.stream_name, lambda: self._connection)
        if self._source.archive_url is None:
            return None
        return source_cold_tier(self._source.archive_url, place.stream_name)

    def _shares(self, replay: Replay, warm_first: int) -> Iterator[TierShare]:
        hot_first = self._hot_first(replay) or replay.last + 1
        ends = {
            "archive": min(warm_first, hot_first) - 1,
            "outbox": hot_first - 1,
            "hot log": replay.last,
        }
        first = replay.first
        for tier, end in ends.items():
            last = min(end, replay.last)
            if first <= last:
                yield TierShare(tier, first, last)
                first = last + 1

    def _hot_first(self, replay: Replay) -> int | None:
        """Where the hot log begins, if anybody can tell."""
        source, settings = self._source, self._settings
        url, prefix = settings.redis_url, settings.redis_prefix
        if source is not None:
            prefix = source.redis_prefix
            url = url if isinstance(source.redis_url, Unset) else source.redis_url
        if url is None:
            return None
        hot_log = RedisLog(url, prefix=prefix)
        try:
            entries = hot_log.read(replay.stream_name, after=0, count=1, wait_seconds=0.0)
        except (ServerUnavailable, ServerUnsuitable):
            return None
        finally:
            hot_log.close()
        return entries[0][0] if entries else None


class _SeenExtent:
    """A stream of another service, as this database's workers saw it last."""

    def __init__(self, place: _Place) -> None:
        self._place = place

    def bounds(self) -> Bounds:
        """What they saw."""
        return Bounds(self._place.first, self._place.head)

    def position_at(self, moment: datetime) -> int | None:
        """Nobody here knows when an event of another service was sent."""
        raise OperationRefused(
            f"{self._place.stream_name} is a stream of another service: which event was sent at "
            f"{moment.isoformat()}, this database does not know. Nothing was changed; write "
            "positions, with --from and --to."
        )


def _require_readable(first: int, last: int, place: _Place, bounds: Bounds) -> None:
    if first < 1:
        raise UsageError("Positions begin at 1. Nothing was changed.")
    if last > place.floor:
        raise OperationRefused(
            f"Up to {place.floor} everything of {place.stream_name} has been delivered, so {last} "
            "cannot be delivered again. Nothing was changed; write --to "
            f"{place.floor}, or leave it out."
        )
    if first < bounds.first:
        raise OperationRefused(
            f"{place.stream_name}/{first} is in no tier any more. Nothing was changed; the first "
            f"position that can be delivered again is {bounds.first}."
        )
