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
        "decode",
        "archive",
        "telemetry-nothing",
        "telemetry-orm",
        *(f"timers-{act}" for act in ("schedule", "cancel", "fire")),
        *(f"redis-timers-{act}" for act in ("publish", "cancel", "handle")),
    }
    assert_all_figures_are_there(comparisons)
    assert_both_sides_have_the_same_effects(comparisons)


def assert_all_figures_are_there(comparisons: dict[str, dict[str, Any]]) -> None:
    for comparison in comparisons.values():
        for measured in comparison["rounds"]:
            for figures in (measured["penstock"], measured["other"]):
                # Memory need not have grown.
                assert all(figure > 0 or "MiB" in unit for unit, figure in figures.items())


def assert_both_sides_have_the_same_effects(comparisons: dict[str, dict[str, Any]]) -> None:
    # Where nothing is handled, the run itself counts what was done.
    effects = {
        name: measured["effects"]
        for name, each in comparisons.items()
        for measured in each["rounds"]
        if measured["effects"] is not None
    }
    assert {name.partition("-")[0] for name in effects} == {
        "consume",
        "latency",
        "processes",
        "telemetry",
    }
    assert all(penstock == other for penstock, other in effects.values())
    # Handlers have the same effects as each other where they saw the same, and no-op ones none.
    assert effects["consume-orm"] == effects["consume-psycopg"] == effects["consume-copy"]
    assert effects["consume-nothing"] == effects["telemetry-nothing"] != effects["consume-orm"]
