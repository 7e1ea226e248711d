"""Faults one at a time: on real servers, with a look at what they do while they last."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.scene import Scene
from tests.chaos.servers import World


def nothing() -> None:
    """What most do while a fault lasts."""


@dataclass(frozen=True)
class Watched(Scene):
    """A scene where faults last exactly as long as somebody looks at them."""

    during: Callable[[], None] = nothing

    def wait(self, seconds: float) -> None:
        assert seconds >= 0
        self.during()


@dataclass(frozen=True)
class Bystander:
    """A process that does nothing, until something is done to it."""

    pid: int
    role: str
    host: str

    @property
    def state(self) -> str:
        """By the kernel's account: T is stopped, Z is dead."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Crowd:
    """Hosts with nothing on them but processes that may be hurt; operators only leave notes."""

    def __init__(self, processes: Sequence[Bystander] = ()) -> None:
        self._processes = processes
        self.has_added_consumer = False
        self.notes: list[str] = []

    def processes(self) -> Sequence[Bystander]:
        return self._processes

    def host_names(self) -> list[str]:
        return sorted({one.host for one in self._processes if one.role == "supervisor"})

    def lose(self, name: str) -> None:
        self.notes.append(f"lose {name}")

    def restart(self, name: str) -> None:
        self.notes.append(f"restart {name}")

    def freeze(self, name: str) -> list[int]:
        pids = [one.pid for one in self._processes if one.host == name]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        return pids

    def set_slow(self, seconds: float) -> None:
        self.notes.append("slow" if seconds else "fast")

    def add_consumer(self) -> str:
        self.has_added_consumer = True
        return "late"

    def change_lanes(self, count: int) -> None:
        self.notes.append(f"lanes {count}")

    def pause(self) -> None:
        self.notes.append("pause")

    def resume(self) -> None:
        self.notes.append("resume")

    def redrive(self, seconds: float) -> object:
        self.notes.append("redrive")
        return f"for {seconds:.1f} s"


@dataclass(frozen=True)
class Stage:
    """A world and a crowd, as a run would have them."""

    world: World
    hosts: Crowd

    def hurt(self, name: str, *, during: Callable[[], None] = nothing, seed: int = 1) -> str | None:
        """Inject one fault and return what it says; `during` is called while it lasts."""
        chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
        return FAULTS[name].inject(Watched(self.world, self.hosts, during=during), chance)


@contextmanager
def bystanders(*places: tuple[str, str]) -> Iterator[list[Bystander]]:
    """Real processes with a role and a host each."""
    command = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]
    processes = [subprocess.Popen(command) for _ in places]
    try:
        yield [
            Bystander(process.pid, role, host)
            for process, (role, host) in zip(processes, places, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()
