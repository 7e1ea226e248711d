"""Compares everything that was written down, layer by layer, after the last fault.

One layer of defence may hide that another is missing, so each is looked at by itself: what senders
believe, the business rows beside the events, the books of every consumer, the hot log, whatever
must not be left behind, and every dead letter there ever was.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
import redis

from penstock.core.audit import audit
from penstock.core.books import Books
from penstock.core.history import ConsumerHistory, History, SentRow
from penstock.core.mac import MacKeys
from tests.chaos.app import STREAM, Surroundings, Trouble
from tests.chaos.operator import Buried, Operator
from tests.chaos.tripwires import alarms
from tests.histories import read_consumer, read_holes
from tests.signing import keys_of
from tests.waiting import wait_until
from tests.workload import read_beliefs

EXAMPLES_MAX = 5
STRIKES = 3
UNSETTLED = """
SELECT (SELECT count(*) FROM events.outbox_event WHERE position IS NULL) AS unnumbered,
       (SELECT coalesce(sum(s.head - r.position), 0)
          FROM events.reader r JOIN events.stream s ON s.name = r.stream_name
         WHERE r.kind = 'consumer')::bigint AS behind,
       (SELECT coalesce(sum(head - published), 0) FROM events.stream)::bigint AS unpublished,
       (SELECT count(*) FROM events.parked_event) AS parked,
       (SELECT count(*) FROM events.dead_letter) AS dead
"""
EFFECTS = """
SELECT event_uuid::text, account, of_account FROM effect WHERE consumer = %s ORDER BY number
"""
OUTBOX = """
SELECT event_uuid::text, key, (payload ->> 'number')::bigint, position
  FROM events.outbox_event WHERE stream_name = %s
"""
LEFT_BEHIND = """
SELECT 'seal', id::text FROM events.seal
UNION ALL
-- Of an event that was settled since, whoever takes its lane next forgets it.
SELECT 'suspect', s.consumer || ' at ' || s.position FROM events.suspect s
 WHERE NOT EXISTS (SELECT 1 FROM events.processed_event p
                    WHERE p.consumer = s.consumer AND p.event_uuid = s.event_uuid)
UNION ALL
SELECT 'quarantine', name FROM events.quarantine
UNION ALL
SELECT 'lease of an epoch that has ended', l.role
  FROM events.stream_lease l
  JOIN events.consumer c ON split_part(l.role, '/', 1) = 'consumer:' || c.name
 WHERE l.epoch <> c.epoch
UNION ALL
SELECT 'posting without an event', p.event_uuid::text
  FROM posting p LEFT JOIN events.outbox_event o USING (event_uuid) WHERE o.event_uuid IS NULL
UNION ALL
SELECT 'event without its posting', o.event_uuid::text
  FROM events.outbox_event o LEFT JOIN posting p USING (event_uuid) WHERE p.event_uuid IS NULL
UNION ALL
SELECT 'effect without its settled row', e.consumer || ' ' || e.event_uuid
  FROM effect e LEFT JOIN events.processed_event s
    ON s.consumer = e.consumer AND s.event_uuid = e.event_uuid AND s.outcome = 'handled'
 WHERE s.event_uuid IS NULL
UNION ALL
SELECT 'settled row without its effect', s.consumer || ' ' || s.event_uuid
  FROM events.processed_event s LEFT JOIN effect e
    ON s.consumer = e.consumer AND s.event_uuid = e.event_uuid
 WHERE s.outcome = 'handled' AND e.event_uuid IS NULL
"""

BODIES = """
SELECT o.position, events.entry(o, s.origin)
  FROM events.outbox_event o JOIN events.stream s ON s.name = o.stream_name
 WHERE o.stream_name = %(stream)s AND o.position >= %(first)s
UNION ALL
SELECT h.last, events.hole_entry(h, s.origin)
  FROM events.hole h JOIN events.stream s ON s.name = h.stream_name
 WHERE h.stream_name = %(stream)s AND h.last >= %(first)s
"""
LOG_KEY = f"penstock:{{{STREAM}}}:log"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; nothing at all is right."""

    books: Books
    faults: tuple[str, ...]
    explained: Counter[str]
    """Why events were buried, and how many."""
    settled_seconds: float | None
    """How long it took after the last fault until nothing was pending; None: too long."""

    @property
    def holds(self) -> bool:
        return self.books.balance and not self.faults and self.settled_seconds is not None


class Servers(Protocol):
    """Where the books are, past all proxies."""

    @property
    def direct_database_url(self) -> str:
        """PostgreSQL."""

    @property
    def direct_redis_url(self) -> str:
        """Redis."""


