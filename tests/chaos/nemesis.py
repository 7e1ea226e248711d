"""The nemesis: one seed decides what is hurt, in which order and how; and all of it heals."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.chaos.faults import EVERYTHING, chosen
from tests.chaos.scene import GONE, Chaos, Fault, Scene, mend

GAP_SECONDS = 0.8
GAP_FACTOR_MAX = 4.0
TRIES_MAX = 3
AGAIN_SECONDS = 1.5
WAITING_MAX = 24
NEW_MAX = 4
HEAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Limit:
    """How many faults may have hold of a thing at once, and how long it rests after each."""

    at_once: int = 1
    rest_seconds: float = 0.0


LIMITS: Mapping[str, Limit] = {
    # Without PostgreSQL nothing moves at all: it is there for longer than it is away.
    "postgres": Limit(rest_seconds=1.5),
    "redis": Limit(rest_seconds=0.8),
    # One host is always whole, and the lost one is back before the next is hurt.
    "host": Limit(rest_seconds=4.0),
    # There are two publishers, and one of them is to be well again first.
    "publisher": Limit(rest_seconds=2.5),
    "worker": Limit(at_once=2, rest_seconds=0.3),
    "process": Limit(at_once=3),
    "operator": Limit(rest_seconds=1.0),
}
NO_OTHER_OF_ITS_KIND = Limit()


@dataclass(frozen=True, slots=True)
class Step:
    """One fault to be injected: its number and the seed say everything about it."""

    number: int
    fault: Fault
    is_first: bool
    """Whether this is the time that was promised to every kind."""

    def chance(self, seed: int) -> random.Random:
        """What decides targets and durations, the same whenever the step is taken."""
        return random.Random(f"{seed}/{self.number}/{self.fault.name}")  # noqa: S311


@dataclass(frozen=True, slots=True)
class Injury:
    """A fault that has happened; its times are those of the machine's clock."""

    step: int
    kind: str
    text: str
    started_at: float
    healed_at: float


def schedule(faults: Sequence[Fault], seed: int) -> Iterator[Step]:
    """Every kind once, shuffled, and then by weight for ever."""
    chance = random.Random(seed)  # noqa: S311 - reproducible, not secret
    first = list(faults)
    chance.shuffle(first)
    for number in itertools.count():
        if number < len(first):
            yield Step(number, first[number], is_first=True)
        else:
            weights = [fault.weight for fault in faults]
            (fault,) = chance.choices(faults, weights)
            yield Step(number, fault, is_first=False)


class Gate:
    """Who may begin: bounded overlap, and rest in between."""

    def __init__(self, limits: Mapping[str, Limit] = LIMITS) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()
        self._free_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def enter(self, thing: str | None, now: float) -> bool:
        """Take hold of a thing; False where it is not free, or still rests."""
        if thing is None:
            return True
        limit = self._limits.get(thing, NO_OTHER_OF_ITS_KIND)
        with self._lock:
            if self._held[thing] >= limit.at_once or now < self._free_at.get(thing, now):
                return False
            self._held[thing] += 1
            return True

    def leave(self, thing: str | None, now: float, *, has_hurt: bool) -> None:
        """Let go of it; where nothing happened there is nothing to rest from."""
        if thing is None:
            return
        with self._lock:
            self._held[thing] -= 1
            if has_hurt:
                rest = self._limits.get(thing, NO_OTHER_OF_ITS_KIND).rest_seconds
                self._free_at[thing] = now + rest


