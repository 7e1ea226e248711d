"""The nemesis repeats itself from a seed, visits every kind, and never takes everything away."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.chaos.faults import EVERYTHING, FAULTS, PROFILES, chosen
from tests.chaos.nemesis import Gate, Limit, Step, schedule

ALL = list(FAULTS.values())


def drawn(steps: list[Step], seed: int) -> list[tuple[str, float]]:
    return [(step.fault.name, step.chance(seed).random()) for step in steps]


def test_a_seed_says_which_faults_there_are_and_how_they_go() -> None:
    first, second = (list(islice(schedule(ALL, 7), 300)) for _ in range(2))
    assert drawn(first, 7) == drawn(second, 7)
    assert drawn(first, 7) != drawn(list(islice(schedule(ALL, 8), 300)), 8)


def test_every_kind_comes_before_any_comes_twice() -> None:
    round_one = list(islice(schedule(ALL, 3), len(ALL)))
    assert {step.fault.name for step in round_one} == set(FAULTS)
    assert all(step.is_first for step in round_one)


def test_there_are_many_kinds_each_with_a_name_of_its_own() -> None:
    assert len(PROFILES[EVERYTHING]) == len(FAULTS) >= 40
    assert all(one.weight > 0 for one in ALL)


def test_a_profile_is_a_choice_and_choices_add_up() -> None:
    names = [one.name for one in chosen("forgeries,redis-flushed,redis")]
    assert {"id-poisoned", "redis-flushed", "redis-frozen"} <= set(names)
    assert len(names) == len(set(names))
    assert "postgres-crashed" not in names
    with pytest.raises(ValueError, match="neither a profile nor a kind"):
        chosen("everythin")


def test_a_thing_is_hurt_by_so_many_at_once_and_rests_afterwards() -> None:
    gate = Gate({"postgres": Limit(rest_seconds=2.0), "process": Limit(at_once=2)})
    assert gate.enter("postgres", 10.0)
    assert not gate.enter("postgres", 10.0)
    gate.leave("postgres", 11.0, has_hurt=True)
    assert not gate.enter("postgres", 12.9)
    assert gate.enter("postgres", 13.0)
    assert [gate.enter("process", 0.0) for _ in range(3)] == [True, True, False]
    assert gate.enter(None, 0.0)


def test_where_nothing_happened_there_is_no_rest() -> None:
    gate = Gate({"postgres": Limit(rest_seconds=2.0)})
    assert gate.enter("postgres", 10.0)
    gate.leave("postgres", 10.1, has_hurt=False)
    assert gate.enter("postgres", 10.1)