class Checker:
    """Waits until nothing is pending, then reads everything in one snapshot."""

    def __init__(
        self, servers: Servers, folder: Path, operator: Operator, *, names: Sequence[str]
    ) -> None:
        self._servers = servers
        self._folder = folder
        self._operator = operator
        self._names = names

    def settle(self, seconds: float) -> float | None:
        """Wait, as an operator who redrives and releases; returns how long that took."""
        started_at = time.monotonic()
        try:
            wait_until(self._is_settled, what="nothing is pending", seconds=seconds)
        except AssertionError:
            return None
        return time.monotonic() - started_at

    def _is_settled(self) -> bool:
        try:
            self._operator.release_quarantined()
            unsettled = self.unsettled()
            if unsettled["dead"]:
                self._operator.redrive(seconds=1.0)
            # Where Redis lost it last of all, nobody has missed it yet.
            is_hot = self._has_hot_log()
        except (psycopg.Error, redis.RedisError):
            return False
        return is_hot and not any(unsettled.values())

    def _has_hot_log(self) -> bool:
        with redis.Redis.from_url(self._servers.direct_redis_url, protocol=2) as client:
            return bool(client.xlen(LOG_KEY))

    def unsettled(self) -> dict[str, int]:
        """What is still to be done, by kind."""
        with psycopg.connect(self._servers.direct_database_url, connect_timeout=3) as connection:
            cursor = connection.execute(UNSETTLED)
            row = cursor.fetchone()
            assert cursor.description is not None
            assert row is not None
            return dict(zip((column.name for column in cursor.description), row, strict=True))

    def check(self, settled_seconds: float | None, more_faults: Iterable[str] = ()) -> Verdict:
        """Read everything, and compare it."""
        self._operator.look_at_letters()
        verified = self._operator.verify()
        explained, unexplained = self._explain(self._operator.buried)
        faults = [*more_faults, *verified, *unexplained]
        with psycopg.connect(self._servers.direct_database_url) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            books = audit(self._history(connection))
            faults += _summed(connection.execute(LEFT_BEHIND).fetchall())
            faults += _summed(self._hot_log_faults(connection))
            faults += _summed(alarms(connection))
        if settled_seconds is None:
            faults.append(f"not settled in time: {self.unsettled()}")
        return Verdict(books, tuple(faults), explained, settled_seconds)

    # ── the books ─────────────────────────────────────────────────────────────────────────────

    def _history(self, connection: Connection) -> History:
        tried, known, refused = read_beliefs(sorted(self._folder.glob("*.journal")))
        outbox = connection.execute(OUTBOX, (STREAM,)).fetchall()
        head = connection.execute(
            "SELECT coalesce(max(head), 0) FROM events.stream WHERE name = %s", (STREAM,)
        ).fetchone()
        assert head is not None
        return History(
            acknowledged=frozenset(known),
            refused=frozenset(refused),
            unknown=frozenset(tried - known - refused),
            outbox=tuple(SentRow(*row) for row in outbox),
            head=head[0],
            holes=read_holes(connection, STREAM),
            consumers=tuple(_consumer_history(connection, name) for name in self._names),
        )

    # ── the hot log ───────────────────────────────────────────────────────────────────────────

    def _hot_log_faults(self, connection: Connection) -> Iterator[tuple[str, str]]:
        """Anybody may have written there; but what is signed must be what the outbox holds."""
        with redis.Redis.from_url(self._servers.direct_redis_url, protocol=2) as client:
            entries: Any = client.xrange(LOG_KEY)
        found = [(entry_id.decode(), fields.get(b"e", b"")) for entry_id, fields in entries]
        keys = keys_of(self._servers.direct_database_url)
        signed = {
            position: body
            for entry_id, entry in found
            if entry_id.endswith("-0") and (position := int(entry_id.removesuffix("-0")))
            if (body := signed_body(entry, position, keys)) is not None
        }
        if not signed:
            yield "empty hot log", f"{len(found)} entries, none of them signed"
            return
        window = {"stream": STREAM, "first": min(signed)}
        kept = {position: body.encode() for position, body in connection.execute(BODIES, window)}
        for position, body in signed.items():
            if kept.get(position) != body:
                yield "signed entry that differs from the outbox", f"at {position}: {body!r}"

    # ── the letters ───────────────────────────────────────────────────────────────────────────

    def _explain(self, letters: Iterable[Buried]) -> tuple[Counter[str], list[str]]:
        surroundings = Surroundings(self._folder)
        explained: Counter[str] = Counter()
        unexplained = []
        for letter in letters:
            spoiled = surroundings.failures(letter.consumer, letter.event_uuid)
            why = explain(letter, spoiled)
            if why is None:
                unexplained.append(("buried without a cause", str(letter)))
            else:
                explained[why] += 1
        return explained, _summed(unexplained)


def explain(letter: Buried, spoiled: int) -> str | None:
    """Why an event was buried, after it spoiled so many attempts; None: nothing explains it."""
    match letter.reason, letter.trouble:
        case "fatal", Trouble.FATAL if spoiled:
            return "fatal"
        case "exhausted", Trouble.STUBBORN | Trouble.POISON if spoiled:
            return "exhausted"
        case "exhausted", _ if "FailpointReached" in letter.errors:
            return "exhausted by a failpoint"
        case "crash", Trouble.KILLER if spoiled:
            return "killer"
        case "crash", _ if letter.attempts >= STRIKES:
            # Whoever handled it was killed from outside, three times: docs/GUARANTEES.md says so.
            return "killed from outside"
    return None


def signed_body(entry: bytes, position: int, keys: MacKeys) -> bytes | None:
    """What stands in an entry, if it was signed for its place."""
    header, _, body = entry.partition(b"\n")
    match header.split(b" "):
        case [_, key_id, mac] if key_id in keys.secrets:
            is_signed = keys.is_signed(STREAM, position, body, key_id=key_id, mac=mac)
            return body if is_signed else None
    return None


def _consumer_history(connection: Connection, name: str) -> ConsumerHistory:
    effects = connection.execute(EFFECTS, (name,)).fetchall()
    return read_consumer(connection, name, STREAM, effects)


def _summed(rows: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each kind of fault, with the first few of it."""
    kinds: dict[str, list[str]] = {}
    for kind, example in rows:
        kinds.setdefault(kind, []).append(example)
    return [
        f"{kind}: {len(examples)}, such as {'; '.join(examples[:EXAMPLES_MAX])}"
        for kind, examples in kinds.items()
    ]