class Nemesis:
    """Injects faults until it is stopped; the same seed means the same faults.

    A step that cannot begin, since its like is under way, waits for its turn; one whose target
    was gone is tried again. So order and moments depend on the machine, but not what is done.
    """

    def __init__(
        self,
        chaos: Chaos,
        *,
        seed: int,
        profile: str = EVERYTHING,
        gap_seconds: float = GAP_SECONDS,
        later: Mapping[str, float] | None = None,
    ) -> None:
        """`later` has kinds that do not happen before so many seconds have passed."""
        now = time.monotonic()
        self._not_before = {kind: now + seconds for kind, seconds in (later or {}).items()}
        self._scene = Scene(chaos.world, chaos.hosts)
        self._seed = seed
        self._gap_seconds = gap_seconds
        faults = chosen(profile)
        reasons = {fault.name: fault.why_not(self._scene) for fault in faults}
        self.unavailable = {name: reason for name, reason in reasons.items() if reason}
        """The kinds that this machine does not have, and why."""
        self.kinds = [fault.name for fault in faults if fault.name not in self.unavailable]
        self._steps = schedule([one for one in faults if one.name in self.kinds], seed)
        self._gate = Gate()
        self._waiting: list[tuple[float, Step]] = []
        self._tries: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._history: list[Injury] = []
        self._under_way: dict[int, tuple[threading.Thread, Step]] = {}
        self._thread = threading.Thread(target=self._run, name="nemesis", daemon=True)
        self.missed: Counter[str] = Counter()
        """Steps that were given up, because their targets were gone again and again."""
        self._errors: list[BaseException] = []

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ── what has happened ─────────────────────────────────────────────────────────────────────

    @property
    def history(self) -> list[Injury]:
        """Everything that really happened and has healed, in the order of its healing."""
        with self._lock:
            return list(self._history)

    def counts(self) -> Counter[str]:
        """How often each kind has happened."""
        return Counter(injury.kind for injury in self.history)

    @property
    def never_happened(self) -> list[str]:
        """The kinds that this machine has and that have not happened."""
        counts = self.counts()
        return [name for name in self.kinds if not counts[name]]

    # ── running ───────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Begin, in a thread."""
        if self.kinds:
            self._thread.start()

    def stop(self, seconds: float = HEAL_SECONDS) -> None:
        """No more faults; returns when all have healed, and raises what went wrong inside one."""
        self._scene.calm.set()
        deadline = time.monotonic() + seconds
        if self._thread.is_alive():
            self._thread.join(seconds)
        for thread, step in self._snapshot():
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{step.fault.name} did not heal in {seconds:g} s"
        mend(self._scene.world.heal, what="all servers are well")
        if self._errors:
            raise self._errors[0]

    def step(self) -> None:
        """Begin the next fault that may begin now, and one that has been waiting."""
        for find in (self._next_waiting, self._next_new):
            with self._lock:
                step = find(time.monotonic())
            if step is not None:
                self._begin(step)

    def _begin(self, step: Step) -> None:
        thread = threading.Thread(
            target=self._inject, args=(step,), name=step.fault.name, daemon=True
        )
        with self._lock:
            self._under_way[step.number] = (thread, step)
        thread.start()

    def _run(self) -> None:
        # Of its own: gaps must not depend on how many steps had to wait.
        chance = random.Random(f"{self._seed}/gaps")  # noqa: S311
        gap = 0.0
        while not self._scene.calm.wait(gap):
            self.step()
            wanted = chance.expovariate(1 / self._gap_seconds)
            gap = min(wanted, self._gap_seconds * GAP_FACTOR_MAX)

    def _next_waiting(self, now: float) -> Step | None:
        for waiting in self._waiting:
            not_before, step = waiting
            if not_before <= now and self._gate.enter(step.fault.takes, now):
                self._waiting.remove(waiting)
                return step
        return None

    def _next_new(self, now: float) -> Step | None:
        for step in itertools.islice(self._steps, NEW_MAX):
            not_before = self._not_before.get(step.fault.name, now)
            if not_before <= now and self._gate.enter(step.fault.takes, now):
                return step
            self._postpone(step, not_before)
        return None

    def _postpone(self, step: Step, not_before: float) -> None:
        if step.is_first or len(self._waiting) < WAITING_MAX:
            self._waiting.append((not_before, step))
        else:
            self.missed[step.fault.name] += 1

    def _inject(self, step: Step) -> None:
        started_at = time.time()
        text: str | None = None
        try:
            text = step.fault.inject(self._scene, step.chance(self._seed))
        except GONE:
            text = None
        except BaseException as error:  # noqa: BLE001 - told by stop()
            self._errors.append(error)
        finally:
            self._gate.leave(step.fault.takes, time.monotonic(), has_hurt=text is not None)
            with self._lock:
                self._under_way.pop(step.number)
                if text is not None:
                    self._history.append(
                        Injury(step.number, step.fault.name, text, started_at, time.time())
                    )
                else:
                    self._try_again(step)

    def _try_again(self, step: Step) -> None:
        self._tries[step.number] += 1
        if self._tries[step.number] < TRIES_MAX or step.is_first:
            # Not at once: what is gone for long would keep all others waiting.
            self._postpone(step, time.monotonic() + AGAIN_SECONDS)
        else:
            self.missed[step.fault.name] += 1

    def _snapshot(self) -> list[tuple[threading.Thread, Step]]:
        with self._lock:
            return list(self._under_way.values())
