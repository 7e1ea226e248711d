"""Processes and hosts that are killed, stand still, or are replaced."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.chaos.scene import LEASE_SECONDS, Fault, Process, Scene, fault, some

PROCESS, WORKER, HOST = "process", "worker", "host"
SUPERVISOR, SENDER, PUBLISHER = "supervisor", "sender", "publisher"
WORKERS_MIN = 2
SETTLED_SECONDS = 4.0
_START_FIELD = 19
_NOT_MOVING = frozenset("TtZX")
SHORT_SECONDS = (0.05, 0.8)
PAST_LEASE_SECONDS = (LEASE_SECONDS * 1.2, LEASE_SECONDS * 2)

Choice = Callable[[Process], bool]


def _killed(name: str, takes: str | None, weight: float, is_meant: Choice) -> Fault:
    @fault(name, takes=takes, weight=weight)
    def kill(scene: Scene, chance: random.Random) -> str | None:
        target = some(chance, _replaceable(scene, is_meant))
        if target is None or not sent(target.pid, signal.SIGKILL):
            return None
        return f"{told(target)} killed"

    return kill


def _stopped(
    name: str, takes: str, weight: float, seconds: tuple[float, float], is_meant: Choice
) -> Fault:
    @fault(name, takes=takes, weight=weight)
    def stop(scene: Scene, chance: random.Random) -> str | None:
        duration = chance.uniform(*seconds)
        find = _replaceable if seconds is PAST_LEASE_SECONDS else _meant
        target = some(chance, find(scene, is_meant))
        if target is None or not sent(target.pid, signal.SIGSTOP):
            return None
        scene.wait(duration)
        sent(target.pid, signal.SIGCONT)
        return f"{told(target)} stopped for {duration:.2f} s"

    return stop


@fault("supervisor-killed", takes=HOST, weight=0.2)
def supervisor_killed(scene: Scene, chance: random.Random) -> str | None:
    """A supervisor is killed, and its workers notice."""
    spared = _expendable(scene)
    target = some(chance, _meant(scene, lambda one: one.role == SUPERVISOR and one.host in spared))
    if target is None or not sent(target.pid, signal.SIGKILL):
        return None
    return f"{told(target)} killed"


@fault("host-lost", takes=HOST, weight=0.2)
def host_lost(scene: Scene, chance: random.Random) -> str | None:
    """A host loses power."""
    name = some(chance, _expendable(scene))
    if name is None:
        return None
    scene.hosts.lose(name)
    return f"{name} lost"


@fault("host-frozen", takes=HOST, weight=0.7)
def host_frozen(scene: Scene, chance: random.Random) -> str | None:
    """A host stands still, shortly or past its leases, and then goes on as if nothing had been."""
    duration = chance.uniform(*chance.choice((SHORT_SECONDS, PAST_LEASE_SECONDS)))
    name = some(chance, _expendable(scene))
    pids = scene.hosts.freeze(name) if name is not None else []
    if not pids:
        return None
    scene.wait(duration)
    for pid in pids:
        sent(pid, signal.SIGCONT)
    return f"{name} frozen for {duration:.2f} s"


@fault("host-deployed", takes=HOST, weight=0.2)
def host_deployed(scene: Scene, chance: random.Random) -> str | None:
    """A host is stopped in order and started again."""
    name = some(chance, _expendable(scene))
    if name is None:
        return None
    scene.hosts.restart(name)
    return f"{name} deployed anew"


def told(process: Process) -> str:
    """Which one it was."""
    return f"{process.role} {process.pid} on {process.host}"


def sent(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False where the process has ended by itself."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _meant(scene: Scene, is_meant: Choice) -> list[Process]:
    """In an order that depends on who they are, not on when they were started."""
    found = [one for one in scene.hosts.processes() if is_meant(one)]
    return sorted(found, key=lambda one: (one.host, one.role, one.pid))


def _replaceable(scene: Scene, is_meant: Choice) -> list[Process]:
    """Those whose work another is at already; who is the only one must have begun it.

    Otherwise a slow machine would have everybody killed before anybody has done anything.
    """
    by_role: dict[str, list[Process]] = {}
    for one in _meant(scene, is_meant):
        by_role.setdefault(one.role, []).append(one)
    return [
        one
        for of_role in by_role.values()
        for one in of_role
        if any(has_settled(other) for other in of_role if other is not one or len(of_role) == 1)
    ]


def _expendable(scene: Scene) -> list[str]:
    """The hosts without which another one would go on; a new one takes a while to begin."""
    working = Counter(
        one.host
        for one in scene.hosts.processes()
        if one.role not in {SUPERVISOR, SENDER} and has_settled(one)
    )
    whole = {name for name, workers in working.items() if workers >= WORKERS_MIN}
    return sorted(name for name in scene.hosts.host_names() if whole - {name})


def has_settled(process: Process) -> bool:
    """Whether a process moves and is old enough to have begun its work."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    now = float(Path("/proc/uptime").read_text().split()[0])
    age_seconds = now - int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return fields[0] not in _NOT_MOVING and age_seconds >= SETTLED_SECONDS


def _is_worker(process: Process) -> bool:
    return process.role not in {SUPERVISOR, SENDER, PUBLISHER}


def _has_role(role: str) -> Choice:
    return lambda process: process.role == role


FAULTS = (
    _killed("worker-killed", WORKER, 2.0, _is_worker),
    _killed("publisher-killed", PUBLISHER, 1.0, _has_role(PUBLISHER)),
    _killed("sender-killed", None, 0.5, _has_role(SENDER)),
    supervisor_killed,
    _stopped("process-stopped", PROCESS, 4.0, SHORT_SECONDS, lambda _: True),
    _stopped("worker-stopped-past-lease", WORKER, 1.2, PAST_LEASE_SECONDS, _is_worker),
    _stopped(
        "publisher-stopped-past-lease", PUBLISHER, 1.0, PAST_LEASE_SECONDS, _has_role(PUBLISHER)
    ),
    host_lost,
    host_frozen,
    host_deployed,
)
