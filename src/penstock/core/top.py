"""What a live view shows, decided without a terminal: rates, sparklines, order, keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Final

HISTORY_MAX: Final = 120
"""How many samples of a number are kept for its sparkline."""
LATE_MS: Final = 60_000
BARS: Final = "▁▂▃▄▅▆▇█"
ASCII_BARS: Final = "_.-:=+*#"


# ── numbers over time ──────────────────────────────────────────────────────────────────────────


class Tracks:
    """How numbers that have names moved lately; forgets names that are no longer told."""

    def __init__(self) -> None:
        self._samples: dict[str, deque[tuple[float, int]]] = {}

    def observe(self, at_seconds: float, values: Mapping[str, int]) -> None:
        """Take in the numbers of one moment, by a clock that never goes back."""
        kept: dict[str, deque[tuple[float, int]]] = {}
        for name, value in values.items():
            kept[name] = self._samples.get(name) or deque(maxlen=HISTORY_MAX)
            kept[name].append((at_seconds, value))
        self._samples = kept

    def rate(self, name: str) -> float | None:
        """The growth per second between the last two samples; None: one of them, or it fell."""
        samples = self._samples.get(name)
        if samples is None or len(samples) < 2:
            return None
        (before_at, before), (after_at, after) = samples[-2], samples[-1]
        seconds = after_at - before_at
        return (after - before) / seconds if seconds > 0 and after >= before else None

    def history(self, name: str) -> tuple[int, ...]:
        """The samples that are kept, the newest last."""
        return tuple(value for _, value in self._samples.get(name, ()))


def sparkline(values: Sequence[int], width: int, bars: str = BARS) -> str:
    """The last values as bars, the highest one full; zero is a space, more than zero never is."""
    shown = values[-width:]
    highest = max(shown, default=0)
    if highest <= 0:
        return ""
    return "".join(
        " " if value <= 0 else bars[(value * len(bars) - 1) // highest] for value in shown
    )


# ── what comes first ───────────────────────────────────────────────────────────────────────────


class Trouble(IntEnum):
    """What is the matter with a consumer, the worst first."""

    QUARANTINED = 0
    UNSERVED = 1
    """Events wait, and nobody works on them."""
    HELD = 2
    """Keys wait for an operator."""
    LATE = 3
    PARKED = 4
    PAUSED = 5
    DEAD = 6
    """Nothing but dead letters, which may be old."""
    NONE = 7


def trouble_of(
    *,
    is_quarantined: bool,
    is_paused: bool,
    is_served: bool,
    lag_events: int,
    lag_ms: int,
    held_keys: int,
    parked_keys: int,
    dead_letters: int,
) -> Trouble:
    """The worst of what is the matter. A pause explains a lag, and nothing else."""
    claims = (
        (Trouble.QUARANTINED, is_quarantined),
        (Trouble.UNSERVED, lag_events > 0 and not is_served and not is_paused),
        (Trouble.HELD, held_keys > 0),
        (Trouble.LATE, lag_ms > LATE_MS and not is_paused),
        (Trouble.PARKED, parked_keys > 0),
        (Trouble.PAUSED, is_paused),
        (Trouble.DEAD, dead_letters > 0),
    )
    return min((trouble for trouble, holds in claims if holds), default=Trouble.NONE)


def share(
    rows: int, wanted: Sequence[int], least: Sequence[int], *, overhead: int = 0
) -> list[int]:
    """Divide the rows of a screen: first everybody's least, then all to the first that want more.

    Every section that has rows costs an overhead. Where the room is short the last sections go
    without, and the very first one takes what there is.
    """
    few = [min(want, floor) for want, floor in zip(wanted, least, strict=True)]
    shown = len(few)
    while shown > 1 and _cost(few[:shown], overhead) > rows:
        shown -= 1
    given = few[:shown] + [0] * (len(few) - shown)
    left = rows - _cost(given, overhead)
    for index in range(shown):
        # Negative only for a first section that has too little room already.
        given[index] += max(-given[index], min(wanted[index] - given[index], left))
        left = max(0, rows - _cost(given, overhead))
    return given


def _cost(given: Sequence[int], overhead: int) -> int:
    return sum(count + overhead for count in given if count)


def window(count: int, height: int, selected: int) -> range:
    """Which of so many rows are seen, so that the selected one is, near the middle."""
    first = max(0, min(selected - height // 2, count - height))
    return range(first, min(count, first + max(height, 0)))


# ── keys ───────────────────────────────────────────────────────────────────────────────────────


class Page(StrEnum):
    """What fills the screen."""

    OVERVIEW = "overview"
    LETTER = "letter"
    HELP = "help"


class Verb(StrEnum):
    """What a key asks for beyond the screen."""

    PAUSE = "pause"
    RESUME = "resume"
    OPEN = "open"
    QUIT = "quit"


@dataclass(frozen=True, slots=True)
class Action:
    """Something to do, and to which consumer."""

    verb: Verb
    consumer: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Where somebody is on the screen."""

    page: Page = Page.OVERVIEW
    selected: str | None = None
    asking: Action | None = None
    """What waits for a yes."""
    scroll: int = 0
    said: str = ""
    """The answer to the last action."""


