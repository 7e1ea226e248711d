"""Arms failpoints in running processes, a few at a time, until each has been hit.

Those that were never hit come first; the rest go on being hit, so that every signal meets every
action in a long run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from penstock.telemetry.failpoints import ANY, Action, Description, Failpoint, Hit
from penstock.telemetry.signals import Signal
from tests import crash_matrix

ARMED_MAX = 6
DWELL_SECONDS = 8.0
GAP_SECONDS = 1.1
"""One more is armed so often: those that are met all the time are hit at once."""
MISSED_FIRST = 0.75
BACKGROUND_ODDS = 0.00002
# A process that stands still costs nothing; one that has to be started again costs a second.
ACTIONS = (Action.KILL, Action.EXIT, Action.STOP, Action.STOP)
RAISING_TOO = (*ACTIONS, Action.RAISE)

NOT_REACHABLE: Mapping[str, str] = {
    **crash_matrix.NOT_REACHABLE,
    "ConsumerBlocked": "needs a consumer without a contract, which goes no further for anybody",
    "StreamRefused": "needs another database's log in Redis, which nobody but a person removes",
}
"""Signals that this workload does not emit, or emits where nothing can be broken, and why."""

PROVOKED_BY: Mapping[str, str] = {"PredecessorEnded": "BatchSealed"}
"""Met only by the successor of somebody who stands still at another."""

ON_OTHER_THREADS = frozenset({"LeaseRenewed", "LeaseLost"})
"""An exception at these would end the thread that renews leases, and not the process."""


def reachable() -> list[str]:
    """The signals that a run shall hit, each at least once."""
    return [name for name in Signal.registry if name not in NOT_REACHABLE]


class Armoury:
    """Writes the file that all processes read, and reads the file that they write."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.plan = folder / "failpoints"
        self._hits_path = folder / "hits"
        self._hits_path.touch()
        self._seed = seed
        self._chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
        self._read_bytes = 0
        self._armed: dict[str, tuple[Failpoint, float]] = {}
        self._next_at = 0.0
        self._is_armed = False
        self._lock = threading.Lock()
        self.hits: Counter[tuple[str, Action]] = Counter()
        self.log: list[Hit] = []

    def arm(self) -> None:
        """From now on processes die, stop and stumble."""
        with self._lock:
            self._is_armed = True

    def disarm(self) -> None:
        """From now on none does."""
        with self._lock:
            self._is_armed = False
            self._armed = {}
            self._write()

    @property
    def missed(self) -> list[str]:
        """Reachable signals that were not hit."""
        seen = {signal for signal, _ in self.hits}
        return [name for name in reachable() if name not in seen]

    def turn(self) -> list[Hit]:
        """Look what was hit, and arm something else in time. Returns the new hits."""
        new = self._read()
        for hit in new:
            self.hits[hit.signal, hit.action] += 1
            self.log.append(hit)
        with self._lock:
            if self._is_armed:
                self._rearm({hit.signal for hit in new})
        return new

    def _rearm(self, hit: set[str]) -> None:
        before = set(self._armed)
        now = time.monotonic()
        missed = set(self.missed)
        for name, (_, armed_at) in list(self._armed.items()):
            # What was never hit stays armed until it is.
            if name in hit or (name not in missed and now > armed_at + DWELL_SECONDS):
                del self._armed[name]
        if now >= self._next_at and len(self._armed.keys() - missed) < ARMED_MAX:
            self._next_at = now + GAP_SECONDS * self._chance.uniform(0.5, 1.5)
            name = self._choose()
            action = self._chance.choice(_actions_at(name))
            self._armed[name] = (Failpoint(name, (action,)), now)
            if name in PROVOKED_BY:
                self._armed[PROVOKED_BY[name]] = (
                    Failpoint(PROVOKED_BY[name], (Action.STOP,)),
                    now,
                )
        if before != set(self._armed):
            self._write()

    def _choose(self) -> str:
        missed = [name for name in self.missed if name not in self._armed]
        others = [name for name in reachable() if name not in self._armed]
        is_for_missed = missed and self._chance.random() < MISSED_FIRST
        return self._chance.choice(missed if is_for_missed else others)

    def _write(self) -> None:
        background = [Failpoint(ANY, ACTIONS, nth=None, odds=BACKGROUND_ODDS)]
        armed = [failpoint for failpoint, _ in self._armed.values()]
        failpoints = [*armed, *background] if self._is_armed else []
        described = Description(tuple(failpoints), str(self._seed), self._hits_path)
        # Complete from the first moment, for whoever reads it just now.
        unfinished = self.plan.with_suffix(".unfinished")
        unfinished.write_text(str(described))
        unfinished.replace(self.plan)

    def _read(self) -> list[Hit]:
        with self._hits_path.open("rb") as file:
            file.seek(self._read_bytes)
            complete, _, _ = file.read().rpartition(b"\n")
        if not complete:
            return []
        self._read_bytes += len(complete) + 1
        return [Hit.parse(line) for line in complete.decode().splitlines()]


def _actions_at(name: str) -> tuple[Action, ...]:
    return ACTIONS if name in ON_OTHER_THREADS else RAISING_TOO
