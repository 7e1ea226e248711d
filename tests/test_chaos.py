"""A minute of chaos, and that those who judge it can tell right from wrong."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

from penstock.telemetry.failpoints import Action, Failpoint, Hit, parse
from penstock.telemetry.logs import JsonFormatter
from penstock.telemetry.signals import Signal, WorkerDied
from tests.chaos import app
from tests.chaos.app import FOLDER, Surroundings, Trouble
from tests.chaos.arming import NOT_REACHABLE, Armoury, reachable
from tests.chaos.checker import explain
from tests.chaos.deaths import Deaths
from tests.chaos.hosts import processes_of
from tests.chaos.operator import Buried
from tests.chaos.report import Demands
from tests.chaos.run import Plan, run
from tests.chaos.tripwires import alarms, lay_tripwires
from tests.chaos.watch import Progress, Ratchet
from tests.waiting import wait_until

SEED = int(os.environ.get("CHAOS_SEED", "20"))
"""Always the same, unless somebody asks for another: a red build must not be a matter of luck."""
SECONDS = 35.0
"""A minute with its beginning and its end."""
A_LINE = """
INSERT INTO events.stream (name, origin, head) VALUES ('s', gen_random_uuid(), 7);
INSERT INTO events.stream_lease (stream_name, role, owner_id, term, checkpoint, lease_until)
VALUES ('s', 'consumer:c', 'a', 3, 5, 'infinity');
INSERT INTO events.outbox_event (event_uuid, stream_name, event_type, payload, position)
VALUES (gen_random_uuid(), 's', 't', '{}', 7);
INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
SELECT 'c', event_uuid, 7, 'handled' FROM events.outbox_event;
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_minute_of_chaos_loses_repeats_and_leaves_nothing(tmp_path: Path) -> None:
    # Other tests run beside it, so only a run of its own is held to the seconds.
    demands = Demands(events=1500, faults=40, kinds=12, stall_seconds=60, settled_seconds=90)
    plan = Plan(SEED, SECONDS, events_per_second=150, gap_seconds=0.7, demands=demands)
    report = run(plan, tmp_path)
    assert report.hits.total() > 0, str(report)
    assert report.holds, str(report)


# ── failpoints ─────────────────────────────────────────────────────────────────────────────────


def test_every_signal_is_hit_by_a_run_or_has_a_reason_why_not() -> None:
    assert set(reachable()) | NOT_REACHABLE.keys() == Signal.registry.keys()
    assert not set(reachable()) & NOT_REACHABLE.keys()


def test_what_was_never_hit_is_armed_until_it_is(tmp_path: Path) -> None:
    armoury = Armoury(tmp_path, seed=1, gap_seconds=1.0)
    armoury.arm()
    hit: set[str] = set()

    def hit_what_is_armed() -> bool:
        armoury.turn()
        armed = parse(armoury.plan.read_text()).failpoints
        for failpoint in armed:
            if failpoint.nth == 1:
                hit.add(failpoint.signal)
                line = Hit(time.time(), 1, failpoint.signal, failpoint.actions[0])
                with (tmp_path / "hits").open("a") as file:
                    file.write(f"{line}\n")
        # As if a second had passed.
        armoury._next_at = 0.0
        return not armoury.missed

    wait_until(hit_what_is_armed, what="all have been armed")
    assert hit == set(reachable())
    armoury.disarm()
    assert parse(armoury.plan.read_text()).failpoints == ()


def test_no_exception_is_raised_on_the_threads_that_nobody_watches() -> None:
    from tests.chaos.arming import ON_OTHER_THREADS, _actions_at

    assert Signal.registry.keys() >= ON_OTHER_THREADS
    assert all(Action.RAISE not in _actions_at(name) for name in ON_OTHER_THREADS)
    assert Action.RAISE in _actions_at("BatchSealed")


