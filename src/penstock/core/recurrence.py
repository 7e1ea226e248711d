"""How a timer recurs: when its runs are due, and which of them are still worth an event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Literal, cast, get_args
from zoneinfo import ZoneInfo

import orjson
from cronsim import CronSim, CronSimError

from penstock.errors import InvalidTimer

CatchUp = Literal["one", "all", "none"]

EVERY_SECONDS_MIN = 1.0
EVERY_DAYS_MAX = 36_525
CRON_CHARACTERS_MAX = 200

MISSED_AFTER_SECONDS = 60.0
"""A run that is later than this counts as missed, even where no newer one is due."""

RUNS_MAX = 100
"""How many runs of one timer a firing makes up for; the rest come with the next firing."""

# How far to look back for a cron's newest run, nearest first, so that neither a cron of every
# second nor one of every leap year takes long after a year without anybody to fire it.
_LOOK_BACK = tuple(
    timedelta(seconds=seconds) for seconds in (60, 3_600, 86_400, 32 * 86_400, 366 * 86_400)
)
_A_DATE = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """A fixed rate (`every_seconds`), or a cron expression in a time zone; valid when made."""

    every_seconds: float | None = None
    cron: str | None = None
    zone: str | None = None
    catch_up: CatchUp = "one"

    def __post_init__(self) -> None:
        if self.catch_up not in get_args(CatchUp):
            raise InvalidTimer(f'catch_up is "one", "all" or "none", not {self.catch_up!r}.')
        if (self.every_seconds is None) == (self.cron is None):
            raise InvalidTimer("A timer recurs by every= or by cron=, and not by both.")
        if self.every_seconds is not None:
            _check_every(self.every_seconds)
            if self.zone is not None:
                raise InvalidTimer("zone= belongs to cron=; every= means so many seconds anywhere.")
        if self.cron is not None:
            _zone(self.zone)
            _check_cron(self.cron)

    def to_json(self) -> dict[str, object]:
        """What is kept in the column timer.schedule; `from_json` reads it back."""
        fields = {"every_seconds": self.every_seconds, "cron": self.cron, "zone": self.zone}
        return {**{k: v for k, v in fields.items() if v is not None}, "catch_up": self.catch_up}

    @classmethod
    def from_text(cls, stored: str) -> Recurrence:
        """The same of the column's text. Raises InvalidTimer."""
        try:
            return cls.from_json(orjson.loads(stored))
        except orjson.JSONDecodeError:
            # PostgreSQL stores numbers and depths that nothing else can read.
            raise InvalidTimer("How it recurs cannot be read.") from None

    @classmethod
    def from_json(cls, stored: Mapping[str, object]) -> Recurrence:
        """The recurrence that was stored. Raises InvalidTimer if it is none of ours."""
        unknown = stored.keys() - {"every_seconds", "cron", "zone", "catch_up"}
        if unknown:
            raise InvalidTimer(f"A recurrence has no field {min(unknown)!r}.")
        every = stored.get("every_seconds")
        cron, zone = stored.get("cron"), stored.get("zone")
        if isinstance(every, bool) or not isinstance(every, int | float | None):
            raise InvalidTimer("A recurrence's every_seconds is a number.")
        if not isinstance(cron, str | None) or not isinstance(zone, str | None):
            raise InvalidTimer("A recurrence's cron and zone are texts.")
        return cls(
            every_seconds=None if every is None else float(every),
            cron=cron,
            zone=zone,
            catch_up=cast("CatchUp", stored.get("catch_up", "one")),
        )

    def first_after(self, moment: datetime) -> datetime:
        """The first run after a moment: a whole interval later, or the next time of the cron."""
        return next(self.runs_after(moment))

    def runs_after(self, moment: datetime) -> Iterator[datetime]:
        """The runs that follow a run at `moment`, in order, in UTC, without an end."""
        moment = moment.astimezone(UTC)
        if self.every_seconds is not None:
            return _fixed_rate(moment, timedelta(seconds=self.every_seconds))
        assert self.cron is not None
        return _cron_times(self.cron, _zone(self.zone), moment)

    def newest_run(self, due_at: datetime, moment: datetime) -> datetime:
        """The last run that is due at `moment`, counted from the one that is due at `due_at`."""
        due_at, moment = due_at.astimezone(UTC), moment.astimezone(UTC)
        if self.every_seconds is not None:
            every = timedelta(seconds=self.every_seconds)
            return due_at + (moment - due_at) // every * every
        for distance in _LOOK_BACK:
            if moment - distance <= due_at:
                break
            if (found := self._last_between(moment - distance, moment)) is not None:
                return found
        return self._last_between(due_at, moment) or due_at

    def _last_between(self, start: datetime, end: datetime) -> datetime | None:
        last = None
        for run in self.runs_after(start):
            if run > end:
                break
            last = run
        return last

    def __str__(self) -> str:
        if self.every_seconds is not None:
            return f"every {timedelta(seconds=self.every_seconds)}"
        return f"cron {self.cron} ({self.zone or 'UTC'})"


