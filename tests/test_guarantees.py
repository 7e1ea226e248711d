"""What each guarantee means at each point where a process may die: the table of GUARANTEES.md."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.bench_of_one import Workbench
from tests.guarantee_app import TABLES, build_pipeline
from tests.line import ROOT, Worker
from tests.test_seams import working
from tests.waiting import wait_until

EVENTS = 10


def _calls(twice: Iterable[int] = (), never: Iterable[int] = ()) -> dict[int, int]:
    counts = dict.fromkeys(range(1, EVENTS + 1), 1)
    return {**counts, **dict.fromkeys(twice, 2), **dict.fromkeys(never, 0)}


@dataclass(frozen=True)
class Row:
    """One row: where a process that has read events 1 to 5 as a batch dies, and what is seen."""

    consumer: str
    point: str
    failpoint: str
    seen: str
    calls: dict[int, int]

    def __str__(self) -> str:
        return f"{self.consumer}-{self.failpoint}"


EXACTLY, AT_LEAST, COMPLETED, AT_MOST = (
    "exactly_once",
    "at_least_once",
    "completed",
    "at_most_once",
)
NAMES = {
    EXACTLY: "`EXACTLY_ONCE`",
    AT_LEAST: "`AT_LEAST_ONCE`",
    COMPLETED: "`AT_LEAST_ONCE` with `complete()`",
    AT_MOST: "`AT_MOST_ONCE`",
}
ONCE = "every event called once"
ROWS = [
    Row(EXACTLY, "after reading", "BatchRead:kill", f"{ONCE}; effects once", _calls()),
    Row(EXACTLY, "claimed, not handled", "BatchClaimed:kill", f"{ONCE}; effects once", _calls()),
    Row(
        EXACTLY,
        "three of five handled",
        "EventHandled:kill:3",
        "1 to 3 called twice; effects once",
        _calls(twice=[1, 2, 3]),
    ),
    Row(
        EXACTLY,
        "all handled, not committed",
        "BatchSealed:kill",
        "1 to 5 called twice; effects once",
        _calls(twice=[1, 2, 3, 4, 5]),
    ),
    Row(EXACTLY, "committed", "BatchCommitted:kill", f"{ONCE}; effects once", _calls()),
    Row(AT_LEAST, "after reading", "BatchRead:kill", ONCE, _calls()),
    Row(
        AT_LEAST,
        "three of five handled",
        "EventHandled:kill:3",
        "1 to 3 called twice",
        _calls(twice=[1, 2, 3]),
    ),
    Row(
        AT_LEAST,
        "all handled, not claimed",
        "BatchClaimed:kill",
        "1 to 5 called twice",
        _calls(twice=[1, 2, 3, 4, 5]),
    ),
    Row(
        AT_LEAST,
        "all handled, not committed",
        "BatchSealed:kill",
        "1 to 5 called twice",
        _calls(twice=[1, 2, 3, 4, 5]),
    ),
    Row(AT_LEAST, "committed", "BatchCommitted:kill", ONCE, _calls()),
    Row(
        COMPLETED,
        "the third called, its `complete()` begun",
        "BatchClaimed:kill:3",
        "3 called twice; effects once",
        _calls(twice=[3]),
    ),
    Row(
        COMPLETED,
        "its `complete()` not committed",
        "BatchSealed:kill:3",
        "3 called twice; effects once",
        _calls(twice=[3]),
    ),
    Row(
        COMPLETED,
        "its `complete()` committed",
        "BatchCommitted:kill:3",
        f"{ONCE}; effects once",
        _calls(),
    ),
    Row(AT_MOST, "after reading", "BatchRead:kill", ONCE, _calls()),
    Row(AT_MOST, "claimed, not committed", "BatchSealed:kill", ONCE, _calls()),
    Row(
        AT_MOST,
        "committed, not handled",
        "BatchCommitted:kill",
        "1 to 5 never called",
        _calls(never=[1, 2, 3, 4, 5]),
    ),
    Row(
        AT_MOST,
        "three of five handled",
        "EventHandled:kill:3",
        "4 and 5 never called",
        _calls(never=[4, 5]),
    ),
]
TELLING = (
    "exactly_once-EventHandled:kill:3",
    "exactly_once-BatchSealed:kill",
    "at_least_once-EventHandled:kill:3",
    "completed-BatchSealed:kill:3",
    "at_most_once-BatchCommitted:kill",
)
"""One row of each kind, for every run."""


@pytest.fixture
def bench(database_url: str, redis_url: str) -> Workbench:
    bench = Workbench(database_url, redis_url)
    bench.connection.execute(TABLES)
    bench.connection.execute(
        "SELECT events.send('counts', 'counted', jsonb_build_object('number', n))"
        "  FROM generate_series(1, %s) AS n",
        (EVENTS,),
    )
    bench.publish()
    return bench


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [row if str(row) in TELLING else pytest.param(row, marks=pytest.mark.long) for row in ROWS],
    ids=str,
)
def test_a_crash_leaves_what_the_table_says(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    database_url, redis_url = bench.settings.database_url, bench.settings.redis_url
    assert redis_url is not None
    calls = tmp_path / "calls"
    calls.touch()
    environment = {
        "PENSTOCK_DATABASE_URL": database_url,
        "PENSTOCK_REDIS_URL": redis_url,
        "CALLS": str(calls),
    }
    command = [
        *(sys.executable, "-m", "penstock", "--app", "tests.guarantee_app:pipeline"),
        *("work", "--role", f"consumer:{row.consumer}"),
    ]

    def settled() -> int:
        found = bench.connection.execute("SELECT count(*) FROM events.processed_event").fetchone()
        assert found is not None
        return int(found[0])

    victim = Worker(
        command, {**environment, "PENSTOCK_FAILPOINT": row.failpoint}, tmp_path / "victim"
    )
    try:
        victim.wait_until_dead()
        assert victim.was_killed, victim.tail()
    finally:
        victim.end()
    monkeypatch.setenv("CALLS", str(calls))
    successor = build_pipeline(database_url=database_url, redis_url=redis_url)
    with working(successor, f"consumer:{row.consumer}"):
        wait_until(lambda: settled() == EVENTS, what=lambda: f"settled {settled()}")
    counted = Counter(map(int, calls.read_text().split()))
    assert {n: counted[n] for n in range(1, EVENTS + 1)} == row.calls
    if "effects once" in row.seen:
        effects = bench.rows("SELECT number FROM effect ORDER BY number")
        assert effects == list(range(1, EVENTS + 1))
    bench.close()


def test_the_table_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "GUARANTEES.md").read_text()
    missing = [
        line
        for row in ROWS
        if (line := f"| {NAMES[row.consumer]} | {row.point} | {row.seen} |") not in text
    ]
    assert missing == []
