"""Many histories on all cores, and what came of them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from penstock.telemetry import bus
from penstock.telemetry.signals import Signal
from tests.simulation.cooperation import present
from tests.simulation.history import Outcome, run_history
from tests.simulation.world import models_in_place

HISTORIES_PER_TASK = 500
# Soon enough that what is freed is still at hand for the next history.
COLLECT_EVERY = 10
VIOLATIONS_KEPT_MAX = 20


@dataclass(slots=True)
class Report:
    """What a number of histories came to."""

    histories: int = 0
    events: int = 0
    turns: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: dict[int, list[str]] = field(default_factory=dict)
    """By the seed of the history; the first ones."""
    violating: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count one history in."""
        self.histories += 1
        self.events += outcome.events
        self.turns += outcome.turns
        self.faults.update(outcome.faults)
        if outcome.violations:
            self.violating += 1
            if len(self.violations) < VIOLATIONS_KEPT_MAX:
                self.violations[outcome.seed] = outcome.violations

    def merge(self, other: Report) -> None:
        """Count another report in."""
        self.histories += other.histories
        self.events += other.events
        self.turns += other.turns
        self.faults.update(other.faults)
        self.violating += other.violating
        self.violations = dict(
            list({**self.violations, **other.violations}.items())[:VIOLATIONS_KEPT_MAX]
        )

    def lines(self) -> Iterator[str]:
        """For people."""
        per_second = self.histories / self.seconds if self.seconds else 0.0
        yield (
            f"{self.histories:,} histories with {self.events:,} events and "
            f"{self.faults.total():,} faults in {self.seconds:.0f} s ({per_second:,.0f} a second)"
        )
        for kind, count in self.faults.most_common():
            yield f"  {kind.replace('_', ' '):<20} {count:>9,}"
        yield f"{self.violating} violating"
        for seed, violations in sorted(self.violations.items()):
            yield f"  seed {seed}: {violations[0]}"
        if self.violations:
            yield f"python -m tests.simulation --trace {min(self.violations)} tells how it came"


def simulate_some(first_seed: int, histories: int) -> Report:
    """A row of histories in this process."""
    report = Report()
    # Histories leave circles behind: collected now and then, and not in the middle of one, where
    # greenlets that are collected would run on.
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        with models_in_place():
            for seed in range(first_seed, first_seed + histories):
                report.add(run_history(seed))
                if seed % COLLECT_EVERY == 0:
                    gc.collect(1)
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return report


def simulate(first_seed: int, histories: int, processes: int | None = None) -> Report:
    """The same on all cores."""
    report = Report()
    started_at = time.monotonic()
    context = multiprocessing.get_context("spawn")
    tasks = [
        (seed, min(HISTORIES_PER_TASK, first_seed + histories - seed))
        for seed in range(first_seed, first_seed + histories, HISTORIES_PER_TASK)
    ]
    with ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context) as pool:
        for part in pool.map(simulate_some, *zip(*tasks, strict=True)):
            report.merge(part)
    report.seconds = time.monotonic() - started_at
    return report


def trace(seed: int, tell: Callable[[str], None]) -> Outcome:
    """One history, with every statement, signal and fault told."""

    def tell_signal(signal: Signal) -> None:
        present.machine.note(f"  {signal}")

    bus.subscribe_to_all(tell_signal)
    try:
        with models_in_place():
            return run_history(seed, tell)
    finally:
        bus.unsubscribe(tell_signal)
