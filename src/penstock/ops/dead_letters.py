"""What operators ask about dead letters, and giving them up for good."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg

from penstock.core.lanes import key_hash
from penstock.core.options import POSITION_MAX
from penstock.errors import OperationRefused, ServerUnavailable, UsageError
from penstock.ops.consumers import Consumers
from penstock.stores.dead_letters import Criteria, DeadLetters, Group, Place, State
from penstock.stores.operations import LOCK_SECONDS, End, InHand, Operation
from penstock.stores.postgres import is_lost
from penstock.stores.queries import DEFAULT_SCHEMA

PAGE_LETTERS = 50_000
"""How many letters are chosen at a time, by one look over all of them."""
DISCARD_CHUNK = 1000
LOOK_AGAIN_SECONDS = 0.1

_SPAN = re.compile(r"(\d{1,18})([smhdw])")
_SPAN_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_POSITIONS = re.compile(r"(\d{1,19})(?:(\.\.)(\d{0,19}))?")
_PLACE = re.compile(r"(.+)/(\d+)")

Connection = psycopg.Connection[Any]


# ── what is asked for ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Which letters somebody means, in the words of the command line."""

    references: Sequence[str] = ()
    consumer: str | None = None
    stream: str | None = None
    event_type: str | None = None
    error: str | None = None
    group: str | None = None
    reason: str | None = None
    key: str | None = None
    since: str | None = None
    until: str | None = None
    position: str | None = None
    state: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it names no criterion, and so means every letter."""
        return self == Request()


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a request means as things stand, and the references that lead nowhere."""

    criteria: Criteria
    missing: tuple[str, ...] = ()


def choose(connection: Connection, request: Request, schema: str = DEFAULT_SCHEMA) -> Chosen:
    """Understand a request. Raises UsageError, and ConsumerUnknown for a wrong name."""
    letters = DeadLetters(connection, schema)
    positions = parse_positions(request.position)
    now = letters.clock()
    consumer = request.consumer
    criteria = Criteria(
        consumer=None if consumer is None else Consumers(connection, schema).find(consumer),
        stream_name=request.stream,
        event_type=request.event_type,
        error=request.error,
        fingerprint=request.group,
        reason=request.reason,
        key_hash=None if request.key is None else key_hash(request.key, ""),
        since=parse_moment("--since", request.since, now),
        until=parse_moment("--until", request.until, now),
        first=positions[0],
        last=positions[1],
        states=None if request.state is None else (parse_state(request.state),),
    )
    if not request.references:
        return Chosen(criteria)
    found = find(letters, request.references)
    missing = tuple(text for text, places in found.items() if not places)
    ids = sorted({place.id for places in found.values() for place in places})
    return Chosen(replace(criteria, ids=tuple(ids)), missing)


def find(letters: DeadLetters, references: Sequence[str]) -> dict[str, list[Place]]:
    """The letters that each reference names: a number, an event's UUID, or STREAM/POSITION."""
    parsed = {text: parse_reference(text) for text in references}
    places = letters.find(
        [wanted for wanted in parsed.values() if isinstance(wanted, int)],
        [wanted for wanted in parsed.values() if isinstance(wanted, UUID)],
        [wanted for wanted in parsed.values() if isinstance(wanted, tuple)],
    )
    return {
        text: [
            place
            for place in places
            if wanted in (place.id, place.event_uuid, (place.stream_name, place.position))
        ]
        for text, wanted in parsed.items()
    }


def parse_reference(text: str) -> int | UUID | tuple[str, int]:
    """A letter's number, its event's UUID, or its place. Raises UsageError."""
    if text.isdecimal() and len(text) <= 18:
        return int(text)
    if (place := _PLACE.fullmatch(text)) and len(place[2]) <= 18:
        return place[1], int(place[2])
    try:
        return UUID(text)
    except ValueError:
        raise UsageError(
            f"{text!r} names no dead letter. Write its number, its event's UUID, or "
            "stream/position, for example orders/17. Nothing was changed."
        ) from None


def parse_moment(option: str, text: str | None, now: datetime) -> datetime | None:
    """A time with its zone, or a span before now like 2h. Raises UsageError."""
    if text is None:
        return None
    if span := _SPAN.fullmatch(text.strip().lower()):
        try:
            return now - timedelta(seconds=int(span[1]) * _SPAN_SECONDS[span[2]])
        except OverflowError:
            raise UsageError(f"{option} {text!r} is before all time.") from None
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is neither a span like 30m, 2h or 7d, nor a time like "
            "2030-01-31T06:00:00+00:00."
        ) from None
    if moment.tzinfo is None:
        raise UsageError(
            f"{option} {text!r} has no time zone; write for example {moment.isoformat()}+00:00."
        )
    return moment


