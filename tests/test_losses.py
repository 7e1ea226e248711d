"""How often a connection may break at an event before that is no chance any more."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.isolation import Batch
from penstock.core.wire import Entry
from penstock.errors import ServerReadOnly, ServerUnavailable
from penstock.pipeline.losses import LOSSES_MAX, Losses

LOSS = ServerUnavailable("it broke")


def batch(*positions: int) -> Batch:
    unread: dict[str, Any] = dict.fromkeys(Entry._fields, b"")
    entries = tuple(Entry(**{**unread, "position": position}) for position in positions)
    return Batch(entries, positions[-1])


def test_an_event_is_to_blame_for_the_last_of_losses_in_a_row_alone() -> None:
    losses = Losses()
    assert [losses.note(batch(7), LOSS) for _ in range(LOSSES_MAX)] == [False, False, True]
    assert not losses.note(batch(8), LOSS)


def test_what_was_settled_begins_anew() -> None:
    losses = Losses()
    for _ in range(LOSSES_MAX):
        assert not losses.note(batch(7), LOSS)
        losses.forget(batch(7))


def test_nobody_is_to_blame_for_a_server_that_takes_no_writes() -> None:
    losses = Losses()
    assert not any(losses.note(batch(7), ServerReadOnly("not now")) for _ in range(LOSSES_MAX))
    assert len(losses.parts(batch(7, 8))) == 1


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (1, 1), (2, 3), (LOSSES_MAX, 3)])
def test_a_batch_that_lost_twice_is_run_one_by_one_and_what_follows_is_not(
    count: int, parts: int
) -> None:
    losses = Losses()
    # Of several nobody knows who it was.
    assert not any(losses.note(batch(1, 2, 3), LOSS) for _ in range(count))
    found = losses.parts(batch(1, 2, 3))
    assert len(found) == parts
    assert all(part.is_careful for part in found) == (parts > 1)
    assert len(losses.parts(batch(4, 5))) == 1
