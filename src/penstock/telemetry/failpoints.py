"""Crashes a process at a signal, for tests that prove what survives it.

`PENSTOCK_FAILPOINT=BatchAppended:kill:2` kills the process at the second `BatchAppended`. Several
failpoints are separated by commas; each is `Signal:action[:when]`:

- the signal by its name, or `*` for every one;
- `kill` (SIGKILL), `exit` (at once, nothing is cleaned up), `stop` (the whole process stands still
  until somebody continues it) or `raise` (an exception leaves the emitting line, as from a bug);
  of several, as in `kill|stop`, chance chooses one;
- `2` for the second emission, `0.01` for one in a hundred by chance; without it, the first.

`seed=N` makes chance repeatable. `hits=FILE` appends a line to a file before every action, which no
crash takes back. `@FILE` reads all of this from a file, and again when that changes: whoever
writes the file arms and disarms processes while they run.
"""

from __future__ import annotations

import os
import random
import re
import signal as process_signals
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from penstock.core.require import require
from penstock.telemetry.bus import subscribe, subscribe_to_all
from penstock.telemetry.signals import Signal

ENVIRONMENT_NAME = "PENSTOCK_FAILPOINT"
EXIT_CODE = 70
ANY = "*"
LOOK_SECONDS = 0.05
"""How soon a change of the file is noticed."""

_WHEN = re.compile(r"[1-9]\d*|0?\.\d+")


class Action(StrEnum):
    """What happens at a failpoint."""

    KILL = "kill"
    EXIT = "exit"
    STOP = "stop"
    RAISE = "raise"


class FailpointReached(BaseException):
    """What `raise` raises: like a bug, nothing that the line expects or knows how to survive."""


@dataclass(frozen=True, slots=True)
class Failpoint:
    """At which signal, at which emission of it, to do what."""

    signal: str
    actions: tuple[Action, ...]
    nth: int | None = 1
    odds: float = 0.0
    """Where there is no nth: how likely each emission is the one."""

    def __str__(self) -> str:
        when = f"{self.odds:f}" if self.nth is None else str(self.nth)
        return f"{self.signal}:{'|'.join(self.actions)}:{when}"

    def is_now(self, emissions: int, chance: random.Random) -> bool:
        """Whether to act at this emission."""
        return chance.random() < self.odds if self.nth is None else emissions == self.nth


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that the environment or the file says."""

    failpoints: tuple[Failpoint, ...] = ()
    seed: str | None = None
    hits: Path | None = None

    def __str__(self) -> str:
        options = {"seed": self.seed, "hits": self.hits}
        given = [f"{name}={value}" for name, value in options.items() if value is not None]
        return ",".join([*given, *map(str, self.failpoints)])


@dataclass(frozen=True, slots=True)
class Hit:
    """One line of the file of hits."""

    at: float
    """By the clock of the machine, in seconds."""
    pid: int
    signal: str
    action: Action

    def __str__(self) -> str:
        return f"{self.at:.6f} {self.pid} {self.signal} {self.action}"

    @classmethod
    def parse(cls, line: str) -> Hit:
        """What `str` has written."""
        at, pid, signal, action = line.split()
        return cls(float(at), int(pid), signal, Action(action))


def parse(text: str) -> Description:
    """Understand a description. Raises UsageError for anything else."""
    failpoints = []
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if equals and name in ("seed", "hits"):
            options[name] = value
        else:
            failpoints.append(_parse_failpoint(part))
    hits = Path(options["hits"]) if "hits" in options else None
    return Description(tuple(failpoints), options.get("seed"), hits)


def _parse_failpoint(part: str) -> Failpoint:
    name, _, rest = part.partition(":")
    actions, colon, when = rest.partition(":")
    chosen = actions.split("|")
    when = when if colon else "1"
    require(
        (name == ANY or name in Signal.registry)
        and all(action in {*Action} for action in chosen)
        and _WHEN.fullmatch(when) is not None,
        f"{ENVIRONMENT_NAME}={part!r} must be Signal:{'|'.join(Action)}[:nth or odds]",
    )
    is_nth = when.isdigit()
    return Failpoint(
        name,
        tuple(map(Action, chosen)),
        nth=int(when) if is_nth else None,
        odds=0.0 if is_nth else float(when),
    )


class Failpoints:
    """Hears signals and acts where the description says so."""

    def __init__(self, description: Description, source: Path | None = None) -> None:
        self._source = source
        self._version: tuple[int, int] | None = None
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._arm(description)

    def __call__(self, signal: Signal) -> None:
        """Act if this is the one."""
        name = type(signal).__name__
        with self._lock:
            self._refresh()
            action = self._choose(name)
            hits = self._description.hits
        if action is None:
            return
        if hits is not None:
            _append(hits, Hit(time.time(), os.getpid(), name, action))
        _act(action, name)

    def _arm(self, description: Description) -> None:
        self._description = description
        self._emissions: Counter[Failpoint] = Counter()
        seed = description.seed
        # Not the same for all processes, or each would meet its end at the same place.
        self._chance = random.Random(None if seed is None else f"{seed} {os.getpid()}")  # noqa: S311

    def _choose(self, name: str) -> Action | None:
        for failpoint in self._description.failpoints:
            if failpoint.signal in (name, ANY):
                self._emissions[failpoint] += 1
                if failpoint.is_now(self._emissions[failpoint], self._chance):
                    return self._chance.choice(failpoint.actions)
        return None

    def _refresh(self) -> None:
        """Read the file again where it has changed; without one, nothing is armed."""
        now = time.monotonic()
        if self._source is None or now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        try:
            status = self._source.stat()
            version = (status.st_ino, status.st_mtime_ns)
            if version != self._version:
                self._arm(parse(self._source.read_text(encoding="utf-8")))
                self._version = version
        except FileNotFoundError:
            self._version = None
            self._arm(Description())


def install_failpoints(text: str | None) -> None:
    """Arm the failpoints of a description; None or empty arms none."""
    if not text:
        return
    if text.startswith("@"):
        subscribe_to_all(Failpoints(Description(), Path(text[1:])))
        return
    description = parse(text)
    failpoints = Failpoints(description)
    names = {failpoint.signal for failpoint in description.failpoints}
    if ANY in names:
        subscribe_to_all(failpoints)
        return
    for name in names:
        # One by one: a signal that nobody wants is not even built.
        subscribe(Signal.registry[name], failpoints)


def _append(path: Path, hit: Hit) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{hit}\n".encode())
    finally:
        os.close(descriptor)


def _act(action: Action, name: str) -> None:
    # Signals go to this very thread: a stop sent to the process may reach another thread first, and
    # this one would run on for a moment, past the point.
    match action:
        case Action.KILL:
            process_signals.pthread_kill(threading.get_ident(), process_signals.SIGKILL)
        case Action.STOP:
            process_signals.pthread_kill(threading.get_ident(), process_signals.SIGSTOP)
        case Action.EXIT:
            os._exit(EXIT_CODE)
        case Action.RAISE:
            raise FailpointReached(name)
