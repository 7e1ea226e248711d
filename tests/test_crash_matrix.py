"""A part of the crash matrix, another one every day; `make crash-matrix` runs all of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.stores.servers import Servers, running_servers
from tests import crash_matrix
from tests.databases import server_folder

OTHERS_PER_RUN = 2


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    """Embedded in any case: the matrix empties Redis databases."""
    with server_folder() as folder, running_servers(folder, durable=False) as servers:
        yield servers


def test_every_signal_has_a_place_in_the_matrix() -> None:
    assert crash_matrix.unplaced_signals() == []


def test_no_signal_is_both_reachable_and_not() -> None:
    assert not crash_matrix.EMITTERS.keys() & crash_matrix.NOT_REACHABLE.keys()


def test_consecutive_days_go_round_through_all_cases() -> None:
    day = crash_matrix.day_number()
    cases = crash_matrix.all_cases(seed=1)
    chosen = {
        (case.signal, case.role)
        for seed in range(day, day + len(cases) // OTHERS_PER_RUN + 1)
        for case in crash_matrix.choose(cases, seed, OTHERS_PER_RUN)
    }
    assert chosen == {(case.signal, case.role) for case in cases}


def test_the_core_is_in_every_run() -> None:
    chosen = crash_matrix.choose(crash_matrix.all_cases(seed=1), 1, 0)
    assert {case.signal for case in chosen} == set(crash_matrix.CORE)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_process_killed_at_any_signal_costs_nothing_but_time(own_servers: Servers) -> None:
    seed = crash_matrix.day_number()
    cases = crash_matrix.choose(crash_matrix.all_cases(seed), seed, OTHERS_PER_RUN)
    outcomes = list(crash_matrix.run_cases(cases, own_servers))
    results = {outcome.result for outcome in outcomes}
    assert results == {crash_matrix.Result.HIT}, crash_matrix.summary(outcomes)
