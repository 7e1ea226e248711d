"""A sender: real transactions of every kind, and a journal of what it believes of each event.

`python -m tests.chaos.senders JOURNAL SEED EVENTS_PER_SECOND` sends until SIGTERM, whatever happens
to the servers. Several writers share the journal, as the threads of a web server would.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString
from uuid import UUID

import psycopg
from psycopg import conninfo
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.errors import PenstockError
from penstock.runtime.stopping import stop_on_signals
from penstock.stores.identity import new_event_uuid
from penstock.stores.postgres import sqlalchemy_url
from penstock.telemetry import failpoints
from tests.chaos.app import (
    ATTEMPTS_MAX,
    STREAM,
    Entered,
    Remarked,
    Trouble,
    pipeline,
    surroundings,
)
from tests.workload import Journal

ACCOUNTS = tuple(f"account-{number}" for number in range(600))
WRITERS = 5
SIZES = (1, 1, 1, 2, 2, 5, 5, 10, 20, 50)
"""How many events are sent in one transaction."""
BEHIND_SECONDS_MAX = 10.0
"""After an outage, no more than this is caught up with."""
LULL_EVERY_SECONDS = 20.0
LULL_SECONDS = 4.0
LULL_FACTOR = 10.0
"""So many times slower are senders then."""
PAUSE_AFTER_TROUBLE_SECONDS = 0.1
LATE_SECONDS = (0.2, 1.0)
CONNECT = {"connect_timeout": "3", "tcp_user_timeout": "5000"}

# The business rows of several events, of one account each. The row locks on the accounts are held
# to the end of the transaction: a number is the rank of the commit. In the order of the names, so
# that no two senders wait for each other in a circle.
POST: LiteralString = """
WITH draft AS (
    SELECT * FROM unnest(CAST(%(uuids)s AS uuid[]), CAST(%(names)s AS text[])) AS d(uuid, name)),
counted AS (
    INSERT INTO account AS a (name, number) SELECT name, 1 FROM draft ORDER BY name
        ON CONFLICT (name) DO UPDATE SET number = a.number + 1 RETURNING name, number)
