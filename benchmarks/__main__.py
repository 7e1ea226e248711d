"""Measures Penstock beside one transaction per event and prints what it reached."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatch
from typing import Protocol

from benchmarks.archiving import opened_archiving
from benchmarks.bed import Bed, made_bed
from benchmarks.consumers import opened_consumers
from benchmarks.decoding import opened_decoding
from benchmarks.latency import opened_latencies
from benchmarks.processes import opened_processes
from benchmarks.publishers import opened_publishers
from benchmarks.redis_timers import opened_redis_timers
from benchmarks.report import Claim, Result, Round, table
from benchmarks.scale import FULL, QUICK, Scale
from benchmarks.senders import opened_senders
from benchmarks.telemetry import opened_telemetry
from benchmarks.timers import opened_timers

ROUNDS = 5


class Comparison(Protocol):
    """Two sides that are measured in turn."""

    @property
    def claim(self) -> Claim:
        """What it should show."""

    def measure(self) -> Round:
        """One round of each side."""


Open = Callable[[Bed, Scale], AbstractContextManager[Sequence[Comparison]]]
GROUPS: Sequence[tuple[str, Open]] = (
    ("consume", opened_consumers),
    ("publish", opened_publishers),
    ("send", opened_senders),
    ("latency", opened_latencies),
    ("processes", opened_processes),
    ("decode", opened_decoding),
    ("archive", opened_archiving),
    ("telemetry", opened_telemetry),
    ("timers", opened_timers),
    ("redis", opened_redis_timers),
)


def main() -> None:
    """Measure, print, and say by the exit code whether everything ran."""
    options = _options()
    scale = QUICK if options.quick else FULL
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    results: list[Result] = []
    with made_bed(durable=not options.quick) as bed:
        for prefix, open_group in GROUPS:
            if _is_asked_for(prefix, options.only):
                results += _measure(bed, scale, open_group, rounds, options.only)
    if options.json:
        print(json.dumps([result.as_json() for result in results], indent=2))
    else:
        print(table(results))
        print(
            f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
        )


def _measure(
    bed: Bed, scale: Scale, open_group: Open, rounds: int, only: Sequence[str]
) -> list[Result]:
    """All rounds of a group: every comparison once, then every one again."""
    with open_group(bed, scale) as comparisons:
        wanted = [
            comparison
            for comparison in comparisons
            if not only or any(fnmatch(comparison.claim.name, pattern) for pattern in only)
        ]
        measured: list[list[Round]] = [[] for _ in wanted]
        for number in range(1, rounds + 1):
            for comparison, collected in zip(wanted, measured, strict=True):
                collected.append(comparison.measure())
                print(
                    f"{comparison.claim.name} {number}/{rounds}: {collected[-1].ratio:.2f}",
                    file=sys.stderr,
                )
    return [
        Result(comparison.claim, collected)
        for comparison, collected in zip(wanted, measured, strict=True)
    ]


def _is_asked_for(prefix: str, only: Sequence[str]) -> bool:
    """Whether a group may hold something wanted; opening one for nothing takes seconds."""
    return not only or any(
        pattern.startswith(prefix) or fnmatch(prefix, pattern.split("-")[0]) for pattern in only
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, help=f"how often each side is measured ({ROUNDS})")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PATTERN",
        help="e.g. consume-orm or 'latency-*'; may be given several times",
    )
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it runs, no more")
    parser.add_argument("--json", action="store_true", help="print everything, for programs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
