"""The benchmarks run, and both sides of every comparison do the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# Machines differ; how long anything takes is not asserted here.
PATIENCE_SECONDS = 240


@pytest.mark.long
@pytest.mark.timeout(PATIENCE_SECONDS)
def test_a_quick_run_measures_every_comparison_and_both_sides_do_the_same() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    comparisons = {each["name"]: each for each in json.loads(finished.stdout)}
    assert set(comparisons) == {
        "consume-nothing",
        "consume-orm",
        "consume-psycopg",
        "consume-copy",
        "publish",
        "send",
        "latency-psycopg",
        "processes-orm",
    }
    assert_all_figures_are_there(comparisons)
    assert_both_sides_have_the_same_effects(comparisons)


def assert_all_figures_are_there(comparisons: dict[str, dict[str, Any]]) -> None:
    for comparison in comparisons.values():
        for measured in comparison["rounds"]:
            assert all(figure > 0 for figure in measured["penstock"].values())
            assert all(figure > 0 for figure in measured["other"].values())


def assert_both_sides_have_the_same_effects(comparisons: dict[str, dict[str, Any]]) -> None:
    # What is only published or sent is counted by the run itself, and decoding has no effect.
    others = ("publish", "send", "decode")
    handled = [each for name, each in comparisons.items() if name not in others]
    effects = [measured["effects"] for each in handled for measured in each["rounds"]]
    assert all(penstock == other for penstock, other in effects)
    # No-op handlers have no effect; the others have the same as each other where they saw the same.
    assert len({penstock for penstock, _ in effects}) == 4
