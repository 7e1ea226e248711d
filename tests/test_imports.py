"""What is public can be imported, and what only looks does not load everything."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock
from penstock.cli.commands import COMMANDS, Commands

HEAVY = ("penstock.app.pipeline", "penstock.pipeline.lane", "redis", "sqlalchemy")


@pytest.mark.parametrize("name", penstock.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(penstock, name).__name__ == name
    assert name in dir(penstock)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Pipelines'"):
        _ = penstock.Pipelines  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_found_by_its_name(name: str) -> None:
    command = Commands(name="penstock").get_command(None, name)
    assert (command.name, command.hidden) == (name, name in {"dlq", "work"})


def test_status_loads_what_it_needs_and_no_more() -> None:
    program = (
        "import sys; from penstock.cli.commands import Commands\n"
        "Commands(name='penstock').get_command(None, 'status')\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_measuring_brings_no_event_of_the_demonstration() -> None:
    program = (
        "import penstock.cli.bench; from penstock.core.contracts import known_types\n"
        "print(sorted(known_types()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['bench.measured']"
