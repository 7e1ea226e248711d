"""What operators do with replays: look at them, let them rest, bring them to an end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from penstock.core.replays import MARK, ReplayProgress, ReplayState, ReplayTally
from penstock.errors import ConsumerUnknown, OperationRefused
from penstock.ops.consumers import Consumers
from penstock.stores.queries import DEFAULT_SCHEMA
from penstock.stores.replays import Replays
from penstock.telemetry import signals
from penstock.telemetry.bus import emit

Connection = psycopg.Connection[Any]


class ReplayBooks:
    """Replays in the books, on a connection in autocommit."""

    def __init__(self, connection: Connection, schema: str = DEFAULT_SCHEMA) -> None:
        self._connection = connection
        self._consumers = Consumers(connection, schema)
        self._replays = Replays(schema)

    def all(self) -> list[ReplayProgress]:
        """Every replay that is not over, or that has left dead letters; the oldest first."""
        return self._replays.all(self._connection)

    def find(self, given: str) -> ReplayProgress:
        """A replay by its full name, or by the part behind the @ where only one has it."""
        return find_replay(given, self.all())

    def look(self, name: str) -> ReplayProgress:
        """How far it is. Raises ConsumerUnknown for one that is over."""
        return self._replays.progress(self._connection, name)

    def pause(self, name: str, *, by: str, reason: str = "") -> bool:
        """Whoever works on it finishes its batch and stops; False: it was paused before."""
        return bool(self._consumers.pause([name], by=by, reason=reason))

    def resume(self, name: str) -> None:
        """Whoever works on it from now on may go on. Raises OperationRefused if it is cancelled."""
        if self.look(name).is_cancelled:
            raise OperationRefused(
                f"{name} was cancelled, and whoever did that was interrupted. What it has handled "
                f"stays; `penstock replay cancel {name}` deletes what is left of it."
            )
        self._consumers.resume([name])

    def tally(self, name: str) -> ReplayTally:
        """What became of its events so far."""
        return self._replays.tally(self._connection, name)

    def finish(
        self, name: str, *, on_progress: Callable[[int], None] = lambda _deleted: None
    ) -> ReplayTally:
        """Write down what became of everything and, without dead letters, delete all its rows.

        Nothing is lost by a crash in between: whoever resumes it comes here again. Raises
        OperationRefused for one that is not finished.
        """
        progress = self.look(name)
        if progress.state is not ReplayState.FINISHED:
            raise OperationRefused(f"{name} is not finished: it is {progress.state}.")
        tally = self._replays.end(self._connection, progress.operation_id, self.tally(name), "done")
        if not progress.dead:
            self._consumers.forget(name, on_progress=on_progress)
            emit(signals.ReplayFinished(name, tally.handled, tally.skipped))
        return tally

    def cancel(
        self, name: str, *, on_progress: Callable[[int], None] = lambda _deleted: None
    ) -> None:
        """Delete a replay on which nobody works, its parked events and dead letters too.

        Raises OperationRefused while somebody works on it. What it has handled stays.
        """
        progress = self.look(name)
        if progress.workers:
            raise OperationRefused(
                f"{progress.workers} processes work on {name}. It is not cancelled; pause it with "
                f"`penstock replay pause {name}`, wait until `penstock replay list` shows it "
                "paused without workers, and try again."
            )
        tally = self.tally(name)
        self._replays.end(self._connection, progress.operation_id, tally, "cancelled")
        self._consumers.forget(name, with_dead_letters=True, on_progress=on_progress)
        emit(signals.ReplayCancelled(name))


def find_replay(given: str, known: Sequence[ReplayProgress]) -> ReplayProgress:
    """The one replay that is meant. Raises ConsumerUnknown with those that there are."""
    found = [
        each
        for each in known
        if given in (each.replay.name, each.replay.name.rpartition(MARK)[2])
        or each.replay.name.partition(".")[2] == given
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.replay.name for each in found or known)
    if found:
        raise ConsumerUnknown(
            f"{given!r} is the name of several replays: {names}. Nothing was changed; write one "
            "of these."
        )
    there = f"there are: {names}." if names else "there is none."
    raise ConsumerUnknown(f"There is no replay {given!r}; {there}")
