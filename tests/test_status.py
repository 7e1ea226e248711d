"""`penstock status` says first whether all is well, on one screen; its JSON is documented."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli import status as command
from penstock.ops.status import ConsumerStatus, LeaseStatus, Status, StreamStatus
from penstock.ops.timer_status import TimerStatus
from tests.bookkeeper import BILL
from tests.graveyard import Graveyard
from tests.test_cli import Penstock

DOCUMENTED = re.compile(r"^\| `([a-z_.\[\]]+)` \|", re.MULTILINE)
KIND = re.compile(r"^\| `([a-z_]+)` \| [a-zA-Z]", re.MULTILINE)
ROOT = Path(__file__).parent.parent


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def graveyard(database_url: str) -> Iterator[Graveyard]:
    graveyard = Graveyard(database_url)
    yield graveyard
    graveyard.connection.close()


def test_the_first_line_is_the_verdict_and_the_problems_follow(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.stream(10)
    graveyard.consumer(checkpoints=(10,))
    graveyard.consumer("shop.a_fine_one", checkpoints=(10,))
    assert penstock("status").stdout.splitlines()[0] == "healthy"
    graveyard.bury([3], held=True)
    graveyard.quarantine()
    said = penstock("status").stdout
    first, problem, waiting, *_ = said.splitlines()
    assert first == "1 problem"
    assert problem.startswith(f"! consumer {BILL}: quarantined")
    assert f"penstock quarantine release {BILL}" in problem
    assert waiting == (
        "To look at: 1 held key (`penstock parked list`), "
        "1 dead letter (`penstock dlq list --groups`)."
    )
    # The worst comes first.
    assert said.index(f"\n {BILL} ") < said.index("\n shop.a_fine_one ")


def test_the_json_has_the_verdict_and_every_field_is_documented(
    penstock: Penstock, graveyard: Graveyard
) -> None:
    graveyard.stream(10)
    graveyard.consumer(checkpoints=(9,))
    told = json.loads(penstock("status", "--json").stdout)
    check = json.loads(penstock("status", "--check", "--json", code=1).stdout)
    assert (told["healthy"], told["problems"]) == (False, check["problems"])
    page = (ROOT / "docs" / "STATUS.md").read_text()
    fields = page.partition("## Fields")[2].partition("\n## ")[0]
    assert sorted(DOCUMENTED.findall(fields)) == sorted(field_names(told))


def test_every_kind_of_problem_is_documented() -> None:
    page = (ROOT / "docs" / "STATUS.md").read_text()
    section = page.partition("## Problems")[2].partition("## Fields")[0]
    known = set(KIND.findall(section)) - {"kind"}
    sources = ("src/penstock/ops/check.py", "src/penstock/cli/status.py")
    text = "".join((ROOT / source).read_text() for source in sources)
    assert known == set(re.findall(r"Problem\(\s*\"(\w+)\"", text))


@pytest.mark.parametrize("size", [(80, 24), (160, 60)])
def test_a_thousand_consumers_fit_on_one_screen(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, rows = size
    shown = Console(
        force_terminal=True, width=columns, height=rows, file=io.StringIO(), soft_wrap=True
    )
    monkeypatch.setattr(command, "console", shown)
    found = crowd()
    lines = rendered(shown, found, everything=False)
    assert len(lines) <= rows - 1
    assert lines[0].startswith("100 problems")
    assert lines[1].startswith("! consumer shop.c")
    assert any("--all shows the rest" in line for line in lines)
    assert sum("more: `penstock status --check`" in line for line in lines) == 1
    assert len(rendered(shown, found, everything=True)) > 2000
    healthy = replace(found, consumers=tuple(replace(c, lag_events=0) for c in found.consumers))
    lines = rendered(shown, healthy, everything=False)
    assert lines[0].startswith("healthy")
    # The room is used: a screen that is half empty hides for nothing.
    assert rows - 8 <= len(lines) <= rows - 1


# ── the words used above ───────────────────────────────────────────────────────────────────────


def crowd() -> Status:
    """100 streams with ten consumers each, of which one waits for a worker."""
    streams = [StreamStatus(f"s{n:03}", None, 10, 10, 0, False, 0) for n in range(100)]
    consumers = [
        ConsumerStatus(f"shop.c{n:03}_{m}", f"s{n:03}", 1, 5, 0 if m else 5, 0)
        for n in range(100)
        for m in range(10)
    ]
    leases = [LeaseStatus(c.stream_name, f"consumer:{c.name}", "me", 1, 9.0, 5) for c in consumers]
    timers = TimerStatus(0, 0, 0, False, None)
    return Status(tuple(streams), tuple(consumers), tuple(leases), timers)


def rendered(console: Console, found: Status, *, everything: bool) -> list[str]:
    drawn = command._shown(found, 300, everything=everything)
    lines = console.render_lines(drawn, pad=False)
    return ["".join(segment.text for segment in line) for line in lines]


def field_names(value: Any, path: str = "") -> Iterator[str]:
    """Every path to a value, with [] for the elements of a list."""
    if isinstance(value, list):
        path += "[]"
        if not path.startswith("."):
            yield path
        value = value[0] if value else None
    elif path and isinstance(value, dict):
        yield path
    if not isinstance(value, dict):
        if not path.endswith("[]"):
            yield path
        return
    for name, inner in value.items():
        yield from field_names(inner, f"{path}.{name}" if path else name)
