"""Random histories over models of the stores keep every promise, and bugs on purpose are found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.isolation import Batch, isolate
from penstock.core.mac import MacKeys
from penstock.core.wire import Entry, decode_body, encode_entry
from penstock.pipeline.reader import TierReader
from tests.simulation.cooperation import present
from tests.simulation.history import run_history
from tests.simulation.hot_log import HotServer, ModelHotLog
from tests.simulation.machine import Machine
from tests.simulation.mutants import MUTANTS
from tests.simulation.run import Report, simulate, simulate_some, trace
from tests.simulation.world import KEYS, models_in_place

HISTORIES = 250
HISTORIES_UNTIL_FOUND = 3_000
FAULTS_PER_HISTORY_MIN = 12
RARE = (
    "fence that lets everybody pass",
    "numbering without a lock",
    "epoch that starts at the highest checkpoint",
    "survey that asks nobody",
)
"""Bugs that only one history in a hundred runs into, or fewer."""


@pytest.fixture
def in_place() -> Iterator[None]:
    gc.disable()
    with models_in_place():
        yield
    gc.enable()


def test_every_promise_is_kept_in_every_history() -> None:
    report = simulate_some(0, HISTORIES)
    assert not report.violating, "\n".join(report.lines())
    assert report.faults.total() > HISTORIES * FAULTS_PER_HISTORY_MIN


@pytest.mark.long
def test_every_promise_is_kept_in_many_histories_on_all_cores() -> None:
    report = simulate(1_000_000, 10_000)
    assert not report.violating, "\n".join(report.lines())


@pytest.mark.parametrize(
    "name", [pytest.param(m, marks=pytest.mark.long) if m in RARE else m for m in MUTANTS]
)
@pytest.mark.usefixtures("in_place")
def test_a_bug_on_purpose_is_found(name: str) -> None:
    with MUTANTS[name]():
        assert any(run_history(seed).violations for seed in range(HISTORIES_UNTIL_FOUND))


def test_a_seed_gives_the_same_history_every_time() -> None:
    told: list[list[str]] = [[], []]
    first, second = (trace(7, lines.append) for lines in told)
    assert first == second
    assert len(told[0]) == len(told[1]) > 100


def test_a_report_tells_how_to_see_a_violation() -> None:
    report = Report()
    with MUTANTS["effects in a transaction of their own"](), models_in_place():
        report.add(next(o for o in map(run_history, range(1000)) if o.violations))
    (seed,) = report.violations
    assert f"--trace {seed}" in "\n".join(report.lines())


# ── shapes that are easier to understand when they are small ───────────────────────────────────

STREAM, ORIGIN = "orders", "11111111-1111-1111-1111-111111111111"
HEAD = 6


def body(position: int) -> str:
    uuid = f"00000000-0000-7000-8000-{position:012x}"
    return f"event\n{ORIGIN}\n1\n{position}\n{uuid}\nT\n1\n\n0\nnull\n{{}}\n{position}"


def signed(position: int, place: int, keys: MacKeys = KEYS.own) -> bytes:
    return encode_entry(STREAM, place, body(position), keys)


@dataclass(frozen=True)
class Warm:
    """The outbox of a stream with six events."""

    def origin(self) -> str:
        return ORIGIN

    def keys(self) -> MacKeys:
        return KEYS.own

    def keys_seen(self) -> MacKeys:
        return KEYS.own

    def head(self) -> int:
        return HEAD

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        return [(place, body(place)) for place in range(after + 1, HEAD + 1)][:count]


places = st.integers(1, HEAD + 3)
raw_entries = st.one_of(
    st.builds(lambda position: signed(position, position), st.integers(1, HEAD)),
    st.builds(signed, st.integers(1, HEAD), places, st.just(KEYS.forged)),
    st.binary(max_size=20),
)
# An entry where it belongs is what a log holds, most of the time.
hot_logs = st.dictionaries(
    st.tuples(places, st.sampled_from((0, 0, 0, 0, 1))), st.one_of(st.none(), raw_entries)
)


@given(hot=hot_logs, count=st.integers(1, 4))
@pytest.mark.usefixtures("in_place")
def test_a_reader_gives_the_events_whatever_the_hot_log_holds(
    hot: dict[tuple[int, int], bytes | None], count: int
) -> None:
    present.machine = Machine(0)
    server = HotServer(present.machine)
    for (place, sequence), raw in sorted(hot.items(), key=lambda item: item[0]):
        entry = signed(place, place) if raw is None and place <= HEAD else raw or b""
        server.add((place, sequence), entry)
    found: list[Entry] = []
    reader = TierReader("c", STREAM, ModelHotLog(server), Warm())
    after = 0
    for _ in range(4 * HEAD):
        # Where the log ends too early, the reader waits a little before it asks PostgreSQL.
        server.machine.now += 2.0
        stretch = reader.read(after=after, count=count, wait_seconds=0.0)
        found += stretch.entries
        after = stretch.through
    assert found == [entry_at(place) for place in range(1, HEAD + 1)]


def entry_at(position: int) -> Entry:
    return decode_body(STREAM, position, body(position).encode())


@given(
    taken=st.sets(st.integers(1, 12), min_size=1),
    beyond=st.integers(0, 3),
    culprit_index=st.one_of(st.none(), st.integers(0, 11)),
    is_careful=st.booleans(),
)
def test_a_failed_batch_is_taken_apart_without_losing_anything(
    taken: set[int], beyond: int, culprit_index: int | None, is_careful: bool
) -> None:
    entries = tuple(map(entry_at, sorted(taken)))
    batch = Batch(entries, entries[-1].position + beyond, is_careful=is_careful)
    culprit = None
    if culprit_index is not None:
        culprit = entries[culprit_index % len(entries)].position
    parts = isolate(batch, culprit)
    assert [entry for part in parts for entry in part.entries] == list(entries)
    assert parts[-1].through == batch.through
    for part, following in pairwise(parts):
        assert part.entries[-1].position <= part.through < following.first
    if culprit is not None:
        assert any([e.position for e in part.entries] == [culprit] for part in parts)
