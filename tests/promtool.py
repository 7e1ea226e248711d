"""Prometheus' own judgement of the alert rules, where its `promtool` is installed.

The rules are tried on tests/promql.py everywhere. With `promtool` on the PATH (Debian's package
`prometheus`), everything that was scraped is given to it as well, and it has to come to the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.alert_rules import RULES, STEP_SECONDS, Watch
from tests.promql import NAME, Labels, Series

PROMTOOL = shutil.which("promtool")
TICKS = 3
"""To a step. A scrape comes one tick before its evaluation: whether a window includes a sample at
its very beginning depends on Prometheus' version."""
TICK_SECONDS = STEP_SECONDS / TICKS


def objections(watch: Watch) -> list[str]:
    """Where Prometheus disagrees with what a watch has told; empty also without `promtool`."""
    if PROMTOOL is None or not watch.history:
        return []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "tests.yml"
        path.write_text(yaml.safe_dump(_unit_tests(watch)))
        command = [PROMTOOL, "test", "rules", path.name]
        tried = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return [] if tried.returncode == 0 else [f"promtool: {tried.stdout}{tried.stderr}"]


def _unit_tests(watch: Watch) -> dict[str, Any]:
    series = [
        {"series": _notation(labels), "values": " ".join(_values(watch, each))}
        for labels, each in watch.store.everything()
    ]
    asked = [
        {
            "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": _duration(step * TICKS),
            "exp_samples": [
                {"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)
            ],
        }
        for step, firing in enumerate(watch.history, start=1)
    ]
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": _duration(TICKS),
        "tests": [
            {"interval": _duration(1), "input_series": series, "promql_expr_test": asked},
        ],
    }


def _duration(ticks: int) -> str:
    return f"{round(ticks * TICK_SECONDS)}s"


def _notation(labels: Labels) -> str:
    names = dict(labels)
    inside = ",".join(
        f"{name}={json.dumps(text, ensure_ascii=False)}"
        for name, text in sorted(names.items())
        if name != NAME
    )
    return f"{names[NAME]}{{{inside}}}"


def _values(watch: Watch, series: Series) -> Iterator[str]:
    place = 0
    for at, value in zip(series.times, series.values, strict=True):
        tick = round((at - watch.began_at) / STEP_SECONDS) * TICKS - 1
        yield from "_" * (tick - place)
        yield "stale" if value is None else repr(value)
        place = tick + 1
