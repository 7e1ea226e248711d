"""Child processes are kept running, ended in order, and never outlive their parent."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.runtime.children import HEARTBEAT_FD, Child, ProcessSpec
from penstock.runtime.posts import restart_delay_seconds
from penstock.runtime.processes import ProcessGroup
from tests.process_group import WAIT_SECONDS, children, dead, host, is_alive, is_there
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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
def test_who_insists_by_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    with host(tmp_path, "deaf", "obedient") as parent:
        by_kind = {child.kind: child for child in children(tmp_path, count=2)}
        parent.terminate()
        wait_until(
            lambda: not is_there(by_kind["obedient"].pid),
            seconds=WAIT_SECONDS,
            what="the first signal has arrived",
        )
        parent.send_signal(signal.SIGINT)
        assert parent.wait(WAIT_SECONDS) == 1
        assert not is_there(by_kind["deaf"].pid)


@pytest.mark.slow
def test_a_second_sigterm_changes_nothing(tmp_path: Path) -> None:
    """GNU timeout sends one to its child and one to the group, which the child is in."""
    with host(tmp_path, "thorough", "obedient") as parent:
        by_kind = {child.kind: child for child in children(tmp_path, count=2)}
        parent.terminate()
        wait_until(
            lambda: not is_there(by_kind["obedient"].pid),
            seconds=WAIT_SECONDS,
            what="the first signal has arrived",
        )
        parent.terminate()
        wait_until(
            lambda: signals_pending(parent.pid) == 0,
            seconds=WAIT_SECONDS,
            what="the second signal has arrived",
        )
        (tmp_path / "go").touch()
        assert parent.wait(WAIT_SECONDS) == 0
        assert dead(tmp_path) == []


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
    group._create(group._specs[0])
    group._fill_posts()
    assert group._posts["absent"].due_at is not None


def test_a_child_carries_nothing_of_a_large_parent(tmp_path: Path) -> None:
    heap = bytearray(os.urandom(1000)) * 200_000
    status = tmp_path / "status"
    code = f"open({str(status)!r}, 'w').write(open('/proc/self/status').read())"
    child = Child(ProcessSpec("child", [sys.executable, "-c", code]))
    assert child.process.wait(WAIT_SECONDS) == 0
    assert resident_kb(Path("/proc/self/status").read_text()) > len(heap) // 1024
    assert resident_kb(status.read_text()) < 60_000


def test_a_silence_is_held_against_a_child_only_if_somebody_listened() -> None:
    spec = ProcessSpec("silent", ["sleep", "60", HEARTBEAT_FD])
    group = ProcessGroup(
        [spec], shutdown_seconds=1, on_death=lambda _: None, heartbeat_timeout_seconds=5
    )
    group._create(spec)
    group._fill_posts()
    child = group._posts["silent"].child
    assert child is not None
    try:
        child.beat_at = child._heard_at = time.monotonic() - 60
        group._turned_at = time.monotonic() - 60
        group._watch()
        verdicts = [child.was_silent]
        child._heard_at = time.monotonic() - 60
        group._watch()
        assert [*verdicts, child.was_silent] == [False, True]
        assert child.process.wait(WAIT_SECONDS) == -signal.SIGKILL
    finally:
        group._kill()
        child.close()


def test_two_processes_never_share_a_name() -> None:
    spec = ProcessSpec("publisher", ["true"])
    with pytest.raises(UsageError, match="share a name"):
        ProcessGroup([spec, spec], shutdown_seconds=1, on_death=lambda _: None)


# ── the words used above ───────────────────────────────────────────────────────────────────────


def signals_pending(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd"))


def resident_kb(status: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
