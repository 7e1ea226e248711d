"""The demo is a promise to whoever tries Penstock first: it runs, adds up, and leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
EVENTS = 1500


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: v for name, v in os.environ.items() if not name.startswith("PENSTOCK_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "demo", "--events", str(EVENTS), *options],
        env={**environment, "TMPDIR": str(folder)},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def leftovers(folder: Path) -> list[str]:
    """Files in the demo's temporary folder, and processes that have it in their world."""
    found = [path.name for path in folder.iterdir()]
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"TMPDIR={folder}".encode() in path.read_bytes() and path.parent.name != "self":
                found.append(path.parent.joinpath("cmdline").read_text())
        except OSError:
            continue
    return found


def test_the_demo_breaks_things_and_its_books_balance(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", "--seed", "3") as process:
        output, progress = process.communicate(timeout=150)
    assert process.returncode == 0, progress
    report = json.loads(output)
    assert report["balance"] is True
    assert report["sent"] == EVENTS
    assert {name: c["handled"] for name, c in report["consumers"].items()} == {
        "billing": EVENTS,
        "shipping": EVENTS,
    }
    assert set(report["anomalies"].values()) == {0}
    done = " ".join(report["done_to_it"])
    assert len(re.findall(r"kill -9 of the consumer", done)) == 2
    assert "kill -9 of the publisher" in done
    assert "FLUSHALL" in done
    assert all(latency["p50"] > 0 for latency in report["commit_to_commit_ms"].values())
    assert leftovers(tmp_path) == []


@pytest.mark.long
def test_the_demo_can_be_stopped_at_any_moment_and_leaves_nothing(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        assert process.stdout is not None
        wait_until(
            lambda: "kill -9" in (process.stdout or sys.stdin).readline(),
            seconds=120,
            what="the demo is at it",
        )
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped" in output
    wait_until(lambda: not leftovers(tmp_path), what="nothing is left behind")
