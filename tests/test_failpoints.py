"""Failpoints end, stop or disturb a process where they are told to, and leave a trace of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import SettingsError
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted, unsubscribe
from penstock.telemetry.failpoints import (
    EXIT_CODE,
    Action,
    Failpoint,
    FailpointReached,
    Failpoints,
    Hit,
    install_failpoints,
    parse,
)
from tests.waiting import wait_until

READ = signals.BatchRead("consumer", 1, 2)
NUMBERED = signals.BatchNumbered("orders", 1, 2)

EMITTING = """
import sys
from penstock.telemetry import signals
from penstock.telemetry.bus import emit
from penstock.telemetry.failpoints import install_failpoints
install_failpoints(sys.argv[1])
for number in range(1, 4):
    print(number, flush=True)
    emit(signals.BatchRead("consumer", number, number))
"""


def emitting(description: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", EMITTING, description]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def hits_in(path: Path) -> list[tuple[str, str]]:
    hits = map(Hit.parse, path.read_text().splitlines())
    return [(hit.signal, str(hit.action)) for hit in hits]


# ── what is understood ─────────────────────────────────────────────────────────────────────────


def test_the_short_form_means_the_first_emission() -> None:
    assert parse("BatchRead:kill").failpoints == (Failpoint("BatchRead", (Action.KILL,), nth=1),)


def test_all_parts_are_understood_and_written_as_they_are_read() -> None:
    text = "seed=7,hits=/tmp/hits,BatchRead:kill|stop:2,*:exit|raise:0.010000"
    description = parse(text)
    assert description.seed == "7"
    assert description.hits == Path("/tmp/hits")  # noqa: S108 - nothing is written there
    assert description.failpoints == (
        Failpoint("BatchRead", (Action.KILL, Action.STOP), nth=2),
        Failpoint("*", (Action.EXIT, Action.RAISE), nth=None, odds=0.01),
    )
    assert str(description) == text


@pytest.mark.parametrize(
    "text",
    ["BatchRead", "BatchRead:", "BatchRed:kill", "BatchRead:die", "BatchRead:kill:0",
     "BatchRead:kill:often", "BatchRead:kill:1.5", "BatchRead:kill|:1", "pace=3"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(SettingsError, match=r"must be Signal:kill\|exit\|stop\|raise"):
        parse(text)


# ── what they do ───────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("action", "code"), [(Action.KILL, -signal.SIGKILL), (Action.EXIT, EXIT_CODE)]
)
def test_the_process_ends_at_the_nth_emission_and_its_hit_is_known(
    action: Action, code: int, tmp_path: Path
) -> None:
    process = emitting(f"BatchRead:{action}:2,hits={tmp_path / 'hits'}")
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == (["1", "2"], code)
    assert hits_in(tmp_path / "hits") == [("BatchRead", str(action))]


def test_the_whole_process_stands_still_until_it_is_continued(tmp_path: Path) -> None:
    process = emitting(f"BatchRead:stop:2,hits={tmp_path / 'hits'}")
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert hits_in(tmp_path / "hits") == [("BatchRead", "stop")]
    process.send_signal(signal.SIGCONT)
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == (["1", "2", "3"], 0)


def test_an_exception_gets_out_of_emit_and_past_whoever_catches_errors() -> None:
    process = emitting("BatchRead:raise:2")
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == (["1", "2"], 1)
    assert not issubclass(FailpointReached, Exception)


def test_only_the_named_signal_is_heard() -> None:
    failpoints = Failpoints(parse("BatchRead:raise:1"))
    failpoints(NUMBERED)
    with pytest.raises(FailpointReached, match="BatchRead"):
        failpoints(READ)
    failpoints(READ)


def test_chance_is_the_same_for_the_same_seed_and_as_rare_as_was_asked_for() -> None:
    def hits(seed: int) -> list[int]:
        failpoints = Failpoints(parse(f"seed={seed},*:raise:0.05"))
        found = []
        for number in range(2000):
            try:
                failpoints(READ)
            except FailpointReached:
                found.append(number)
        return found

    assert hits(1) == hits(1) != hits(2)
    assert 50 < len(hits(1)) < 150


# ── a file that changes ────────────────────────────────────────────────────────────────────────


def test_a_file_arms_and_disarms_a_process_that_runs(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    failpoints = Failpoints(parse(""), plan)

    def is_armed() -> bool:
        try:
            failpoints(READ)
        except FailpointReached:
            return True
        return False

    assert not is_armed()
    plan.write_text("*:raise:0.999999999")
    wait_until(is_armed, what="the file is read")
    plan.unlink()
    wait_until(lambda: not is_armed(), what="the file is gone")


def test_a_process_reads_its_failpoints_from_the_file_that_it_is_given(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    plan.write_text(f"BatchRead:exit:3,hits={tmp_path / 'hits'}")
    process = emitting(f"@{plan}")
    told, _ = process.communicate()
    assert (told.split(), process.returncode) == (["1", "2", "3"], EXIT_CODE)


def test_a_signal_that_no_failpoint_names_is_not_even_built() -> None:
    before = set(map(id, _subscribers()))
    install_failpoints("BatchNumbered:raise")
    try:
        assert is_wanted(signals.BatchNumbered)
        assert not is_wanted(signals.BatchRead)
        with pytest.raises(FailpointReached):
            emit(NUMBERED)
    finally:
        for subscriber in _subscribers():
            if id(subscriber) not in before:
                unsubscribe(subscriber)
    install_failpoints(None)
    install_failpoints("")
    assert not is_wanted(signals.BatchNumbered)


def _subscribers() -> list[Failpoints]:
    from penstock.telemetry import bus

    everybody = [*bus._to_all, *(one for some in bus._by_type.values() for one in some)]
    return [one for one in everybody if isinstance(one, Failpoints)]
