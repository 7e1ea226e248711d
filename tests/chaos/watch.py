"""Looks at the books ten times a second: what went back that must not, and who stood still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import psycopg

EVERY_SECONDS = 0.1
STALL_SECONDS_MIN = 0.3
"""Shorter ones are not worth a word: that is how long a batch may take on a busy machine."""

PUBLISHER_TRACK = "publisher"
STREAM = """
SELECT coalesce(max(s.head), 0),
       EXISTS (SELECT 1 FROM events.outbox_event
                WHERE stream_name = %(stream)s AND position IS NULL),
       current_setting('synchronous_standby_names') = ''
       OR EXISTS (SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync')
  FROM events.stream s WHERE s.name = %(stream)s
"""
LEASES = """
SELECT l.role, l.term, l.owner_id, l.checkpoint,
       l.lease_until > clock_timestamp() AND l.owner_id IS NOT NULL, c.paused_at IS NOT NULL
  FROM events.stream_lease l
  LEFT JOIN events.consumer c ON split_part(l.role, '/', 1) = 'consumer:' || c.name
 WHERE l.stream_name = %(stream)s
"""


@dataclass(frozen=True, slots=True)
class Stall:
    """Somebody had work and did none of it, for so long."""

    who: str
    started_at: float
    """By the clock of the machine, in seconds."""
    ended_at: float

    @property
    def seconds(self) -> float:
        return self.ended_at - self.started_at


@dataclass(slots=True)
class _Track:
    """How far somebody had come when it last moved, or had nothing to do."""

    reached: int
    since: float
    has_work: bool


@dataclass(slots=True)
class Progress:
    """Finds the stalls in a row of looks. Whoever has nothing to do does not stall."""

    stalls: list[Stall] = field(default_factory=list)
    _tracks: dict[str, _Track] = field(default_factory=dict)

    def note(self, who: str, reached: int, now: float, *, has_work: bool) -> None:
        """What one look has seen of one of them."""
        track = self._tracks.get(who)
        if track is None or reached != track.reached or not has_work:
            if track is not None:
                self._end(who, track, now)
            self._tracks[who] = _Track(reached, now, has_work)
        track = self._tracks[who]
        track.has_work = has_work

    def interrupt(self, now: float) -> None:
        """Nobody can work at all just now: whatever stalled so far ends here."""
        for who, track in self._tracks.items():
            self._end(who, track, now)
        self._tracks = {}

    def keep(self, names: Iterable[str]) -> None:
        """Forget those who are no more."""
        self._tracks = {who: self._tracks[who] for who in self._tracks.keys() & set(names)}

    def _end(self, who: str, track: _Track, now: float) -> None:
        if track.has_work and now - track.since >= STALL_SECONDS_MIN:
            self.stalls.append(Stall(who, track.since, now))


@dataclass(slots=True)
class Ratchet:
    """Terms, checkpoints and heads never go back, and a term has one owner."""

    faults: list[str] = field(default_factory=list)
    _highest: dict[tuple[str, str], int] = field(default_factory=dict)
    _owners: dict[tuple[str, int], str] = field(default_factory=dict)

    def note(self, who: str, what: str, value: int) -> None:
        highest = self._highest.get((who, what), value)
        if value < highest:
            self.faults.append(f"the {what} of {who} went back from {highest} to {value}")
        self._highest[who, what] = max(value, highest)

    def note_owner(self, role: str, term: int, owner: str) -> None:
        known = self._owners.setdefault((role, term), owner)
        if known != owner:
            self.faults.append(f"term {term} of {role} has two owners: {known} and {owner}")


class Watch:
    """A thread that looks, on a connection past all proxies."""

    def __init__(self, database_url: Callable[[], str], stream: str) -> None:
        self._database_url = database_url
        self._stream = stream
        self._connection: psycopg.Connection[Any] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_for_ever, name="watch", daemon=True)
        self.progress = Progress()
        self.ratchet = Ratchet()
        self.looks = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Look no more; what stalls at this moment has stalled until now."""
        self._end.set()
        self._thread.join()
        self.progress.interrupt(time.time())
        if self._connection is not None:
            self._connection.close()

    def _look_for_ever(self) -> None:
        while not self._end.wait(EVERY_SECONDS):
            try:
                self._look()
            except psycopg.Error:
                self.progress.interrupt(time.time())
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None

    def _look(self) -> None:
        if self._connection is None:
            self._connection = psycopg.connect(
                self._database_url(), autocommit=True, connect_timeout=1
            )
        parameters = {"stream": self._stream}
        stream = self._connection.execute(STREAM, parameters).fetchone()
        roles = self._connection.execute(LEASES, parameters).fetchall()
        now = time.time()
        self.looks += 1
        assert stream is not None
        head, has_unnumbered, can_commit = stream
        if not can_commit:
            # Every COMMIT waits for a standby that is not there: the same as no server at all.
            self.progress.interrupt(now)
        self.ratchet.note(self._stream, "head", head)
        self.progress.note(PUBLISHER_TRACK, head, now, has_work=has_unnumbered)
        for role, term, owner, checkpoint, is_held, is_paused in roles:
            self.ratchet.note(role, "term", term)
            if is_held:
                self.ratchet.note_owner(role, term, owner)
            if role.startswith("consumer:"):
                self.ratchet.note(role, "checkpoint", checkpoint)
                has_work = checkpoint < head and not is_paused
                self.progress.note(role, checkpoint, now, has_work=has_work)
        self.progress.keep([PUBLISHER_TRACK, *(row[0] for row in roles)])
