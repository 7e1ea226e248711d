"""Numbers that no row can have are answered in a sentence, by whichever command takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bookkeeper import Bookkeeper
from tests.test_cli import Penstock

BEYOND = str(2**63)
ENDLESS = "9" * 5000


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    """The command line on a database with a row in every table."""
    books = Bookkeeper(database_url)
    books.stream(3)
    books.consumer(checkpoints=(2,))
    books.leave_traces()
    books.connection.close()
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.mark.parametrize(
    "command",
    [
        "dead-letters list --position {}",
        "dead-letters list --position 1..{}",
        "dead-letters list --since {}s",
        "dead-letters list --limit {}",
        "dead-letters show {}",
        "dead-letters show orders/{}",
        "dead-letters redrive --position {} --yes",
        "dead-letters discard --position {} --reason old --yes",
        "journey orders/{}",
        "journey --key a --limit {}",
        "parked list --limit {}",
        "replay --consumer bill_order --since {}d --dry-run",
        "send --stream orders --event-type placed --version {}",
        "timers list --limit {}",
        "timers list --before {}d",
        "timers reschedule reminder --delay {}d",
    ],
)
def test_a_number_that_cannot_be_is_a_mistake_of_whoever_wrote_it(
    penstock: Penstock, command: str
) -> None:
    for number in (BEYOND, ENDLESS):
        assert penstock(*command.format(number).split(), code=2).stderr


@pytest.mark.parametrize(
    "command",
    [
        "consumers seek bill_order --to {} --yes",
        "parked show {}",
        "parked release {} --consumer bill_order",
        "replay --consumer bill_order --from {} --dry-run",
        "replay --consumer bill_order --from 1 --to {} --dry-run",
    ],
)
def test_a_position_that_is_not_there_is_said_to_be_so(penstock: Penstock, command: str) -> None:
    assert penstock(*command.format(BEYOND).split(), code=1).stderr
    assert penstock(*command.format(ENDLESS).split(), code=2).stderr


def test_limits_may_be_as_high_as_anybody_likes(penstock: Penstock) -> None:
    last = 2**63 - 1
    penstock("dead-letters", "list", "--position", f"1..{last}")
    penstock("dead-letters", "redrive", "--all", "--limit", BEYOND, "--yes")
    penstock("dead-letters", "redrive", "--all", "--rate", "999999999/s", "--yes")
    assert "no rate" in penstock("dlq", "redrive", "--all", "--rate", ENDLESS, code=2).stderr
