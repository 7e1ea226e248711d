"""What the books say, a bounded stretch at a time: read in one snapshot each, and only read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import orjson
import psycopg

from penstock.core.history import (
    ConsumerHistory,
    History,
    HoleRow,
    ParkedRow,
    Seek,
    SentRow,
    SettledRow,
)
from penstock.core.settings import DAY_SECONDS
from penstock.core.verification import LooseRow, Survey, Window
from penstock.stores.outbox import Outbox
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
STATEMENT_TIMEOUT = "60s"
BEYOND_MAX = 100
FIRST_UUID = str(UUID(int=0))


@dataclass(frozen=True, slots=True)
class Page:
    """The loose ones among the next settled rows of a consumer, and where these end."""

    survey: Survey
    rows: tuple[LooseRow, ...]
    last: str | None
    """The next page begins behind it; None: there is none."""


class BooksReader:
    """Reads all books on a connection in autocommit; each call is a transaction of its own."""

    def __init__(
        self, connection: Connection, schema: str = DEFAULT_SCHEMA, *, settled_retention_days: float
    ) -> None:
        assert connection.autocommit, "each stretch is a transaction of its own"
        self._connection = connection
        self._sql = Queries("verify.sql", schema)
        self._outbox = Outbox(schema)
        self._retention_seconds = settled_retention_days * DAY_SECONDS

    def streams(self) -> list[str]:
        """Every stream that is published or read."""
        return [name for (name,) in self._ask("streams")]

    def survey(self, stream_name: str, consumer: str | None = None) -> Survey:
        """A stream as a whole, with all its consumers or one of them."""
        with self._snapshot():
            survey = self._place(stream_name)
            beyond = self._ask(
                "beyond", stream_name=stream_name, head=survey.head, count=BEYOND_MAX
            )
            return replace(
                survey,
                beyond=tuple(position for (position,) in beyond),
                consumers=self._consumers(stream_name, consumer),
            )

    def window(
        self, stream_name: str, consumer: str | None, *, first: int, last: int, count: int
    ) -> Window:
        """The next stretch from `first` on, of at most so many events; `last` is its utmost end."""
        with self._snapshot():
            place = self._place(stream_name)
            consumers = self._consumers(stream_name, consumer)
            is_pruned = first < place.first
            if is_pruned:
                last = min(last, place.first - 1)
                names = [each.name for each in consumers]
                rows = self._set_aside(names, first, last, count)
            else:
                rows = self._sent(stream_name, first, last, count)
            if len(rows) == count:
                last = rows[-1].position or last
            history = History(
                acknowledged=frozenset(),
                outbox=tuple(rows),
                head=place.head,
                holes=tuple(hole for hole in place.holes if hole.overlap(first, last)),
                first=first,
                last=last,
                consumers=tuple(self._with_rows(each, rows, first, last) for each in consumers),
            )
            return Window(history, is_pruned)

    def last_settled(self, consumer: str) -> str | None:
        """The end of a consumer's settled rows, as of now."""
        with self._snapshot():
            rows = self._ask("last_settled", consumer=consumer)
        return rows[0][0] if rows else None

    def loose(self, stream_name: str, consumer: str, *, after: str, until: str, count: int) -> Page:
        """The next so many settled rows of a consumer, of which only the loose ones come."""
        with self._snapshot():
            survey = self._place(stream_name)
            page = {"consumer": consumer, "after": after, "until": until}
            ends = self._ask("page_end", **page, count=count)
            page["until"] = ends[0][0] if ends else until
            rows = self._ask("loose", **page, stream_name=stream_name)
        loose = tuple(LooseRow(*row) for row in rows)
        return Page(survey, loose, ends[0][0] if ends else None)

    def bodies(
        self, stream_name: str, *, after: int, count: int
    ) -> tuple[Survey, dict[int, bytes]]:
        """What stands behind a position, by its place: what every other tier should hold too."""
        with self._snapshot():
            survey = self._place(stream_name)
            rows = self._outbox.read(self._connection, stream_name, after, count)
        return survey, {position: body.encode() for position, body in rows}

    # ── in a snapshot ─────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        with self._connection.transaction():
            self._connection.execute(self._sql["begin"])
            self._ask("prepare", timeout=STATEMENT_TIMEOUT)
            yield

    def _ask(self, query: str, **parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(self._sql[query], parameters).fetchall()

    def _place(self, stream_name: str) -> Survey:
        sources = self._ask("source", stream_name=stream_name)
        if sources:
            ((head,),) = sources
            return Survey(
                stream_name=stream_name,
                head=head,
                published=head,
                first=head + 1,
                readable_first=1,
                is_foreign=True,
            )
        rows = self._ask("stream", stream_name=stream_name)
        head, published, first, archived_first, archived_last = (
            rows[0] if rows else (0, 0, 1, None, None)
        )
        reaches_up = archived_last is not None and archived_last + 1 >= first
        holes = self._ask("holes", stream_name=stream_name)
        return Survey(
            stream_name=stream_name,
            head=head,
            published=published,
            first=first,
            readable_first=min(first, archived_first) if reaches_up else first,
            holes=tuple(HoleRow(*row) for row in holes),
        )

    def _consumers(self, stream_name: str, consumer: str | None) -> tuple[ConsumerHistory, ...]:
        rows = self._ask("consumers", stream_name=stream_name, consumer=consumer)
        return tuple(
            ConsumerHistory(
                name=name,
                effects=(),
                knows_effects=False,
                settled=(),
                checkpoints=tuple(checkpoints),
                start_position=start_position,
                end_position=end_position,
                settled_to=settled_to,
                given_up_to=given_up_to,
                seeks=tuple(map(Seek, old, new)),
            )
            for (
                name,
                start_position,
                end_position,
                settled_to,
                given_up_to,
                checkpoints,
                old,
                new,
            ) in rows
        )

    def _sent(self, stream_name: str, first: int, last: int, count: int) -> list[SentRow]:
        rows = self._ask(
            "sent",
            stream_name=stream_name,
            first=first,
            last=last,
            count=count,
            retention_seconds=self._retention_seconds,
        )
        return [SentRow(*row) for row in rows]

    def _set_aside(self, consumers: list[str], first: int, last: int, count: int) -> list[SentRow]:
        rows = self._ask("set_aside", consumers=consumers, first=first, last=last, count=count)
        return [SentRow(uuid, _key(key), 0, position, is_old=True) for uuid, position, key in rows]

    def _with_rows(
        self, consumer: ConsumerHistory, rows: list[SentRow], first: int, last: int
    ) -> ConsumerHistory:
        stretch = {"consumer": consumer.name, "first": first, "last": last}
        settled = self._ask(
            "settled", consumer=consumer.name, event_uuids=[row.event_uuid for row in rows]
        )
        return replace(
            consumer,
            settled=tuple(SettledRow(*row) for row in settled),
            parked=tuple(ParkedRow(*row) for row in self._ask("parked", **stretch)),
            dead=frozenset(uuid for (uuid,) in self._ask("letters", **stretch)),
        )


def _key(text: str) -> str | None:
    """The key as an entry has it. One that cannot be read is none, and its hash will not fit."""
    try:
        key = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return key if isinstance(key, str) else None
