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
from collections.abc import Callable
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
from penstock.errors import OutcomeUnknown
from penstock.stores.identity import new_event_uuid
from penstock.stores.postgres import sqlalchemy_url
from penstock.telemetry import failpoints

STREAM = "ledger"
ACCOUNTS = tuple(f"account-{number}" for number in range(6))
FAIL_AT = "WORKLOAD_FAIL_AT"
"""The environment may name a position at which handlers fail a few times per process."""
FAILURES = 3

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


class FailAtFirst:
    """Fails at one position, in a batch and alone, where the environment asks for it."""

    def __init__(self) -> None:
        self._position = int(os.environ.get(FAIL_AT, "0"))
        self._remaining = FAILURES

    def __call__(self, event: Given) -> None:
        if event.position == self._position and self._remaining:
            self._remaining -= 1
            raise RuntimeError(f"asked to fail at {event.position}")


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline, with one consumer for every way to write."""
    pipeline = Pipeline("line", **settings)
    pipeline.stream(STREAM, Posted, Remarked)
    fail_at_first = FailAtFirst()
    options: dict[str, Any] = {
        "batch_size": 10,
        "retry": Retry.exponential(first_seconds=0.02, longest_seconds=0.1, attempts_max=1),
    }

    @pipeline.consumer(STREAM, name="session", **options)
    def by_session(event: Given, session: Session) -> None:
        fail_at_first(event)
        session.execute(WRITE_EFFECT, effect_of("line.session", event))

    @pipeline.consumer(STREAM, name="cursor", **options)
    def by_cursor(event: Given, cursor: psycopg.Cursor) -> None:
        fail_at_first(event)
        cursor.execute(WRITE_EFFECT_DRIVER, list(effect_of("line.cursor", event).values()))

    @pipeline.consumer(STREAM, name="coroutine", **options)
    async def by_coroutine(event: Given, session: AsyncSession) -> None:
        fail_at_first(event)
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
