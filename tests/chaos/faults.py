"""Every kind of fault, and the groups of them that directed runs choose from."""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos import (
    clock_faults,
    forgeries,
    network_faults,
    operator_faults,
    postgres_faults,
    process_faults,
    redis_faults,
)
from tests.chaos.scene import Chaos, Fault, Scene

__all__ = ["EVERYTHING", "FAULTS", "PROFILES", "Chaos", "Fault", "Scene", "chosen"]

GROUPS: Mapping[str, tuple[Fault, ...]] = {
    "processes": process_faults.FAULTS,
    "postgres": postgres_faults.FAULTS,
    "redis": redis_faults.FAULTS,
    "network": network_faults.FAULTS,
    "forgeries": forgeries.FAULTS,
    "operators": operator_faults.FAULTS,
    "clocks": clock_faults.FAULTS,
}
FAULTS: Mapping[str, Fault] = {one.name: one for group in GROUPS.values() for one in group}

EVERYTHING = "everything"
PROFILES: Mapping[str, tuple[str, ...]] = {
    EVERYTHING: tuple(FAULTS),
    **{name: tuple(one.name for one in group) for name, group in GROUPS.items()},
    "kills": tuple(name for name in FAULTS if name.endswith(("-killed", "-lost"))),
    "failovers": ("postgres-failed-over", "redis-failed-over", "postgres-crashed"),
    "replies": tuple(name for name in FAULTS if name.endswith(("-reply-lost", "-muted"))),
}
"""Kinds by the name of a profile."""


def chosen(words: str) -> list[Fault]:
    """The faults of a profile, or of several profiles and kinds with commas between them."""
    names: dict[str, None] = {}
    for word in words.split(","):
        if word not in PROFILES and word not in FAULTS:
            known = ", ".join([*PROFILES, *FAULTS])
            raise ValueError(f"{word!r} is neither a profile nor a kind of fault: {known}")
        names |= dict.fromkeys(PROFILES.get(word, (word,)))
    return [FAULTS[name] for name in names]