def test_a_failpoint_of_the_harness_can_be_read_by_its_processes() -> None:
    failpoint = Failpoint("BatchSealed", (Action.KILL, Action.STOP), nth=None, odds=0.00002)
    assert parse(str(failpoint)).failpoints == (failpoint,)


# ── who stood still, what went back ────────────────────────────────────────────────────────────


def test_a_lane_that_has_work_and_does_not_move_has_stalled() -> None:
    progress = Progress()
    for now, reached in enumerate([1, 1, 1, 2, 2]):
        progress.note("lane", reached, float(now), has_work=True)
    (stall,) = progress.stalls
    assert (stall.who, stall.started_at, stall.ended_at) == ("lane", 0.0, 3.0)


def test_a_lane_without_work_and_a_database_that_is_away_are_no_stall() -> None:
    progress = Progress()
    for now in range(5):
        progress.note("lane", 1, float(now), has_work=False)
    progress.interrupt(5.0)
    assert progress.stalls == []
    for now in range(9, 12):
        progress.note("lane", 1, float(now), has_work=now < 11)
    assert [(stall.started_at, stall.ended_at) for stall in progress.stalls] == [(9.0, 11.0)]


def test_what_goes_back_is_noticed() -> None:
    ratchet = Ratchet()
    for term, checkpoint in [(1, 5), (2, 5), (2, 9)]:
        ratchet.note("lane", "term", term)
        ratchet.note("lane", "checkpoint", checkpoint)
    assert ratchet.faults == []
    ratchet.note("lane", "checkpoint", 8)
    ratchet.note("lane", "term", 1)
    assert ratchet.faults == [
        "the checkpoint of lane went back from 9 to 8",
        "the term of lane went back from 2 to 1",
    ]


def test_a_term_with_two_owners_is_noticed() -> None:
    ratchet = Ratchet()
    ratchet.note_owner("lane", 1, "this one")
    ratchet.note_owner("lane", 1, "this one")
    ratchet.note_owner("lane", 2, "that one")
    assert ratchet.faults == []
    ratchet.note_owner("lane", 2, "this one")
    assert len(ratchet.faults) == 1


