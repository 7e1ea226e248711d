"""Looks at the servers again and again, on one connection, in a thread that may have to wait."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import psycopg

from penstock.core.top import Action
from penstock.errors import PenstockError, ServerUnavailable
from penstock.ops.top import OpenLetter, Sight
from penstock.stores.postgres import is_lost
from penstock.stores.redis_server import ping

Connection = psycopg.Connection[Any]
Question = Callable[[Connection], "str | OpenLetter"]

REDIS_EVERY_SECONDS: Final = 2.0
REDIS_ANSWER_SECONDS: Final = 1.0
STOP_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """The last sight that there was, and what does not answer at present."""

    sight: Sight
    seen_at: float
    """By the monotonic clock."""
    seen_clock: datetime
    postgres_trouble: str | None = None
    redis_trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of an action: a sentence, or a letter to show."""

    action: Action
    result: str | OpenLetter


class Watcher:
    """Keeps `news` fresh until it is stopped; a server that is away is news like any other."""

    def __init__(
        self,
        connection: Connection,
        *,
        connect: Callable[[], Connection],
        look: Callable[[Connection], Sight],
        redis_url: str | None,
        interval_seconds: float,
        on_news: Callable[[], None],
    ) -> None:
        self._connection: Connection | None = connection
        self._connect = connect
        self._look = look
        self._redis_url = redis_url
        self._redis_asked_at = -REDIS_EVERY_SECONDS
        self._interval_seconds = interval_seconds
        self._on_news = on_news
        self._questions: queue.SimpleQueue[tuple[Action, Question] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.news = _news(look(connection))
        # Not waited for for long: it may hang on a server that says nothing.
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def ask(self, action: Action, question: Question) -> None:
        """Have a question put to the database; its answer comes in `answers`."""
        self._questions.put((action, question))

    def stop(self) -> None:
        """Look no more."""
        self._questions.put(None)
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while self._serve_questions():
            self._refresh()
            self._on_news()
            self._ask_redis()
        if self._connection is not None:
            self._connection.close()

    def _serve_questions(self) -> bool:
        # Until the next look is due, or at once after a question: its effect is to be seen.
        try:
            asked = self._questions.get(timeout=self._interval_seconds)
        except queue.Empty:
            return True
        if asked is None:
            return False
        action, question = asked
        self.answers.put(Answer(action, self._answer(question)))
        self._on_news()
        return True

    def _answer(self, question: Question) -> str | OpenLetter:
        try:
            return question(self._connected())
        except (psycopg.Error, PenstockError) as error:
            return f"That did not work: {_one_line(error)}"

    def _refresh(self) -> None:
        try:
            sight = self._look(self._connected())
        except (psycopg.Error, PenstockError) as error:
            self.news = replace(self.news, postgres_trouble=_trouble(error))
            self._drop_if_lost()
            return
        self.news = replace(_news(sight), redis_trouble=self.news.redis_trouble)

    def _connected(self) -> Connection:
        self._drop_if_lost()
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _drop_if_lost(self) -> None:
        if self._connection is not None and self._connection.broken:
            self._connection.close()
            self._connection = None

    def _ask_redis(self) -> None:
        now = time.monotonic()
        if self._redis_url is None or now - self._redis_asked_at < REDIS_EVERY_SECONDS:
            return
        trouble = None
        try:
            ping(self._redis_url, REDIS_ANSWER_SECONDS)
        except PenstockError as error:
            trouble = _one_line(error)
        self._redis_asked_at = time.monotonic()
        self.news = replace(self.news, redis_trouble=trouble)
        self._on_news()


def _news(sight: Sight) -> News:
    return News(sight=sight, seen_at=time.monotonic(), seen_clock=datetime.now(UTC))


def _trouble(error: Exception) -> str:
    is_away = isinstance(error, ServerUnavailable) or is_lost(error)
    return f"PostgreSQL {'is away' if is_away else 'refuses'}: {_one_line(error)}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__
