"""Child processes are kept running, ended in order, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.runtime.processes import ProcessGroup, ProcessSpec, restart_delay_seconds
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
WAIT_SECONDS = 20.0
LONG_SECONDS = 300.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@dataclass(frozen=True)
class Started:
    kind: str
    pid: int
    worker_id: str


def test_a_killed_child_is_started_again_under_a_new_id(tmp_path: Path) -> None:
    with host(tmp_path, "obedient"):
        (first,) = children(tmp_path, count=1)
        os.kill(first.pid, signal.SIGKILL)
        _, second = children(tmp_path, count=2)
        assert second.worker_id != first.worker_id
        wait_until(
            lambda: dead(tmp_path) == [first.worker_id],
            seconds=WAIT_SECONDS,
            what="the dead worker is reported, and no other",
        )


def test_sigterm_ends_all_children_and_counts_as_success(tmp_path: Path) -> None:
    with host(tmp_path, "obedient") as parent:
        (running,) = children(tmp_path, count=1)
        parent.terminate()
        assert parent.wait(WAIT_SECONDS) == 0
        assert not is_there(running.pid)
        assert dead(tmp_path) == []


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_reaches_the_children_once(tmp_path: Path) -> None:
    with host(tmp_path, "obedient") as parent:
        (running,) = children(tmp_path, count=1)
        os.killpg(parent.pid, signal.SIGINT)
        assert parent.wait(WAIT_SECONDS) == 0
        assert not is_there(running.pid)


@pytest.mark.slow
def test_a_child_that_does_not_listen_is_killed_when_its_time_is_up(tmp_path: Path) -> None:
    with host(tmp_path, "deaf", shutdown_seconds=0.5) as parent:
        (running,) = children(tmp_path, count=1)
        asked_at = time.monotonic()
        parent.terminate()
        assert parent.wait(WAIT_SECONDS) == 1
        assert time.monotonic() - asked_at >= 0.5
        assert not is_there(running.pid)
        assert dead(tmp_path) == [running.worker_id]


@pytest.mark.slow
def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    with host(tmp_path, "deaf", "obedient") as parent:
        by_kind = {child.kind: child for child in children(tmp_path, count=2)}
        parent.terminate()
        wait_until(
            lambda: not is_there(by_kind["obedient"].pid),
            seconds=WAIT_SECONDS,
            what="the first signal has arrived",
        )
        parent.terminate()
        assert parent.wait(WAIT_SECONDS) == 1
        assert not is_there(by_kind["deaf"].pid)


@pytest.mark.slow
def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    with host(tmp_path, "obedient") as parent:
        (running,) = children(tmp_path, count=1)
        parent.kill()
        wait_until(
            lambda: not is_alive(running.pid), seconds=WAIT_SECONDS, what="the orphan has ended"
        )


@pytest.mark.slow
def test_dead_children_leave_no_zombie(tmp_path: Path) -> None:
    with host(tmp_path, "brief"):
        died = [child.pid for child in children(tmp_path, count=3)[:2]]
        assert not any(is_there(pid) for pid in died)


def test_the_delay_before_a_restart_grows_to_a_limit() -> None:
    delays = [restart_delay_seconds(failures) for failures in range(8)]
    assert delays[:3] == [0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == restart_delay_seconds(10_000) == 5.0


def test_a_command_that_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
    group = ProcessGroup(
        [ProcessSpec("absent", [str(tmp_path / "absent")])],
        shutdown_seconds=1,
        on_death=lambda _: None,
    )
    group._start(group._specs[0])
    assert "absent" in group._due


def test_two_processes_never_share_a_name() -> None:
    spec = ProcessSpec("publisher", ["true"])
    with pytest.raises(UsageError, match="share a name"):
        ProcessGroup([spec, spec], shutdown_seconds=1, on_death=lambda _: None)


# ── the words used above ───────────────────────────────────────────────────────────────────────


@contextmanager
def host(
    folder: Path, *kinds: str, shutdown_seconds: float = LONG_SECONDS
) -> Iterator[subprocess.Popen[bytes]]:
    """A process group under a parent of its own, which a test may kill."""
    seconds = str(shutdown_seconds)
    command = [sys.executable, "-m", "tests.process_host", str(folder), seconds, *kinds]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as parent:
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
