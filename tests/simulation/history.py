"""One history: a line under faults, then healed, then held against its promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from penstock.errors import FatalError
from tests.simulation import operators
from tests.simulation.faults import DECK, end_worker
from tests.simulation.handling import Conduct
from tests.simulation.past import begin
from tests.simulation.promises import Promises
from tests.simulation.rows import OutboxRow
from tests.simulation.shapes import draw
from tests.simulation.world import World

TURNS_MIN, TURNS_MAX = 16, 34
FAULT_SHARE = 0.55
SECOND_FAULT_SHARE = 0.3
SEND_SHARE = 0.2
CONDUCT_SHARE = 0.4
LATE_SHARE = 0.3
CATCH_UP_SHARE = 0.1
REPAIR_SHARE = 0.5
# Most bugs are in one half of a line, and a half is quicker to try.
QUIET_TURNS = 30
CONSUMERS_ALONE_SHARE = 0.45
PUBLISHERS_ALONE_SHARE = 0.2
HEALING_TURNS_MAX = 3000
# Without faults there is less to interrupt, and less to wait for.
HEALING_SWITCH_SHARE = 0.15
HEALING_TURN_SECONDS = 0.01
CHECK_EVERY_TURNS = 4
KEYS = (None, "a", "b")


@dataclass(slots=True)
class Outcome:
    """What a history came to."""

    seed: int
    violations: list[str]
    faults: dict[str, int]
    turns: int
    events: int


class Senders:
    """Applications that send: ids are drawn under a lock on the key, commits come later."""

    def __init__(self, world: World, events: int) -> None:
        self._world = world
        self._left = events
        self._open: list[list[OutboxRow]] = []
        self._numbers: dict[str | None, int] = {}
        self._born = 0
        world.at_fail_over.append(self._open.clear)

    def past(self, count: int) -> list[OutboxRow]:
        """What was sent before the history begins."""
        self._left -= min(count, self._left)
        rows = [self._row(KEYS[int(self._world.machine.dice() * len(KEYS))]) for _ in range(count)]
        self._give_conduct(rows)
        return rows

    def step(self) -> None:
        """Begin a transaction, or decide on one."""
        dice = self._world.machine.dice
        if self._open and (dice() < 0.6 or not self._left):
            rows = self._open.pop(int(dice() * len(self._open)))
            if dice() < 0.95:
                self._world.database.send(rows)
        elif self._left:
            self._begin()

    def _begin(self) -> None:
        dice = self._world.machine.dice
        locked = {row.key for rows in self._open for row in rows if row.key is not None}
        free = [key for key in KEYS if key not in locked]
        rows = []
        for _ in range(1 + int(dice() * 3)):
            if self._left:
                self._left -= 1
                rows.append(self._row(free[int(dice() * len(free))]))
        self._give_conduct(rows)
        self._open.append(rows)

    def _give_conduct(self, rows: list[OutboxRow]) -> None:
        world = self._world
        for row in rows:
            if world.machine.dice() < CONDUCT_SHARE:
                world.conduct[row.event_uuid] = self._conduct()

    def _row(self, key: str | None) -> OutboxRow:
        database = self._world.database
        row_id = database.next_id
        database.next_id += 1
        number = self._numbers[key] = self._numbers.get(key, 0) + 1
        self._born += 1
        return OutboxRow(row_id, f"00000000-0000-7000-8000-{self._born:012x}", key, number)

    def _conduct(self) -> Conduct:
        dice = self._world.machine.dice
        kind = dice()
        if kind < 0.05:
            return Conduct(is_deadly=True)
        if kind < 0.2:
            return Conduct(9, FatalError)
        error = psycopg.DataError if kind < 0.4 else ValueError
        return Conduct(1 + int(dice() * 4), error, is_late=dice() < LATE_SHARE)

    def finish(self) -> None:
        """Decide on everything that was begun."""
        self._left = 0
        while self._open:
            self.step()


def run_history(seed: int, tell: Callable[[str], None] | None = None) -> Outcome:
    """A history from its seed; the models have to be in place."""
    world = World(seed)
    machine = world.machine
    machine.tell = tell
    dice = machine.dice
    world.shape = draw(dice)
    promises = Promises(world)
    senders = _prepare(world)
    turns = TURNS_MIN + int(dice() * (TURNS_MAX - TURNS_MIN))
    for _ in range(turns):
        if dice() < FAULT_SHARE:
            _strike(world)
            if dice() < SECOND_FAULT_SHARE:
                _strike(world)
        if dice() < SEND_SHARE:
            senders.step()
        if world.may_lose_commits and dice() < CATCH_UP_SHARE:
            world.standby = world.database.snapshot()
        if machine.deaths != world.deaths_seen:
            world.supervise()
        machine.turn()
    promises.check_checkpoints()
    senders.finish()
    turns += _heal(world, promises)
    promises.check_end()
    if world.wire.losses or world.hot.losses:
        world.faults["lost connection"] = world.wire.losses + world.hot.losses
    machine.end()
    return Outcome(seed, machine.violations, world.faults, turns, len(world.database.outbox))


def _prepare(world: World) -> Senders:
    """Decide what kind of line it is, and start its workers."""
    dice = world.machine.dice
    world.may_lose_commits = dice() < 0.1
    if dice() < 0.4:
        world.wire.loss_share = world.hot.loss_share = 0.02
    events = 2 + int(dice() * 6)
    senders = Senders(world, events)
    kind = dice()
    if world.shape.is_quiet:
        begin(world, senders.past(1))
    elif kind < CONSUMERS_ALONE_SHARE:
        world.roles = ("consumer",)
        begin(world, senders.past(events))
    else:
        if kind > 1 - PUBLISHERS_ALONE_SHARE:
            world.roles = ("publisher",)
        begin(world, senders.past(int(dice() * 4)))
        senders.step()
    for role in world.roles:
        world.start_worker(role)
    for _ in range(QUIET_TURNS if world.shape.is_quiet else 0):
        world.machine.turn()
    if world.shape.has_operator:
        operators.begin(world)
    return senders


def _strike(world: World) -> None:
    fault = DECK[int(world.machine.dice() * len(DECK))]
    if fault(world):
        world.note_fault(fault.__name__)


def _heal(world: World, promises: Promises) -> int:
    """No more faults: whoever is left, or healthy ones alone, go on until all is done."""
    machine = world.machine
    machine.note("HEALING")
    world.wire.loss_share = world.hot.loss_share = 0.0
    machine.switch_share, machine.turn_seconds = HEALING_SWITCH_SHARE, HEALING_TURN_SECONDS
    world.hot.is_away = world.database.is_paused = False
    if machine.dice() < REPAIR_SHARE:
        # Somebody has repaired the handlers, too.
        world.conduct.clear()
    kind = machine.dice()
    for worker in world.alive():
        worker.process.paused_until = 0.0
        if kind < 0.2:
            end_worker(world, worker)
    if kind > 0.8:
        world.start_worker()
    for turn in range(HEALING_TURNS_MAX):
        if turn % CHECK_EVERY_TURNS == 0 and (machine.violations or promises.is_done()):
            return turn
        if machine.deaths != world.deaths_seen:
            world.supervise()
        machine.turn()
    return HEALING_TURNS_MAX
