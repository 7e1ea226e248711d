"""How a worker process takes signals, in any number and at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.waiting import SOON_SECONDS

BEGINNING = """
import os, signal, threading
from penstock.runtime.stopping import seconds_to_end, stop_on_signals

class Stop(threading.Event):
    def set(self):
        with self._cond:
            during_set()
            self._flag = True
            self._cond.notify_all()

def send(*numbers):
    for number in numbers:
        signal.raise_signal(number)

stop = Stop()
stop_on_signals(stop, {seconds})
working = threading.Thread(target=stop.wait)
working.start()
"""
END = """
working.join()
assert seconds_to_end() is not None
print("ended by itself")
"""


def run(*lines: str, seconds: float = 3600.0) -> subprocess.CompletedProcess[str]:
    """A process whose main thread does this while another one works."""
    script = "\n".join((BEGINNING.format(seconds=seconds), *lines, END))
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=2 * SOON_SECONDS,
        check=False,
    )


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_another_one_stops_the_worker_too(first: signal.Signals) -> None:
    ended = run("during_set = lambda: send(signal.SIGTERM, signal.SIGTERM)", f"send({int(first)})")
    assert (ended.returncode, ended.stdout) == (0, "ended by itself\n"), ended.stderr


def test_a_storm_of_signals_stops_the_worker_once() -> None:
    ended = run(
        "during_set = lambda: None",
        "storm = threading.Thread(target=lambda: [",
        "    os.kill(os.getpid(), signal.SIGTERM) for _ in range(3000)])",
        "storm.start()",
        "while storm.is_alive():",
        "    storm.join(0.001)",
    )
    assert (ended.returncode, ended.stdout) == (0, "ended by itself\n"), ended.stderr


def test_who_insists_does_not_wait() -> None:
    ended = run(
        "stop.set = lambda: None",
        "send(signal.SIGINT)",
        "print('asked', flush=True)",
        "send(signal.SIGINT)",
    )
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGINT, "asked\n")


def test_who_does_not_stop_is_ended_when_the_time_is_up() -> None:
    ended = run("stop.set = lambda: None", "send(signal.SIGTERM)", seconds=0.05)
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, "")
