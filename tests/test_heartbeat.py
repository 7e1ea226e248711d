"""A process beats while its loops are well, and only then."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator

import pytest

from penstock.core.progress import IDLE, Progress
from penstock.runtime.heartbeat import LoopPulse, Pulse
from penstock.runtime.loop import Loop
from tests.waiting import wait_until

TIMEOUT_SECONDS = 0.2


class Ear:
    """The supervisor's end of the pipe."""

    def __init__(self) -> None:
        self.descriptor, self.other = os.pipe()
        os.set_blocking(self.descriptor, False)

    def hears(self) -> bool:
        try:
            return bool(os.read(self.descriptor, 1000))
        except BlockingIOError:
            return False

    def is_silent(self) -> bool:
        """Whether nothing comes for a whole timeout."""
        self.hears()
        threading.Event().wait(TIMEOUT_SECONDS)
        return not self.hears()


@pytest.fixture
def ear() -> Iterator[Ear]:
    ear = Ear()
    yield ear
    for descriptor in (ear.descriptor, ear.other):
        os.close(descriptor)


@pytest.fixture
def pulse(ear: Ear) -> Iterator[Pulse]:
    pulse = Pulse(ear.other, timeout_seconds=TIMEOUT_SECONDS, longest_wait_seconds=0.0)
    pulse.start()
    yield pulse
    pulse.stop()
    wait_until(
        lambda: "penstock-heartbeat" not in {thread.name for thread in threading.enumerate()},
        what="the heartbeat has ended",
    )


def test_a_process_without_loops_beats(ear: Ear, pulse: Pulse) -> None:
    for _ in range(3):
        wait_until(ear.hears, what="another beat")


def test_a_loop_that_stops_turning_silences_the_process_and_is_named_once(
    ear: Ear, pulse: Pulse
) -> None:
    lines: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("penstock").addHandler(listener)
    try:
        watched = pulse.watch("lane 3")
        wait_until(ear.is_silent, what="the hung loop silences the process")
        assert pulse.hung() == "lane 3"
        watched.turned()
        wait_until(ear.hears, what="a loop that turns again is well again")
    finally:
        logging.getLogger("penstock").removeHandler(listener)
    assert len([line for line in lines if line.startswith("lane 3 has not turned")]) == 1


def test_a_handler_may_take_as_long_as_it_likes(ear: Ear, pulse: Pulse) -> None:
    watched = pulse.watch("lane")
    with watched.excused:
        assert not ear.is_silent()
        assert not ear.is_silent()
    assert pulse.hung() is None


def test_a_loop_that_has_ended_is_not_missed(ear: Ear, pulse: Pulse) -> None:
    pulse.forget(pulse.watch("lane"))
    assert not ear.is_silent()
    assert not ear.is_silent()


def test_a_full_pipe_and_a_lost_supervisor_harm_nobody(ear: Ear) -> None:
    pulse = Pulse(ear.other, timeout_seconds=0.004, longest_wait_seconds=0.0)
    os.write(ear.other, b"." * 65536)
    assert pulse._beat()
    reading, writing = os.pipe()
    os.close(reading)
    assert not Pulse(writing, timeout_seconds=1, longest_wait_seconds=0)._beat()
    os.close(writing)


def test_the_loop_notes_its_turns_and_excuses_its_pauses() -> None:
    stop = threading.Event()
    watched = LoopPulse("lane")
    excuses: list[bool] = []

    class Stage:
        steps = 0

        def step(self) -> Progress:
            self.steps += 1
            if self.steps == 2:
                stop.set()
                return IDLE
            threading.Timer(0.05, lambda: excuses.append(watched.is_well(0.0))).start()
            return Progress(0, pause_seconds=0.3)

        def wait(self, stop: threading.Event) -> None:
            pass

        def close(self) -> None:
            pass

    before = watched._turned_at
    Loop("lane", Stage, stop, watched).run()
    assert excuses == [True]
    assert watched._turned_at > before