STEPS: Final = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}
OPENING: Final = frozenset({"enter", "d"})
LEAVING: Final = frozenset({"b", "escape", "left"})


def press(view: View, key: str, consumers: Sequence[str]) -> tuple[View, Action | None]:
    """What a key does: where that leads, and what is to be done, if anything is."""
    if view.asking is not None:
        return _answer(view, key)
    if key == "q":
        return view, Action(Verb.QUIT)
    if view.page is not Page.OVERVIEW:
        return _turn(view, key), None
    return _choose(replace(view, said=""), key, consumers)


def _answer(view: View, key: str) -> tuple[View, Action | None]:
    # Whatever is not a yes is a no: a slip of the finger must not stop a consumer.
    if key in {"y", "Y"}:
        return replace(view, asking=None), view.asking
    return replace(view, asking=None, said="Nothing was changed."), None


def _turn(view: View, key: str) -> View:
    if key in LEAVING or (view.page is Page.HELP and key in {"?", "enter"}):
        return replace(view, page=Page.OVERVIEW, scroll=0)
    return replace(view, scroll=max(0, view.scroll + STEPS.get(key, 0)))


def _choose(view: View, key: str, consumers: Sequence[str]) -> tuple[View, Action | None]:
    if key == "?":
        return replace(view, page=Page.HELP, scroll=0), None
    selected = selected_of(view, consumers)
    if selected is None:
        return view, None
    if key in STEPS:
        place = consumers.index(selected) + STEPS[key]
        chosen = consumers[max(0, min(len(consumers) - 1, place))]
        return replace(view, selected=chosen), None
    # From here on the consumer is meant by name, whatever is sorted above it meanwhile.
    view = replace(view, selected=selected)
    if key == "p":
        return replace(view, asking=Action(Verb.PAUSE, selected)), None
    if key == "r":
        return replace(view, asking=Action(Verb.RESUME, selected)), None
    return view, Action(Verb.OPEN, selected) if key in OPENING else None


def selected_of(view: View, consumers: Sequence[str]) -> str | None:
    """The consumer that keys are about: the chosen one, or the first while it is there."""
    if view.selected in consumers:
        return view.selected
    return consumers[0] if consumers else None


def compact(number: float) -> str:
    """A number in at most six characters."""
    if number < 100_000:
        return f"{number:,.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"
    for limit, divisor, unit in ((1e6, 1e3, "k"), (1e9, 1e6, "M"), (1e12, 1e9, "G")):
        if number < limit:
            scaled = number / divisor
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0e}"


def by_trouble(named: Iterable[tuple[Trouble, str]]) -> list[str]:
    """Names in the order of their trouble; among equals by name, so that rows stay in place."""
    return [name for _, name in sorted(named)]
