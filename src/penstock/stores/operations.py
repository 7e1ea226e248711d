"""What operators do to dead letters and parked events, chunk by chunk, each on record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeVar

import psycopg

from penstock.stores.inbox import array
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
Kind = Literal["redrive", "discard", "release"]
End = Literal["done", "stopped", "interrupted"]

LOCK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class InHand:
    """A letter that somebody works on at this moment."""

    consumer: str
    position: int


class Standing(NamedTuple):
    """What is on its way, and what became of the rest, unless it was handled."""

    in_flight: int = 0
    failed: int = 0
    discarded: int = 0
    """By others, or forgotten together with their consumer."""
    skipped: int = 0


class _Place(NamedTuple):
    """A letter's number, and its event."""

    id: int
    consumer: str
    position: int
    event_uuid: str
    key_hash: int


class _Waiting(NamedTuple):
    """A parked event that nobody has in hand."""

    consumer: str
    position: int
    event_uuid: str
    key_hash: int
    was_held: bool


_Event = _Place | _Waiting
E = TypeVar("E", _Place, _Waiting)


class Operation:
    """One row of `operation`, begun, and what is done in its name."""

    def __init__(
        self,
        connection: Connection,
        kind: Kind,
        criteria: dict[str, Any],
        *,
        consumer: str | None,
        by: str,
        reason: str,
        schema: str = DEFAULT_SCHEMA,
    ) -> None:
        assert connection.autocommit, "every chunk is a transaction of its own"
        self._connection = connection
        self._sql = Queries("redrive.sql", schema)
        begun = self._run(
            "begin_operation",
            kind=kind,
            consumer=consumer,
            criteria=json.dumps(criteria),
            by=by,
            reason=reason,
        ).fetchone()
        assert begun is not None
        self.id = int(begun[0])
        self._on_the_way = set[tuple[str, str]]()
        """Consumer and event of what was moved, as far as nobody saw what became of it."""
        self._became = Counter[str]()

    def end(self, ended_as: End, failed: int = 0) -> None:
        """Say that it is over."""
        self._run("end_operation", operation_id=self.id, ended_as=ended_as, failed=failed)

    def note(self, outcomes: dict[str, int]) -> None:
        """Say how it stands."""
        values = {"failed": outcomes["failed"], "outcomes": json.dumps(outcomes)}
        self._run("note_outcomes", operation_id=self.id, **values)

    # ── redrive ────────────────────────────────────────────────────────────────────────────────

    def move(self, ids: Sequence[int]) -> int:
        """Put letters back into their keys, in one transaction. Returns how many that were.

        Left alone is what is on its way already, what somebody else works on, and what is gone.
        """
        with self._chunk():
            letters = [_Place(*row) for row in self._run("lock_letters", ids=list(ids))]
            moved = [
                (name, letter.event_uuid)
                for name, own in _by_consumer(letters)
                for letter in self._move(name, own)
            ]
        self._on_the_way.update(moved)
        return len(moved)

    def _move(self, consumer: str, letters: Sequence[_Place]) -> Sequence[_Place]:
        marked = self._run("mark_parked", consumer=consumer, event_uuids=_uuids(letters))
        dead = {event_uuid for (event_uuid,) in marked}
        # Held ones first: those that are put in behind them see that they are tried.
        others = [letter for letter in letters if letter.event_uuid not in dead]
        held = self._release_held(consumer, others) if others else set()
        parked = [letter for letter in letters if letter.event_uuid in dead]
        self._run("park", consumer=consumer, ids=_ids(parked), operation_id=self.id)
        moved_uuids = dead | held
        moved = [letter for letter in letters if letter.event_uuid in moved_uuids]
        self._touch(consumer, moved)
        return moved

    def _release_held(self, consumer: str, letters: Sequence[_Place]) -> set[str]:
        chosen = {"consumer": consumer, "positions": _positions(letters)}
        return {row[0] for row in self._run("release_held", **chosen, operation_id=self.id)}

    def tally(self) -> tuple[int, int]:
        """How many letters are on their way, and how many are dead again by this redrive."""
        row = self._run("tally", operation_id=self.id).fetchone()
        assert row is not None
        return row[0], row[1]

    def look(self) -> Standing:
        """What became of the letters so far; what has failed once stays among the failed."""
        in_flight, dead = self.tally()
        if in_flight != len(self._on_the_way):
            self._see_what_became()
        became = self._became
        # Where events are handled at most once, failures are written down after they were settled.
        failed = max(became["failed"], dead)
        return Standing(len(self._on_the_way), failed, became["discarded"], became["skipped"])

    def _see_what_became(self) -> None:
        still = set(self._run("on_the_way", operation_id=self.id).fetchall())
        with self._chunk():
            for consumer, events in groupby(sorted(self._on_the_way - still), key=itemgetter(0)):
                rows = self._run(
                    "outcomes",
                    consumer=consumer,
                    event_uuids=array(event_uuid for _, event_uuid in events),
                    operation_id=self.id,
                )
                self._became.update(dict(rows.fetchall()))
        self._on_the_way &= still

    def take_back(self, count: int) -> int:
        """Make letters that no worker has in hand what they were. Returns how many that were."""
        with self._chunk():
            rows = self._run("lock_waiting", operation_id=self.id, count=count)
            waiting = [_Waiting(*row) for row in rows]
            for consumer, events in _by_consumer(waiting):
                self._take_back(consumer, events)
        self._on_the_way -= {(event.consumer, event.event_uuid) for event in waiting}
        return len(waiting)

    def _take_back(self, consumer: str, events: Sequence[_Waiting]) -> None:
        held = [event for event in events if event.was_held]
        dead = [event for event in events if not event.was_held]
        self._run("hold_again", consumer=consumer, positions=_positions(held))
        self._run("remove_parked", consumer=consumer, positions=_positions(dead))
        self._run("mark_dead", consumer=consumer, event_uuids=_uuids(dead))
        self._run("untouch", consumer=consumer, event_uuids=_uuids(events), operation_id=self.id)
        self._promote_after(consumer, dead)

    # ── discard ────────────────────────────────────────────────────────────────────────────────

    def discard(self, ids: Sequence[int]) -> int | InHand:
        """Give letters up, in one transaction. Returns how many, or the first that is in hand.

        Nothing is changed where one of them is.
        """
        with self._chunk():
            letters = [_Place(*row) for row in self._run("read_places", ids=list(ids))]
            if (in_hand := self._lock_all(letters)) is not None:
                return in_hand
            for consumer, own in _by_consumer(letters):
                self._discard(consumer, own)
            return len(letters)

    def _lock_all(self, letters: Sequence[_Place]) -> InHand | None:
        """Lock letters and parked rows, without waiting; the first that is in other hands."""
        free: set[int] = set()
        # Parked rows first, as workers take them; a letter that gets one meanwhile is locked then.
        for consumer, own in _by_consumer(letters):
            chosen = {"consumer": consumer, "positions": _positions(own)}
            ours = {row[0] for row in self._run("lock_parked", **chosen)}
            locked = {row[0] for row in self._run("lock_letters", ids=_ids(own))}
            busy = {row[0] for row in self._run("parked", **chosen)} - ours
            free |= {x.id for x in own if x.id in locked and x.position not in busy}
        for letter in letters:
            if letter.id not in free:
                return InHand(letter.consumer, letter.position)
        return None

    def _discard(self, consumer: str, letters: Sequence[_Place]) -> None:
        self._run("delete_letters", ids=_ids(letters))
        self._run("remove_parked", consumer=consumer, positions=_positions(letters))
        self._run("mark_discarded", consumer=consumer, event_uuids=_uuids(letters))
        self._touch(consumer, letters)
        self._promote_after(consumer, letters)

    # ── release ────────────────────────────────────────────────────────────────────────────────

    def release(self, consumer: str, positions: Sequence[int]) -> int:
        """Make parked events due now. Returns how many; those in a worker's hands are not."""
        with self._chunk():
            rows = self._run(
                "release_waiting", consumer=consumer, positions=list(positions)
            ).fetchall()
            self._run(
                "touch",
                consumer=consumer,
                event_uuids=array(event_uuid for event_uuid, _ in rows),
                positions=array(str(position) for _, position in rows),
                operation_id=self.id,
            )
        return len(rows)

    # ── the parts of all ───────────────────────────────────────────────────────────────────────

    def _touch(self, consumer: str, letters: Sequence[_Place]) -> None:
        self._run(
            "touch",
            consumer=consumer,
            event_uuids=_uuids(letters),
            positions=_positions(letters),
            operation_id=self.id,
        )

    def _promote_after(self, consumer: str, removed: Sequence[_Event]) -> None:
        first: dict[int, int] = {}
        for event in removed:
            lowest = first.get(event.key_hash, event.position)
            first[event.key_hash] = min(lowest, event.position)
        self._run(
            "promote_after",
            consumer=consumer,
            key_hashes=list(first),
            positions=list(first.values()),
        )

    @contextmanager
    def _chunk(self) -> Iterator[None]:
        """A transaction whose plans go by keys."""
        with self._connection.transaction():
            self._run("prepare", lock_timeout=f"{LOCK_SECONDS:g}s")
            yield

    def _run(self, query: str, **parameters: Any) -> psycopg.Cursor[Any]:
        # Never prepared: a plan for any number of letters is one for ten.
        return self._connection.execute(self._sql[query], parameters, prepare=False)


def _by_consumer(events: Iterable[E]) -> Iterable[tuple[str, list[E]]]:
    found: dict[str, list[E]] = {}
    for event in events:
        found.setdefault(event.consumer, []).append(event)
    return sorted(found.items())


def _ids(letters: Sequence[_Place]) -> str:
    return array(str(letter.id) for letter in letters)


def _positions(events: Sequence[_Event]) -> str:
    return array(str(event.position) for event in events)


def _uuids(events: Sequence[_Event]) -> str:
    return array(event.event_uuid for event in events)