@dataclass(frozen=True, slots=True)
class Runs:
    """What a firing has to do: an event for each of `fire`, and the next one at `next_due_at`."""

    fire: tuple[datetime, ...]
    next_due_at: datetime


def parse_recurrence(
    *,
    every: timedelta | None = None,
    cron: str | None = None,
    zone: str | None = None,
    catch_up: str = "one",
) -> Recurrence | None:
    """How a timer recurs by the arguments of `schedule`; None: once. Raises InvalidTimer."""
    if every is None and cron is None:
        if zone is not None:
            raise InvalidTimer("zone= belongs to cron=, and there is no cron=.")
        if catch_up != "one":
            raise InvalidTimer("catch_up= belongs to a timer that recurs: every= or cron=.")
        return None
    if every is not None and not isinstance(every, timedelta):
        raise InvalidTimer(f"every= is a timedelta, not {type(every).__name__}.")
    if zone is not None and not isinstance(zone, str):
        raise InvalidTimer(f"zone= is a name such as 'Europe/Berlin', not {type(zone).__name__}.")
    if cron is not None and not isinstance(cron, str):
        raise InvalidTimer(f"cron= is a text such as '0 9 * * MON-FRI', not {type(cron).__name__}.")
    return Recurrence(
        every_seconds=None if every is None else every.total_seconds(),
        cron=None if cron is None else " ".join(cron.split()),
        zone=zone,
        catch_up=cast("CatchUp", catch_up),
    )


def due_runs(recurrence: Recurrence, due_at: datetime, moment: datetime) -> Runs:
    """Which runs to fire at `moment`, where the next one was due at `due_at`.

    A run is missed if a newer one is due as well, or if it is MISSED_AFTER_SECONDS late. "one"
    fires the newest, "all" every run (RUNS_MAX at a time), "none" only what was not missed.
    """
    due_at, moment = due_at.astimezone(UTC), moment.astimezone(UTC)
    if due_at > moment:
        return Runs((), due_at)
    if recurrence.catch_up == "all":
        runs = [due_at, *islice(recurrence.runs_after(due_at), RUNS_MAX)]
        due = tuple(run for run in runs[:RUNS_MAX] if run <= moment)
        return Runs(due, runs[len(due)])
    newest = recurrence.newest_run(due_at, moment)
    late_seconds = (moment - newest).total_seconds()
    is_left_out = recurrence.catch_up == "none" and late_seconds > MISSED_AFTER_SECONDS
    return Runs(() if is_left_out else (newest,), recurrence.first_after(newest))


def _check_every(every_seconds: float) -> None:
    if not EVERY_SECONDS_MIN <= every_seconds <= EVERY_DAYS_MAX * 86_400:
        raise InvalidTimer(
            f"every= is at least {EVERY_SECONDS_MIN:g} s and at most {EVERY_DAYS_MAX} days, "
            f"not {every_seconds:g} s."
        )


@lru_cache(maxsize=256)
def _check_cron(cron: str) -> None:
    if len(cron) > CRON_CHARACTERS_MAX or not cron.isascii():
        raise InvalidTimer(f"cron= is plain ASCII of at most {CRON_CHARACTERS_MAX} characters.")
    try:
        next(CronSim(cron, _A_DATE))
    except CronSimError as error:
        raise InvalidTimer(
            f"cron={cron!r} is no cron expression ({error}). It has five fields (minute, hour, day "
            "of the month, month, day of the week), or six with the second first."
        ) from None
    except (StopIteration, RuntimeError):
        raise InvalidTimer(f"cron={cron!r} never comes true.") from None


@lru_cache(maxsize=64)
def _zone(name: str | None) -> ZoneInfo | None:
    if name is None or name == "UTC":
        return None
    try:
        return ZoneInfo(name)
    # Names of folders and names with dots or NULs each fail in their own way.
    except (KeyError, ValueError, OSError, TypeError):
        raise InvalidTimer(
            f"There is no time zone {name!r}; zone= is a name such as 'Europe/Berlin'."
        ) from None


def _fixed_rate(moment: datetime, every: timedelta) -> Iterator[datetime]:
    try:
        while True:
            moment += every
            yield moment
    except OverflowError:
        raise InvalidTimer("The timer's next run lies beyond the year 9999.") from None


def _cron_times(cron: str, zone: ZoneInfo | None, moment: datetime) -> Iterator[datetime]:
    try:
        for local in CronSim(cron, moment.astimezone(zone or UTC)):
            run = local.astimezone(UTC)
            # In the hour that is repeated when clocks go back, the library begins before the moment
            # that it was given; a run at a fixed hour is not repeated.
            if run > moment:
                moment = run
                yield run
    except OverflowError:
        pass
    raise InvalidTimer("The timer has no further run before the year 9999.")
