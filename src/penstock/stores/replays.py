"""Replays in PostgreSQL: temporary consumers with an end, and the record that stays of each."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, Literal

import psycopg

from penstock.core.options import ConsumerOptions
from penstock.core.replays import Replay, ReplayProgress, ReplayTally
from penstock.errors import ConsumerUnknown, OperationRefused
from penstock.stores.queries import DEFAULT_SCHEMA, Queries

Connection = psycopg.Connection[Any]
End = Literal["done", "cancelled"]

REDRIVE_ALIVE_SECONDS = 15.0
"""How long a redrive counts as alive that says nothing: it may wait for a lock that long."""


class Replays:
    """Replays in the table `consumer`; callers bring their connections."""

    def __init__(self, schema: str = DEFAULT_SCHEMA) -> None:
        self._sql = Queries("replay.sql", schema)

    def free_label(self, connection: Connection, original: str) -> str:
        """The date and a number, which no replay of this consumer has had."""
        row = connection.execute(self._sql["today"]).fetchone()
        assert row is not None
        rows = connection.execute(self._sql["names"], {"original": original})
        taken = {str(name).rpartition("@")[2] for (name,) in rows}
        number = 1
        while f"{row[0]}-{number}" in taken:
            number += 1
        return f"{row[0]}-{number}"

    def begin(self, connection: Connection, replay: Replay, *, by: str, reason: str) -> None:
        """Enter a replay into the books, in the caller's transaction.

        Raises OperationRefused for a name that is taken, ConsumerUnknown without the original.
        """
        criteria = {
            "replay": replay.name,
            "stream": replay.stream_name,
            "first": replay.first,
            "last": replay.last,
        }
        parameters = {
            "name": replay.name,
            "original": replay.original,
            "first": replay.first,
            "last": replay.last,
            "criteria": json.dumps(criteria),
            "by": by,
            "reason": reason,
        }
        try:
            row = connection.execute(self._sql["begin"], parameters).fetchone()
        except psycopg.errors.UniqueViolation as error:
            raise OperationRefused(
                f"There is a replay {replay.name} already. Nothing was changed; continue it with "
                f"`penstock replay --resume {replay.name}`, or choose another --name."
            ) from error
        if row is None:
            raise ConsumerUnknown(
                f"{replay.original} is gone: somebody renamed or forgot it just now."
            )

    def all(self, connection: Connection) -> list[ReplayProgress]:
        """Every replay that is in the books, the oldest first."""
        return [_progress(row) for row in self._read_progress(connection, None)]

    def progress(self, connection: Connection, name: str) -> ReplayProgress:
        """How far a replay is. Raises ConsumerUnknown where it is not in the books any more."""
        for row in self._read_progress(connection, name):
            return _progress(row)
        raise _gone(name)

    def _read_progress(self, connection: Connection, name: str | None) -> list[tuple[Any, ...]]:
        parameters = {"name": name, "redrive_seconds": REDRIVE_ALIVE_SECONDS}
        return connection.execute(self._sql["progress"], parameters).fetchall()

    def tally(self, connection: Connection, name: str) -> ReplayTally:
        """What became of its events so far."""
        counts = dict(connection.execute(self._sql["tally"], {"name": name}).fetchall())
        return ReplayTally(
            *(counts.get(outcome, 0) for outcome in ("handled", "skipped", "discarded", "dead"))
        )

    def end(
        self, connection: Connection, operation_id: int, tally: ReplayTally, ended_as: End
    ) -> ReplayTally:
        """Write into the record what became of everything; returns what it says from now on.

        What was said first stays: who comes back after a crash counts rows that are half deleted.
        """
        connection.execute(
            self._sql["end"],
            {
                "operation_id": operation_id,
                "ended_as": ended_as,
                "events": tally.settled,
                "failed": tally.dead,
                "outcomes": json.dumps(asdict(tally)),
            },
        )
        row = connection.execute(self._sql["outcomes"], {"operation_id": operation_id}).fetchone()
        # A record that an earlier release wrote has none.
        return ReplayTally(**row[0]) if row and row[0] else tally

    def count_events(self, connection: Connection, replay: Replay) -> int:
        """How many events a range has, or had: its positions without the holes."""
        row = connection.execute(
            self._sql["count_in_holes"],
            {"stream_name": replay.stream_name, "first": replay.first, "last": replay.last},
        ).fetchone()
        assert row is not None
        return replay.last - replay.first + 1 - int(row[0])


class NoStart:
    """Chooses no start: a replay is in the books before it runs, or it was cancelled."""

    def choose(
        self,
        connection: Connection,  # noqa: ARG002 - the protocol's
        consumer: str,
        options: ConsumerOptions,  # noqa: ARG002 - the protocol's
    ) -> int:
        """Raise ConsumerUnknown: a consumer without an end must never come of a replay."""
        raise _gone(consumer)


def _gone(name: str) -> ConsumerUnknown:
    return ConsumerUnknown(
        f"{name} is not in the books any more: somebody finished or cancelled it. What it had "
        "handled stays; `penstock replay list` shows which there are."
    )


def _progress(row: tuple[Any, ...]) -> ReplayProgress:
    name, original, stream_name, first, last, operation_id, by, started_at, *rest = row
    is_paused, workers, checkpoint, passed, parked, due, dead, *rest = rest
    pause_reason, is_cancelled, is_redriven = rest
    return ReplayProgress(
        replay=Replay(
            name=name, original=original, stream_name=stream_name, first=first, last=last
        ),
        operation_id=operation_id,
        requested_by=by,
        started_at=started_at,
        is_paused=is_paused,
        workers=workers,
        checkpoint=checkpoint,
        passed=passed,
        parked=parked,
        due=due,
        dead=dead,
        pause_reason=pause_reason,
        is_cancelled=is_cancelled,
        is_redriven=is_redriven,
    )
