"""An application that gives every kind of trouble, and whose every effect can be counted.

Hosts load it with `--app tests.chaos.app:pipeline`. What an event does to its handlers stands in
its payload, so that whoever looks at the books knows what to expect of it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from sqlalchemy import BigInteger, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock.app import Pipeline
from penstock.core.events import Event, StreamEvent
from penstock.core.retry import Retry
from penstock.errors import FatalError, RetryableError
from penstock.pipeline.context import Context
from tests.workload import WRITE_EFFECT_DRIVER

PIPELINE = "chaos"
STREAM = "ledger"
LANED, SINGLE, LATE = "laned", "single", "late"
CONSUMERS = (LANED, SINGLE)
"""Those that run from the beginning; `late` comes in the middle."""

LANES = "CHAOS_LANES"
FOLDER = "CHAOS_FOLDER"
EXIT_CODE = 23
ATTEMPTS_MAX = 6
END_SESSION = "SELECT pg_terminate_backend(pg_backend_pid())"
SLOW = text("SELECT pg_sleep(60)")
SPOILED_AFTER_SECONDS = 0.02
RETRY = Retry.exponential(first_seconds=0.05, longest_seconds=0.4, attempts_max=ATTEMPTS_MAX)


class Trouble(StrEnum):
    """What an event does to those who handle it, the first few times that each consumer tries."""

    NONE = "none"
    POISON = "poison"
    """An attempt fails."""
    STUBBORN = "stubborn"
    """An attempt fails, and more of them than there are."""
    FATAL = "fatal"
    """The handler says that no further attempt can help."""
    KILLER = "killer"
    """The process ends."""
    SPOILER = "spoiler"
    """The handler spoils its connection, and goes on as if nothing were."""


class Entered(Event, type="chaos.entered", version=1, key="account"):
    """The nth event of an account."""

    account: str
    number: int
    trouble: Trouble = Trouble.NONE
    times: int = 0


class Remarked(Event, type="chaos.remarked", version=1, key="account"):
    """What consumers let pass: no handler names it."""

    account: str
    number: int


Given = StreamEvent[Entered]


class Base(DeclarativeBase): ...


class EffectRow(Base):
    """What a handler leaves behind."""

    __tablename__ = "effect"

    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    consumer: Mapped[str]
    event_uuid: Mapped[UUID]
    account: Mapped[str]
    of_account: Mapped[int] = mapped_column(BigInteger)


class Surroundings:
    """The files by which the harness and the handlers tell each other what is going on."""

    def __init__(self, folder: Path) -> None:
        self._slow = folder / "slow"
        self._lull = folder / "lull"
        self._failures = folder / "failures"

    @classmethod
    def of_environment(cls) -> Surroundings:
        return cls(Path(os.environ.get(FOLDER, os.devnull)))

    @property
    def slow_seconds(self) -> float:
        """How long every handler takes just now."""
        with suppress(OSError, ValueError):
            return float(self._slow.read_text())
        return 0.0

    def set_slow(self, seconds: float) -> None:
        if seconds:
            self._slow.write_text(str(seconds))
        else:
            self._slow.unlink(missing_ok=True)

    def set_lull(self, is_lull: bool) -> None:
        """Whether senders send less from now on."""
        if is_lull:
            self._lull.touch()
        else:
            self._lull.unlink(missing_ok=True)

    @property
    def is_lull(self) -> bool:
        """Whether senders shall send less."""
        return self._lull.exists()

    def failures(self, consumer: str, uuid: str) -> int:
        """How many attempts of a consumer an event has spoiled."""
        with suppress(FileNotFoundError):
            return (self._failures / f"{consumer}-{uuid}").stat().st_size
        return 0

    def note_failure(self, consumer: str, uuid: str) -> None:
        """One more; known before it happens, and whatever happens to the process."""
        self._failures.mkdir(exist_ok=True)
        with (self._failures / f"{consumer}-{uuid}").open("ab") as file:
            file.write(b".")


surroundings = Surroundings.of_environment()


def meet(event: Given, context: Context) -> bool:
    """Whatever the event does to its handlers; returns whether they spoil their connection."""
    entered = event.payload
    if entered.trouble is Trouble.NONE:
        return False
    where = (context.consumer, str(event.event_uuid))
    if surroundings.failures(*where) >= entered.times:
        return False
    surroundings.note_failure(*where)
    what = f"{entered.trouble}: number {entered.number} of {entered.account}"
    match entered.trouble:
        case Trouble.POISON:
            raise RetryableError(what)
        case Trouble.STUBBORN:
            raise RuntimeError(what)
        case Trouble.FATAL:
            raise FatalError(what)
        case Trouble.KILLER:
            os._exit(EXIT_CODE)
    return entered.trouble is Trouble.SPOILER


def effect_of(event: Given, context: Context) -> dict[str, Any]:
    return {
        "consumer": context.consumer,
        "event_uuid": event.event_uuid,
        "account": event.payload.account,
        "of_account": event.payload.number,
    }


def build_pipeline(**settings: Any) -> Pipeline:
    """The pipeline, with one consumer for every way to write."""
    pipeline = Pipeline(PIPELINE, **settings)
    pipeline.stream(STREAM, Entered, Remarked)
    lanes = int(os.environ.get(LANES, "3"))

    @pipeline.consumer(STREAM, name=LANED, lanes=lanes, batch_size=50, retry=RETRY)
    def in_lanes(event: Given, cursor: psycopg.Cursor, context: Context) -> None:
        threading.Event().wait(surroundings.slow_seconds)
        cursor.execute(WRITE_EFFECT_DRIVER, list(effect_of(event, context).values()))
        if meet(event, context):
            cursor.execute(END_SESSION)

    @pipeline.consumer(STREAM, name=SINGLE, batch_size=100, retry=RETRY, on_exhausted="hold")
    def alone(event: Given, session: Session, context: Context) -> None:
        threading.Event().wait(surroundings.slow_seconds)
        if meet(event, context):
            session.connection().invalidate()
        session.add(EffectRow(**effect_of(event, context)))

    @pipeline.consumer(STREAM, name=LATE, lanes=2, batch_size=100, retry=RETRY, start="latest")
    async def afterwards(event: Given, session: AsyncSession, context: Context) -> None:
        await asyncio.sleep(surroundings.slow_seconds)
        if meet(event, context):
            with suppress(TimeoutError):
                async with asyncio.timeout(SPOILED_AFTER_SECONDS):
                    await session.execute(SLOW)
        session.add(EffectRow(**effect_of(event, context)))

    return pipeline


pipeline = build_pipeline()
