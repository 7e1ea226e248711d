"""What a lane has read ahead is what it would read now, or it is read again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.errors import PositionMissing
from penstock.pipeline.outlook import Outlook
from penstock.pipeline.window import Scan, StreamWindow

COUNT = 2


class Stream:
    """Positions in place of entries, as far as there are any, and who asked for them."""

    def __init__(self, head: int) -> None:
        self.head = head
        self.asked: list[int] = []
        self.missing: int | None = None
        self.near_from = 0

    def is_near(self, after: int) -> bool:
        return after + 1 >= self.near_from

    def read(self, _lane: int, *, after: int, count: int, **_: float) -> Scan:
        self.asked.append(after)
        if after + 1 == self.missing:
            raise PositionMissing("it is in no tier")
        entries = list(range(after + 1, min(after + count, self.head) + 1))
        return Scan(cast("Any", entries), after + len(entries))


def outlook_on(stream: Stream, count: int = COUNT) -> Outlook:
    return Outlook(cast("StreamWindow", stream), 0, count)


def test_behind_a_full_batch_the_next_one_is_read_once() -> None:
    stream = Stream(4)
    outlook = outlook_on(stream)
    assert outlook.read(after=0, wait_seconds=0.0).through == 2
    for _ in range(3):
        outlook.look_ahead()
    assert outlook.read(after=2, wait_seconds=0.0) == Scan(cast("Any", [3, 4]), 4)
    assert stream.asked == [0, 2]


@pytest.mark.parametrize(("head", "count"), [(3, 4), (3, 1), (0, 2)])
def test_behind_a_batch_that_is_not_full_or_of_one_nobody_looks(head: int, count: int) -> None:
    stream = Stream(head)
    outlook = outlook_on(stream, count)
    outlook.read(after=0, wait_seconds=0.0)
    outlook.look_ahead()
    assert stream.asked == [0]


def test_what_follows_another_position_is_read_again() -> None:
    stream = Stream(6)
    outlook = outlook_on(stream)
    outlook.read(after=0, wait_seconds=0.0)
    outlook.look_ahead()
    assert outlook.read(after=1, wait_seconds=0.0) == Scan(cast("Any", [2, 3]), 3)
    assert outlook.read(after=2, wait_seconds=0.0) == Scan(cast("Any", [3, 4]), 4)
    assert stream.asked == [0, 2, 1, 2]


def test_nothing_ahead_is_not_taken_for_the_end() -> None:
    stream = Stream(2)
    outlook = outlook_on(stream)
    outlook.read(after=0, wait_seconds=0.0)
    outlook.look_ahead()
    stream.head = 3
    assert outlook.read(after=2, wait_seconds=0.0).through == 3


def test_what_is_missing_ahead_is_met_when_its_turn_comes() -> None:
    stream = Stream(4)
    outlook = outlook_on(stream)
    outlook.read(after=0, wait_seconds=0.0)
    stream.missing = 3
    outlook.look_ahead()
    with pytest.raises(PositionMissing):
        outlook.read(after=2, wait_seconds=0.0)


def test_what_would_have_to_be_fetched_is_not_looked_at() -> None:
    stream = Stream(4)
    stream.near_from = 4
    outlook = outlook_on(stream)
    outlook.read(after=0, wait_seconds=0.0)
    outlook.look_ahead()
    assert stream.asked == [0]
