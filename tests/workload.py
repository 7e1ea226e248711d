"""An application whose every effect can be counted, for crash tests with real processes.

Workers load it with `--app tests.workload:pipeline`. As a program it is a sender:
`python -m tests.workload JOURNAL SEED TRANSACTIONS` sends and writes down what it knows of each
event, so that a killed sender leaves behind what it believed.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.core.events import Event, StreamEvent
from penstock.core.retry import Retry
from penstock.errors import FatalError, OutcomeUnknown, RetryableError
from penstock.stores.identity import new_event_uuid
from penstock.stores.postgres import sqlalchemy_url
from penstock.telemetry import failpoints

STREAM = "ledger"
ACCOUNTS = tuple(f"account-{number}" for number in range(6))
MOOD = "WORKLOAD_MOOD"
"""The environment may name a Mood, for handlers that fail in one process and not in the next."""
FAILING_ACCOUNTS = ACCOUNTS[1], ACCOUNTS[4]
FAILING_EVERY = 3
FAILURES = 5
LONG_SECONDS = 1.5
"""Longer than it takes another worker to take over, which must still find its keys parked."""

TABLES = """
CREATE TABLE account (name text PRIMARY KEY, number bigint NOT NULL);
CREATE TABLE posting (event_uuid uuid PRIMARY KEY, account text NOT NULL, number bigint NOT NULL);
CREATE TABLE effect (
    number      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer    text   NOT NULL,
    event_uuid  uuid   NOT NULL,
    account     text   NOT NULL,
    of_account  bigint NOT NULL
);
"""
# The row lock is held to the end of the transaction: a number is the rank of the commit.
COUNT_UP = text(
    "INSERT INTO account AS a (name, number) VALUES (:name, 1)"
    " ON CONFLICT (name) DO UPDATE SET number = a.number + 1 RETURNING number"
)
WRITE_POSTING = text("INSERT INTO posting VALUES (:event_uuid, :account, :number)")
WRITE_EFFECT = text(
    "INSERT INTO effect (consumer, event_uuid, account, of_account)"
    " VALUES (:consumer, :event_uuid, :account, :number)"
)
WRITE_EFFECT_DRIVER = (
    "INSERT INTO effect (consumer, event_uuid, account, of_account) VALUES (%s, %s, %s, %s)"
)


class Posted(Event, type="ledger.posted", version=1, key="account"):
    """What consumers have effects for."""

    account: str
    number: int


class Remarked(Event, type="ledger.remarked", version=1, key="account"):
    """What consumers let pass: no handler names it."""

    account: str
    number: int


Given = StreamEvent[Posted]


class Mood(StrEnum):
    """How handlers treat every third event of some accounts."""

    FINE = "fine"
    MOODY = "moody"
    """They fail a few times, and then they do not."""
    STUBBORN = "stubborn"
    """They fail as long as the process lives."""
    HOPELESS = "hopeless"
    """They say that no attempt can succeed."""
    HOLDING = "holding"
    """The same, and the consumer holds such keys."""
    STRICT = "strict"
    """They do not fail; the consumer lacks a contract and goes no further."""


class Temper:
    """Fails as the environment asks for."""

    def __init__(self) -> None:
        self.mood = Mood(os.environ.get(MOOD, Mood.FINE))
        self._failures: Counter[UUID] = Counter()

    def options(self) -> dict[str, Any]:
        """What consumers in this mood are registered with."""
        if self.mood is Mood.HOLDING:
            return {"on_exhausted": "hold"}
        return {"on_unknown": "block"} if self.mood is Mood.STRICT else {}

    def __call__(self, event: Given) -> None:
        posted = event.payload
        if posted.account not in FAILING_ACCOUNTS or posted.number % FAILING_EVERY:
            return
        self._failures[event.event_uuid] += 1
        what = f"{self.mood} about number {posted.number} of {posted.account}"
        match self.mood:
            case Mood.HOPELESS | Mood.HOLDING:
                raise FatalError(what)
            case Mood.STUBBORN:
                raise RuntimeError(what)
            case Mood.MOODY if self._failures[event.event_uuid] <= FAILURES:
                # One key is drained over and over, the other is still parked at a takeover.
                is_long = posted.account == FAILING_ACCOUNTS[1]
                raise RetryableError(what, after_seconds=LONG_SECONDS if is_long else None)


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline, with one consumer for every way to write."""
    pipeline = Pipeline("line", **settings)
    pipeline.stream(STREAM, Posted, Remarked)
    temper = Temper()
    options: dict[str, Any] = {
        "batch_size": 10,
        "retry": Retry.exponential(first_seconds=0.02, longest_seconds=0.1, attempts_max=1000),
        **temper.options(),
    }

    @pipeline.consumer(STREAM, name="session", **options)
    def by_session(event: Given, session: Session) -> None:
        temper(event)
        session.execute(WRITE_EFFECT, effect_of("line.session", event))

    @pipeline.consumer(STREAM, name="cursor", **options)
    def by_cursor(event: Given, cursor: psycopg.Cursor) -> None:
        temper(event)
        cursor.execute(WRITE_EFFECT_DRIVER, list(effect_of("line.cursor", event).values()))

    @pipeline.consumer(STREAM, name="coroutine", **options)
    async def by_coroutine(event: Given, session: AsyncSession) -> None:
        temper(event)
        await session.execute(WRITE_EFFECT, effect_of("line.coroutine", event))

    return pipeline


