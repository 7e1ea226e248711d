"""`python -m tests.chaos [--seed N] [--seconds S] [--profile P] [--hours H] [--json]`.

Hurts a whole line for a while and proves that nothing was lost, repeated, reordered or left over.
Exit code 1 unless everything holds. `--long` is one run of a million events, with the same number
of faults spread over more time.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.nemesis import GAP_SECONDS
from tests.chaos.report import Demands, Report
from tests.chaos.run import EVENTS_PER_SECOND, Plan, run

SECONDS = 260.0
WHOLE = Demands(events=60_000, faults=500, kinds=16, failpoint_hits=1)
LONG_SECONDS, LONG_RATE, LONG_GAP_SECONDS = 1800.0, 1500.0, 4.0
LONG = Demands(events=1_000_000, faults=500, kinds=16, failpoint_hits=3)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))  # noqa: S311
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long faults go on")
    parser.add_argument("--hours", type=float, default=0.0, help="run after run, each with a seed")
    parser.add_argument("--long", action="store_true", help="a million events in one run")
    parser.add_argument("--profile", default="everything")
    parser.add_argument("--rate", type=float, default=EVENTS_PER_SECOND, help="events a second")
    parser.add_argument("--gap", type=float, default=GAP_SECONDS, help="seconds between faults")
    parser.add_argument("--folder", type=Path, help="keep all logs there")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    demands = WHOLE if options.seconds >= SECONDS else Demands()
    if options.long:
        options.seconds, options.rate, options.gap = LONG_SECONDS, LONG_RATE, LONG_GAP_SECONDS
        demands = LONG
    # Connections are lost all the time here, and the driver has a word about each.
    logging.getLogger("psycopg").setLevel(logging.ERROR)
    ends_at = time.monotonic() + options.hours * 3600
    seed = options.seed
    while True:
        plan = Plan(
            seed,
            options.seconds,
            options.profile,
            options.rate,
            options.gap,
            demands,
        )
        report = _run(plan, options.folder)
        text = json.dumps(report.as_json(), indent=2) if options.json else str(report)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if not report.holds:
            return 1
        if time.monotonic() >= ends_at:
            return 0
        seed += 1


def _run(plan: Plan, folder: Path | None) -> Report:
    sys.stderr.write(f"seed {plan.seed}: {plan.seconds:g} s of faults …\n")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return run(plan, folder)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        return run(plan, Path(name))


if __name__ == "__main__":
    sys.exit(main())
