"""Statements given to libpq directly: those that every event on its way pays for.

Their texts are few and never change, and their values are text or numbers. A cursor adapts values,
looks up whether to prepare and drives generators, for several times of what sending costs. Nothing
is prepared here: what is worth planning once is a function, whose plans the server keeps.
"""

from __future__ import annotations

import re
import select
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer
from psycopg.errors import PipelineAborted, error_from_result
from psycopg.pq.abc import PGresult

BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
"""Whatever the role is set to: else a renewal of its lease would refuse the batch in hand."""
COMMIT = "COMMIT"
Value = str | int | None
Row = tuple[Any, ...]
Statement = str | tuple[str, Mapping[str, Value]]
"""A text alone, or one with values by name."""
_PLACEHOLDER = re.compile(r"%\((\w+)\)s")
_OK = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK)


class Answer:
    """What the server says to one statement, once it has."""

    __slots__ = ("result",)

    def __init__(self) -> None:
        self.result: PGresult | None = None

    def take(self, result: PGresult) -> None:
        """Keep it, or raise what the server has refused with."""
        if result.status == pq.ExecStatus.PIPELINE_ABORTED:
            raise PipelineAborted("something before it has failed")
        if result.status not in _OK:
            raise error_from_result(result)
        self.result = result

    # A pipeline of psycopg's takes it for a cursor.

    def _check_results(self, results: list[PGresult]) -> None:
        (result,) = results
        self.take(result)

    def _set_results(self, results: list[PGresult]) -> None:
        """Nothing is left to do."""


class Direct:
    """Sends groups of statements ahead of their answers."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._pgconn = connection.pgconn
        self._transformer = Transformer(connection)
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self._awaited: list[Answer] = []
        self._syncs = 0

    def ask(
        self,
        text: str,
        values: Mapping[str, Value],
        meanwhile: Callable[[list[Row]], Any] | None = None,
    ) -> list[Row]:
        """Send one statement and wait for its rows, and until they are committed.

        `meanwhile` is called with the rows while the server makes them durable. Whatever it
        prepares is worth nothing if this raises.
        """
        if meanwhile is None:
            answer = self.send((text, values))
            self.collect()
            return self.rows(answer)
        answer = self.send((text, values), is_urgent=True)
        self._awaited = []
        try:
            answer.take(self._next_result())
            rows = self.rows(answer)
            meanwhile(rows)
        finally:
            self.collect()
        return rows

    def send(self, *statements: Statement, is_urgent: bool = False) -> Answer:
        """Send statements, and wait for nothing. Returns where the last one's answer will be.

        More may follow, and nobody else may use the connection before `collect`. What is urgent
        is answered before it is committed.
        """
        self._pgconn.enter_pipeline_mode()
        self._awaited += self.put(*statements)
        if is_urgent:
            self._pgconn.send_flush_request()
        self._pgconn.pipeline_sync()
        self._syncs += 1
        self.flush()
        return self._awaited[-1]

    @property
    def is_awaiting(self) -> bool:
        """Whether nothing of what was asked for is here yet."""
        return bool(self._awaited) and not self._poll.poll(0)

    def collect(self) -> None:
        """Wait for the answers to everything that was sent. Raises the first error among them."""
        awaited, self._awaited = iter(self._awaited), []
        syncs, self._syncs = self._syncs, 0
        error: psycopg.Error | None = None
        while syncs:
            try:
                result = self._next_result()
                if result.status == pq.ExecStatus.PIPELINE_SYNC:
                    syncs -= 1
                    continue
                # Behind the last statement comes the COMMIT that nobody had to write.
                next(awaited, Answer()).take(result)
            except psycopg.Error as refusal:
                error = error or refusal
                if self._pgconn.status == pq.ConnStatus.BAD:
                    raise error from None
        self._pgconn.exit_pipeline_mode()
        if error is not None:
            raise error

    def rows(self, answer: Answer) -> list[Row]:
        """What a statement returned, as Python sees it."""
        assert answer.result is not None
        self._transformer.set_pgresult(answer.result)
        return self._transformer.load_rows(0, answer.result.ntuples, tuple)

    # ── in pipeline mode ──────────────────────────────────────────────────────────────────────

    def put(self, *statements: Statement) -> list[Answer]:
        """Hand statements to libpq, which keeps them until `flush`. Returns who takes answers."""
        for statement in statements:
            if isinstance(statement, str):
                self._pgconn.send_query_params(statement.encode(), None)
            else:
                text, places = _numbered(statement[0])
                values = [_text(statement[1][name]) for name in places]
                self._pgconn.send_query_params(text, values)
        return [Answer() for _ in statements]

    def flush(self) -> None:
        """Send what libpq has kept."""
        while self._pgconn.flush():
            # A server whose answers nobody reads may take nothing more.
            self._poll.modify(self._pgconn.socket, select.POLLIN | select.POLLOUT)
            self._poll.poll()
            self._poll.modify(self._pgconn.socket, select.POLLIN)
            self._pgconn.consume_input()

    def _next_result(self) -> PGresult:
        pgconn = self._pgconn
        while True:
            while pgconn.is_busy():
                self._poll.poll()
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is not None:
                return result
            if pgconn.status == pq.ConnStatus.BAD:
                raise psycopg.OperationalError("the connection is lost")


@cache
def _numbered(text: str) -> tuple[bytes, Sequence[str]]:
    """A statement with numbered places, and what belongs there; the server infers the types."""
    places = list(dict.fromkeys(_PLACEHOLDER.findall(text)))
    numbered = _PLACEHOLDER.sub(lambda match: f"${places.index(match[1]) + 1}", text)
    return numbered.encode(), places


def _text(value: Value) -> bytes | None:
    return None if value is None else str(value).encode()