def effect_of(consumer: str, event: Given) -> dict[str, Any]:
    return {
        "consumer": consumer,
        "event_uuid": event.event_uuid,
        "account": event.payload.account,
        "number": event.payload.number,
    }


pipeline = build_pipeline()


# ── sending ────────────────────────────────────────────────────────────────────────────────────


class Journal:
    """What senders believe, one line per step: T(ried), K(nown to be committed), R(olled back)."""

    def __init__(self, path: Path) -> None:
        # Unbuffered and appended: what was written survives a kill, and lines never mix.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, what: str, uuids: list[UUID]) -> None:
        os.write(self._descriptor, f"{what} {' '.join(map(str, uuids))}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


def read_beliefs(journals: Iterable[Path]) -> tuple[set[str], set[str], set[str]]:
    """The events that were tried, known to be committed, and rolled back."""
    beliefs: dict[str, set[str]] = {"T": set(), "K": set(), "R": set()}
    for journal in journals:
        for line in journal.read_text().splitlines():
            what, *uuids = line.split()
            beliefs[what].update(uuids)
    return beliefs["T"], beliefs["K"], beliefs["R"]


class Sender:
    """Sends from real transactions that write business rows too; some are rolled back."""

    def __init__(self, pipeline: Pipeline, journal: Journal, seed: int) -> None:
        self._pipeline = pipeline
        self._journal = journal
        self._chance = random.Random(seed)  # noqa: S311 - a reproducible workload
        self._engine = create_engine(sqlalchemy_url(pipeline.settings.database_url))

    def close(self) -> None:
        self._engine.dispose()

    def send(self, *, late: Callable[[], None] = lambda: None) -> int:
        """One transaction. Returns how many events it has committed for sure."""
        size = self._chance.randint(1, 5)
        is_refused = self._chance.random() < 0.15
        accounts = sorted(self._chance.choices(ACCOUNTS, k=size))
        uuids = [new_event_uuid() for _ in accounts]
        self._journal.write("T", uuids)
        try:
            with Session(self._engine) as session:
                for uuid, account in zip(uuids, accounts, strict=True):
                    self._post(session, uuid, account)
                late()
                if is_refused:
                    session.flush()
                    session.rollback()
                    self._journal.write("R", uuids)
                    return 0
                session.commit()
        except (DBAPIError, OutcomeUnknown):
            return 0
        self._journal.write("K", uuids)
        return size

    def _post(self, session: Session, uuid: UUID, account: str) -> None:
        number = session.execute(COUNT_UP, {"name": account}).scalar_one()
        session.execute(WRITE_POSTING, {"event_uuid": uuid, "account": account, "number": number})
        kind = Remarked if self._chance.random() < 0.1 else Posted
        event = kind(account=account, number=number)
        self._pipeline.send(session, STREAM, event, event_uuid=uuid)


def main() -> None:
    journal_path, seed, transactions = sys.argv[1:]
    failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
    sender = Sender(pipeline, Journal(Path(journal_path)), int(seed))
    for _ in range(int(transactions)):
        sender.send()
        # Give way, so that several senders mix.
        threading.Event().wait(0.002)


if __name__ == "__main__":
    main()