def parse_positions(text: str | None) -> tuple[int | None, int | None]:
    """The first and last position of `A`, `A..B` or `A..`. Raises UsageError."""
    if text is None:
        return None, None
    found = _POSITIONS.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--position {text!r} is neither a position like 17 nor a range 17..40.")
    first, last = int(found[1]), int(found[3]) if found[3] else None
    if max(first, last or 0) > POSITION_MAX:
        raise UsageError(f"--position {text!r} is no position: they end at {POSITION_MAX}.")
    return first, last if found[2] else first


def parse_state(text: str) -> State:
    """One of the states. Raises UsageError."""
    try:
        return State(text.strip().lower())
    except ValueError:
        raise UsageError(f"--state {text!r} must be one of {', '.join(State)}.") from None


# ── letters one after another ──────────────────────────────────────────────────────────────────


class Walk:
    """The letters of a choice in the order of positions, each once, in bounded memory.

    Letters that are buried after it began are not among them.
    """

    def __init__(self, letters: DeadLetters, criteria: Criteria, limit: int | None = None) -> None:
        self._letters = letters
        self._criteria = criteria
        self._last_id = letters.last_id()
        self._after = (-1, 0)
        self._page: list[int] = []
        self._taken = 0
        self._has_more = True
        self._left = limit

    @property
    def is_over(self) -> bool:
        """Whether there are no more."""
        self._fill()
        return self._taken == len(self._page)

    def take(self, count: int) -> list[int]:
        """The numbers of the next letters, at most so many."""
        self._fill()
        taken = self._page[self._taken : self._taken + count]
        self._taken += len(taken)
        return taken

    def _fill(self) -> None:
        if self._taken < len(self._page) or not self._has_more:
            return
        limit = PAGE_LETTERS if self._left is None else min(PAGE_LETTERS, self._left)
        page = self._letters.page(
            self._criteria, last_id=self._last_id, after=self._after, limit=limit
        )
        self._page, self._taken = [letter_id for _, letter_id in page], 0
        if self._left is not None:
            self._left -= len(page)
        self._has_more = len(page) == PAGE_LETTERS and self._left != 0
        if page:
            self._after = page[-1]


def consumers_of(groups: Sequence[Group]) -> list[str]:
    """The consumers whose letters these are."""
    return sorted({group.consumer for group in groups})


# ── discard ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Discarded:
    """What a discard did."""

    operation_id: int
    ended_as: End
    discarded: int

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


def discard(
    connection: Connection,
    criteria: Criteria,
    *,
    by: str,
    reason: str,
    schema: str = DEFAULT_SCHEMA,
    is_interrupted: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int], None] = lambda _discarded: None,
) -> Discarded:
    """Give up what matches, in chunks. Whoever is interrupted has discarded the first ones.

    Raises OperationRefused at an event that a worker has in hand; those before it are discarded.
    """
    with reporting_loss("What was discarded so far stays so; run the same command for the rest."):
        walk = Walk(DeadLetters(connection, schema), criteria)
        operation = Operation(
            connection,
            "discard",
            criteria.as_json(),
            consumer=criteria.consumer,
            by=by,
            reason=reason,
            schema=schema,
        )
        discarded = 0
        try:
            while not is_interrupted() and (ids := walk.take(DISCARD_CHUNK)):
                discarded += _discard_chunk(operation, ids, discarded)
                on_progress(discarded)
        except OperationRefused:
            operation.end("stopped")
            raise
        ended_as: End = "done" if walk.is_over else "interrupted"
        operation.end(ended_as)
    return Discarded(operation.id, ended_as, discarded)


def _discard_chunk(operation: Operation, ids: Sequence[int], before: int) -> int:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        done = operation.discard(ids)
        if not isinstance(done, InHand):
            return done
        if time.monotonic() > deadline:
            raise OperationRefused(
                f"A worker of {done.consumer} has had position {done.position} in hand for "
                f"{LOCK_SECONDS:g} s and may be handling it. It was left alone; {before:,} letters "
                "were discarded before it. Try again when it is done, or pause the consumer first."
            )
        threading.Event().wait(LOOK_AGAIN_SECONDS)


@contextmanager
def reporting_loss(advice: str) -> Iterator[None]:
    """A lost connection, or a lock that nobody lets go, becomes a sentence with advice."""
    try:
        yield
    except psycopg.errors.LockNotAvailable as error:
        raise OperationRefused(
            f"Somebody has held a row of these letters for {LOCK_SECONDS:g} s: a hung worker, or "
            f"another operator. {advice}"
        ) from error
    except psycopg.Error as error:
        if not is_lost(error):
            raise
        raise ServerUnavailable(
            f"The connection to PostgreSQL is lost: {str(error).strip()} {advice}"
        ) from error