A_DEAD_EVENT: LiteralString = """
INSERT INTO events.processed_event (consumer, event_uuid, position, outcome)
VALUES ('chaos.single', gen_random_uuid(), 9, 'dead')
"""


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ("UPDATE events.stream_lease SET checkpoint = checkpoint + 1", None),
        ("UPDATE events.stream_lease SET checkpoint = 4", "a checkpoint went back"),
        ("UPDATE events.stream_lease SET term = term + 1, owner_id = 'b'", None),
        ("UPDATE events.stream_lease SET term = term - 1", "a term went back"),
        ("UPDATE events.stream_lease SET owner_id = 'b'", "a term changed hands"),
        ("UPDATE events.stream_lease SET owner_id = NULL", None),
        ("UPDATE events.stream SET head = head + 1", None),
        ("UPDATE events.stream SET head = head - 1", "a head went back"),
        ("UPDATE events.outbox_event SET position = 8", "an event got another position"),
        ("UPDATE events.processed_event SET outcome = 'discarded'", "was settled again"),
        (A_DEAD_EVENT, "dead without a letter"),
    ],
)
def test_what_must_never_happen_sounds_an_alarm_even_if_it_is_mended(
    database_url: str, change: LiteralString, alarm: str | None
) -> None:
    lay_tripwires(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(A_LINE)
        assert alarms(connection) == []
        connection.execute(change)
        sounded = [what for what, _ in alarms(connection)]
    if alarm is None:
        assert sounded == []
    else:
        assert len(sounded) == 1
        assert alarm in sounded[0]


def test_a_checkpoint_that_moves_under_a_lease_of_long_ago_sounds_an_alarm(
    database_url: str,
) -> None:
    lay_tripwires(database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(A_LINE)
        connection.execute("UPDATE events.stream_lease SET lease_until = '-infinity'")
        connection.execute("UPDATE events.stream_lease SET checkpoint = 6")
        ((what, _),) = alarms(connection)
    assert what == "a checkpoint moved under a lease that was over"


# ── dead letters ───────────────────────────────────────────────────────────────────────────────


def letter(reason: str, trouble: str | None, *, attempts: int = 1, errors: str = "") -> Buried:
    return Buried("chaos.single", "uuid", reason, attempts, errors, trouble)


@pytest.mark.parametrize(
    ("buried", "spoiled", "why"),
    [
        (letter("fatal", Trouble.FATAL), 1, "fatal"),
        (letter("fatal", Trouble.FATAL), 0, None),
        (letter("fatal", Trouble.NONE), 0, None),
        (letter("exhausted", Trouble.STUBBORN), 6, "exhausted"),
        (letter("exhausted", Trouble.NONE), 0, None),
        (letter("exhausted", Trouble.NONE, errors="FailpointReached"), 0, "by a failpoint"),
        (letter("crash", Trouble.KILLER), 3, "killer"),
        (letter("crash", Trouble.NONE, attempts=3), 0, "killed from outside"),
        (letter("crash", Trouble.NONE, attempts=2), 0, None),
        (letter("contract", None), 0, None),
        (letter("interrupted", Trouble.FATAL), 0, None),
    ],
)
def test_a_letter_is_explained_by_what_its_event_does_or_not_at_all(
    buried: Buried, spoiled: int, why: str | None
) -> None:
    found = explain(buried, spoiled)
    assert found == why if why is None else found is not None and why in found


def test_a_run_finds_its_own_orphans_and_nobody_elses(tmp_path: Path) -> None:
    def standing_still(folder: Path) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"]
        process = subprocess.Popen(argv, env={**os.environ, FOLDER: str(folder)})
        os.waitpid(process.pid, os.WUNTRACED)
        return process

    own, other = standing_still(tmp_path / "run"), standing_still(tmp_path / "run-2")
    try:
        assert processes_of(tmp_path / "run") == [own.pid]
    finally:
        for process in (own, other):
            process.kill()
            process.wait()


def test_a_worker_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    def said(signal: Signal) -> str:
        name, values = type(signal).__name__, dataclasses.asdict(signal)  # type: ignore[call-overload]
        return JsonFormatter().format(logging.makeLogRecord({"signal": name, "fields": values}))

    log, deaths = tmp_path / "host-1-1.log", Deaths()
    log.write_text(
        f"{said(WorkerDied('publisher', 11, -9))}\n{said(WorkerDied('publisher', 12, 70))}\n"
        f"{said(WorkerDied('publisher', 13, 1))}\n"
        f"{said(WorkerDied('consumer:single', 15, app.EXIT_CODE))}\n"
        f"    raise error{said(WorkerDied('consumer:laned', 14, 1))}\n"
    )
    for path in (log, log, tmp_path / "gone.log"):
        deaths.read(path)
    hits = [Hit(0.0, 13, "BatchRead", Action.RAISE), Hit(0.0, 14, "BatchRead", Action.STOP)]
    assert deaths.unexplained(hits) == [
        "consumer:laned ended by itself, with exit code 1: host-1-1.log"
    ]


def test_handlers_and_harness_tell_each_other_by_files(tmp_path: Path) -> None:
    here, there = Surroundings(tmp_path), Surroundings(tmp_path)
    assert (here.slow_seconds, here.failures("chaos.single", "uuid")) == (0.0, 0)
    there.set_slow(0.5)
    assert here.slow_seconds == 0.5
    there.set_slow(0)
    assert here.slow_seconds == 0.0
    there.note_failure("chaos.single", "uuid")
    there.note_failure("chaos.single", "uuid")
    assert here.failures("chaos.single", "uuid") == 2
    assert here.failures("chaos.laned", "uuid") == 0
