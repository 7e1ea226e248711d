"""What tests ask of a process group that runs under a parent of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
WAIT_SECONDS = 45.0


@dataclass(frozen=True)
class Started:
    kind: str
    pid: int
    worker_id: str


@contextmanager
def host(folder: Path, *kinds: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process group under a parent of its own, which a test may kill."""
    document = json.dumps({"kinds": kinds, **options})
    command = [sys.executable, "-m", "tests.process_host", str(folder), document]
    with (
        (folder / "log").open("ab") as log,
        subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=log) as parent,
    ):
        try:
            yield parent
        finally:
            parent.terminate()
            try:
                parent.wait(WAIT_SECONDS)
            finally:
                parent.kill()


def children(folder: Path, *, count: int) -> list[Started]:
    """The first children that were started, once there are so many."""
    path = folder / "started"
    wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) >= count,
        seconds=WAIT_SECONDS,
        what=f"{count} children have started",
    )
    words = [line.split() for line in path.read_text().splitlines()[:count]]
    return [Started(kind, int(pid), worker_id) for kind, pid, worker_id in words]


def dead(folder: Path) -> list[str]:
    path = folder / "dead"
    return path.read_text().splitlines() if path.exists() else []


def is_there(pid: int) -> bool:
    """Whether a process exists, be it as a zombie."""
    return Path(f"/proc/{pid}").exists()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie has ended and merely waits to be counted."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in {"Z", "X"}
