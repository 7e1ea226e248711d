"""`python -m tests.simulation`: many histories, or one with everything told."""

from __future__ import annotations

import argparse
import sys

from tests.simulation.run import simulate, trace


def main() -> int:
    """Simulate. Ends with 1 where a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--histories", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--processes", type=int, default=None, help="one per core")
    parser.add_argument("--trace", type=int, metavar="SEED", help="tell one history")
    arguments = parser.parse_args()
    if arguments.trace is not None:
        outcome = trace(arguments.trace, print)
        print(outcome)  # noqa: T201
        return 1 if outcome.violations else 0
    report = simulate(arguments.seed, arguments.histories, arguments.processes)
    for line in report.lines():
        print(line)  # noqa: T201
    return 1 if report.violating else 0


if __name__ == "__main__":
    sys.exit(main())
