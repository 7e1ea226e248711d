"""Questions to the database that any kind of connection can carry.

An application sends through connections of many kinds, so what is asked and answered is written
once, as a generator, and each kind of connection only carries it. A question is a statement, or
some other work that may take a while: that must not stand in the way of an event loop.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar
from weakref import ref

import psycopg
import sqlalchemy
from psycopg.rows import tuple_row
from sqlalchemy.util import await_only

T = TypeVar("T")
_PARAMETER: Final = re.compile(r"%\((\w+)\)s")


class Statement(NamedTuple):
    """One question to the database."""

    query: str
    parameters: dict[str, Any]


Work: TypeAlias = Callable[[], Any]
Questions: TypeAlias = Generator[Statement | Work, Any, T]
"""Yields statements, which are answered with their rows, and work, answered with its result."""


def place_of(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any]) -> object:
    """What tells the databases apart that a process talks to."""
    return (connection.info.host, connection.info.port, connection.info.dbname)


def place_under(connection: sqlalchemy.Connection) -> object:
    """The same for any driver. A URL does not tell: engines may make connections by other means."""
    driver = connection.connection.driver_connection
    if isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
        return place_of(driver)
    # Weak, since what is remembered of a place may outlive its engine.
    return ref(connection.engine.pool)


def ask(connection: psycopg.Connection[Any], questions: Questions[T]) -> T:
    """Put the questions to a psycopg connection; returns what they come to."""

    def answer(question: Statement | Work) -> Any:
        if not isinstance(question, Statement):
            return question()
        # A plain cursor: the connection's own factory may want another notation of parameters.
        with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
            return cursor.execute(question.query, question.parameters).fetchall()

    return _carried(questions, answer)


async def ask_async(connection: psycopg.AsyncConnection[Any], questions: Questions[T]) -> T:
    """The same on an asynchronous connection."""
    try:
        question = next(questions)
        while True:
            if isinstance(question, Statement):
                async with psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
                    await cursor.execute(question.query, question.parameters)
                    answer: Any = await cursor.fetchall()
            else:
                answer = await asyncio.to_thread(question)
            question = questions.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def ask_through_sqlalchemy(connection: sqlalchemy.Connection, questions: Questions[T]) -> T:
    """The same with any driver."""

    def answer(question: Statement | Work) -> Any:
        if isinstance(question, Statement):
            query = sqlalchemy.text(_PARAMETER.sub(r":\1", question.query))
            return connection.execute(query, question.parameters).fetchall()
        if connection.dialect.is_async:
            return await_only(asyncio.to_thread(question))
        return question()

    return _carried(questions, answer)


def _carried(questions: Questions[T], answer: Callable[[Statement | Work], Any]) -> T:
    try:
        question = next(questions)
        while True:
            question = questions.send(answer(question))
    except StopIteration as end:
        result: T = end.value
        return result
