"""How a consumer's keys are split into lanes, and lanes shared out among workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b


def key_hash(key: str | None, event_uuid: str) -> int:
    """A number for a key, the same on every host and for ever; an event without one is its own."""
    digest = blake2b((event_uuid if key is None else key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def lane_of(key: str | None, event_uuid: str, lanes: int) -> int:
    """The lane that handles an event; all events of a key have the same."""
    return 0 if lanes == 1 else key_hash(key, event_uuid) % lanes


@dataclass(frozen=True, slots=True)
class LaneView:
    """A consumer as all its workers see it at one moment."""

    lanes: int
    epoch: int
    is_paused: bool
    workers: frozenset[str]
    holders: tuple[str | None, ...]
    """The worker that holds each lane; None: nobody does."""
    next_end_seconds: float | None = None
    """When the first lease of another worker runs out, unless it is renewed."""


def lanes_for(view: LaneView, worker: str) -> set[int]:
    """The lanes that a worker should hold: those it has, up to its share, then free ones."""
    if view.is_paused:
        return set()
    counts = Counter(view.holders)
    held = {name: counts[name] for name in view.workers | {worker}}
    share = fair_share(view.lanes, held, worker)
    ours = [lane for lane, holder in enumerate(view.holders) if holder == worker]
    free = [lane for lane, holder in enumerate(view.holders) if holder is None]
    # Everybody begins at another place, so that not all run after the same lane.
    free.sort(key=lambda lane: key_hash(worker, "") ^ key_hash(str(lane), ""))
    return set((ours + free)[:share])


def fair_share(lanes: int, held: Mapping[str, int], worker: str) -> int:
    """How many lanes a worker should hold, given how many each living worker holds now.

    All workers come to the same shares. What cannot be divided goes to those that hold most
    already, so that no lane moves without need.
    """
    base, rest = divmod(lanes, len(held))
    ranking = sorted(held, key=lambda name: (-held[name], name))
    return base + (ranking.index(worker) < rest)
