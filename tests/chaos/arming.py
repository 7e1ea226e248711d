"""Arms failpoints in running processes, a few at a time, until each has been hit.

Those that were hit least often come first, so that every signal meets every action in a long run.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.telemetry.failpoints import ANY, Action, Description, Failpoint, Hit
from penstock.telemetry.signals import Signal
from tests import crash_matrix

ARMED_MAX = 6
DWELL_SECONDS = 8.0
GAP_FACTOR = 1.3
"""One more is armed whenever so many other faults have happened."""
RAREST_FIRST = 0.75
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

RARE = ("PositionsSkipped", "HolePassed", "ForgeryFound", "ConsumerResumed")
"""Met after a few kinds of faults alone: armed from the beginning, or their moment passes by."""

LEADS_TO: Mapping[str, str] = {"ConsumerPaused": "ConsumerResumed"}
"""Whoever ends at the first never comes to the second, which has to be hit before it."""

ON_OTHER_THREADS = frozenset({"LeaseRenewed", "LeaseLost"})
"""An exception at these would end the thread that renews leases, and not the process."""


def reachable() -> list[str]:
    """The signals that a run shall hit, each at least once."""
    return [name for name in Signal.registry if name not in NOT_REACHABLE]


class Armoury:
    """Writes the file that all processes read, and reads the file that they write."""

    def __init__(
        self, folder: Path, seed: int, *, gap_seconds: float, times_wanted: int = 1
    ) -> None:
        self._gap_seconds = gap_seconds * GAP_FACTOR
        self._times_wanted = times_wanted
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
        """Reachable signals that were not hit often enough."""
        return [name for name in reachable() if self._times(name) < self._times_wanted]

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
            # What was hit too seldom stays armed until it is.
            if name in hit or (name not in missed and now > armed_at + DWELL_SECONDS):
                del self._armed[name]
        for name in missed.intersection(RARE) - self._armed.keys():
            self._arm(name, self._chance.choice(_actions_at(name)), now)
        if now >= self._next_at and len(self._armed.keys() - missed) < ARMED_MAX:
            self._next_at = now + self._gap_seconds * self._chance.uniform(0.5, 1.5)
            name = self._choose()
            self._arm(name, self._chance.choice(_actions_at(name)), now)
            if name in PROVOKED_BY:
                self._arm(PROVOKED_BY[name], Action.STOP, now)
        if before != set(self._armed):
            self._write()

    def _arm(self, name: str, action: Action, now: float) -> None:
        self._armed[name] = (Failpoint(name, (action,)), now)

    def _choose(self) -> str:
        missed = set(self.missed)
        others = [
            name
            for name in reachable()
            if name not in self._armed and LEADS_TO.get(name) not in missed
        ]
        if self._chance.random() < RAREST_FIRST:
            fewest = min(self._times(name) for name in others)
            others = [name for name in others if self._times(name) == fewest]
        return self._chance.choice(others)

    def _times(self, name: str) -> int:
        return sum(count for (signal, _), count in self.hits.items() if signal == name)

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
        # By the clock here: theirs may have jumped.
        lines = complete.decode().splitlines()
        return [replace(Hit.parse(line), at=time.time()) for line in lines]


def _actions_at(name: str) -> tuple[Action, ...]:
    return ACTIONS if name in ON_OTHER_THREADS else RAISING_TOO