INSERT INTO posting SELECT uuid, name, number FROM counted JOIN draft USING (name)
RETURNING event_uuid, number
"""
POST_SQLALCHEMY = text(POST.replace("%(uuids)s", ":uuids").replace("%(names)s", ":names"))

TROUBLES = (
    (Trouble.POISON, 0.002),
    (Trouble.STUBBORN, 0.0003),
    (Trouble.FATAL, 0.0001),
    (Trouble.KILLER, 0.00005),
    (Trouble.SPOILER, 0.0005),
)
# In calls: an attempt has up to three, in its batch, again without a pipeline, and alone.
TIMES = {
    Trouble.POISON: (1, 5),
    # The last ones are for whoever redrives it.
    Trouble.STUBBORN: (ATTEMPTS_MAX + 2, ATTEMPTS_MAX + 4),
    Trouble.FATAL: (3, 5),
    Trouble.KILLER: (1, 4),
    Trouble.SPOILER: (1, 4),
}
REMARKS = 0.05


@dataclass(frozen=True, slots=True)
class Draft:
    """An event that is about to be sent."""

    uuid: UUID
    account: str


class Writer:
    """One thread that sends, one transaction at a time."""

    def __init__(
        self, pipeline: Pipeline, engine: Engine, journal: Journal, chance: random.Random
    ) -> None:
        self._pipeline = pipeline
        self._engine = engine
        self._journal = journal
        self._chance = chance
        self._connection: psycopg.Connection[Any] | None = None
        self._never = threading.Event()

    def send(self) -> int:
        """One transaction, of a kind that chance chooses. Returns how many events it tried."""
        kinds: dict[Callable[[list[Draft]], None], float] = {
            self._commit: 0.66,
            self._commit_late: 0.02,
            self._roll_back: 0.08,
            self._roll_back_to_savepoint: 0.08,
            self._send_with_driver: 0.16,
        }
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        accounts = sorted(self._chance.choices(ACCOUNTS, k=self._chance.choice(SIZES)))
        drafts = [Draft(new_event_uuid(), account) for account in accounts]
        self._journal.write("T", _uuids(drafts))
        kind(drafts)
        return len(drafts)

    def _commit(self, drafts: list[Draft]) -> None:
        with Session(self._engine) as session:
            self._post_all(session, drafts)
            session.commit()
        self._journal.write("K", _uuids(drafts))

    def _commit_late(self, drafts: list[Draft]) -> None:
        """Its ids are drawn early, and others commit before it."""
        # A key of its own, so that nobody has to wait for it.
        alone = Draft(drafts[0].uuid, f"late-{drafts[0].uuid}")
        with self._driver() as connection:
            self._send_posted(connection, [alone])
            self._never.wait(self._chance.uniform(*LATE_SECONDS))
            connection.commit()
        self._journal.write("K", [alone.uuid])
        self._journal.write("R", _uuids(drafts[1:]))

    def _roll_back(self, drafts: list[Draft]) -> None:
        with Session(self._engine) as session:
            self._post_all(session, drafts)
            session.flush()
            session.rollback()
        self._journal.write("R", _uuids(drafts))

    def _roll_back_to_savepoint(self, drafts: list[Draft]) -> None:
        """The second half never happened."""
        half = (len(drafts) + 1) // 2
        with Session(self._engine) as session:
            self._post_all(session, drafts[:half])
            savepoint = session.begin_nested()
            self._post_all(session, drafts[half:])
            savepoint.rollback()
            self._journal.write("R", _uuids(drafts[half:]))
            session.commit()
        self._journal.write("K", _uuids(drafts[:half]))

    def _send_with_driver(self, drafts: list[Draft]) -> None:
        with self._driver() as connection:
            self._send_posted(connection, drafts)
            connection.commit()
        self._journal.write("K", _uuids(drafts))

    @contextmanager
    def _driver(self) -> Iterator[psycopg.Connection[Any]]:
        """A connection that is kept, unless something goes wrong on it."""
        if self._connection is None:
            url = conninfo.make_conninfo(self._pipeline.settings.database_url, **CONNECT)
            self._connection = psycopg.connect(url)
        try:
            yield self._connection
        except BaseException:
            self._connection.close()
            self._connection = None
            raise

    # ── one event ─────────────────────────────────────────────────────────────────────────────

    def _post_all(self, session: Session, drafts: list[Draft]) -> None:
        numbers: dict[UUID, int] = {}
        for turn in _turns(drafts):
            rows = session.execute(POST_SQLALCHEMY, _lists(turn)).tuples()
            numbers |= dict(rows.all())
        for draft in drafts:
            event = self._event(draft.account, numbers[draft.uuid])
            self._pipeline.send(session, STREAM, event, event_uuid=draft.uuid)

    def _send_posted(self, connection: psycopg.Connection[Any], drafts: list[Draft]) -> None:
        numbers: dict[UUID, int] = {}
        for turn in _turns(drafts):
            numbers |= dict(connection.execute(POST, _lists(turn)).fetchall())
        events = [self._event(draft.account, numbers[draft.uuid]) for draft in drafts]
        self._pipeline.send_many(connection, STREAM, events, event_uuids=_uuids(drafts))

    def _event(self, account: str, number: int) -> Entered | Remarked:
        if self._chance.random() < REMARKS:
            return Remarked(account=account, number=number)
        dice = self._chance.random()
        for trouble, odds in TROUBLES:
            if dice < odds:
                times = self._chance.randint(*TIMES[trouble])
                return Entered(account=account, number=number, trouble=trouble, times=times)
            dice -= odds
        return Entered(account=account, number=number)


class Pace:
    """Not more than so many events a second over a while, whatever came between.

    Now and then there is a lull, in which everybody catches up and waits for single events: those
    who read at the end of the log meet others than those who are behind.
    """

    def __init__(self, per_second: float, stop: threading.Event) -> None:
        self._per_second = per_second
        self._stop = stop
        self._next_at = time.monotonic()

    def keep(self, sent: int) -> None:
        """Wait until the next ones may follow."""
        now = time.monotonic()
        is_lull = now % LULL_EVERY_SECONDS < LULL_SECONDS
        if is_lull or surroundings.is_lull:
            self._next_at = now + sent * LULL_FACTOR / self._per_second
        else:
            behind = max(self._next_at, now - BEHIND_SECONDS_MAX)
            self._next_at = behind + sent / self._per_second
        if self._next_at > now:
            self._stop.wait(self._next_at - now)


def write(writer: Writer, pace: Pace, stop: threading.Event) -> None:
    """Send until stopped; what was tried and failed stays unknown."""
    while not stop.is_set():
        sent = 1
        try:
            sent = writer.send()
        except (DBAPIError, psycopg.Error, PenstockError):
            stop.wait(PAUSE_AFTER_TROUBLE_SECONDS)
        except BaseException:  # noqa: BLE001 - a failpoint's, too
            # A bug ends a web server's request, and here the process: nobody would see it else.
            os._exit(1)
        pace.keep(sent)


def _uuids(drafts: list[Draft]) -> list[UUID]:
    return [draft.uuid for draft in drafts]


def _turns(drafts: list[Draft]) -> list[list[Draft]]:
    """The first draft of every account, then the second ones, and so on."""
    turns: list[dict[str, Draft]] = []
    for draft in drafts:
        turn = next((turn for turn in turns if draft.account not in turn), None)
        if turn is None:
            turns.append(turn := {})
        turn[draft.account] = draft
    return [list(turn.values()) for turn in turns]


def _lists(drafts: list[Draft]) -> dict[str, list[str]]:
    return {
        "uuids": [str(draft.uuid) for draft in drafts],
        "names": [draft.account for draft in drafts],
    }


def main() -> None:
    journal_path, seed, per_second = sys.argv[1:]
    stop = threading.Event()
    stop_on_signals(stop, shutdown_seconds=10.0)
    failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
    journal = Journal(Path(journal_path))
    engine = create_engine(
        sqlalchemy_url(pipeline.settings.database_url),
        connect_args=CONNECT,
        pool_size=WRITERS,
    )
    threads = []
    for number in range(WRITERS):
        chance = random.Random(f"{seed}-{number}")  # noqa: S311 - a reproducible workload
        writer = Writer(pipeline, engine, journal, chance)
        pace = Pace(float(per_second) / WRITERS, stop)
        threads.append(threading.Thread(target=write, args=(writer, pace, stop)))
    for thread in threads:
        thread.start()
    # The main thread hears signals, so it must not wait on the event itself.
    for thread in threads:
        while thread.is_alive():
            thread.join(0.1)


if __name__ == "__main__":
    main()
