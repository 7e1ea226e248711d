"""`penstock journey` tells the whole story of an event, and says what it cannot see."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from penstock.core.events import StreamEvent
from penstock.core.retry import Retry
from penstock.ops.redriving import Plan, Redrive
from penstock.stores.dead_letters import Criteria
from penstock.stores.identity import new_event_uuid
from tests.archiving import archiver
from tests.bench_of_one import Workbench, run_until_idle
from tests.events import Placed
from tests.test_cli import Penstock
from tests.waiting import wait_until

BILL = "test.bill"


@pytest.fixture
def bench(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Workbench]:
    archive = str(tmp_path / "archive")
    bench = Workbench(database_url, redis_url, archive_url=archive, archive_count_max=2)
    yield bench
    bench.close()


@pytest.fixture
def penstock(tmp_path: Path, bench: Workbench, capsys: pytest.CaptureFixture[str]) -> Penstock:
    variables = {
        "PENSTOCK_DATABASE_URL": bench.settings.database_url,
        "PENSTOCK_ARCHIVE_URL": str(bench.settings.archive_url),
    }
    return Penstock(tmp_path, variables, capsys)


def told(penstock: Penstock, *event: str, code: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(penstock("journey", *event, "--json", code=code).stdout)
    return found


def whats(steps: list[dict[str, Any]]) -> list[str]:
    return [step["what"] for step in steps]


def redrive_all(bench: Workbench) -> None:
    plan = Plan(criteria=Criteria(), by="me", stop_after=10, reason="mended")
    with psycopg.connect(bench.settings.database_url, autocommit=True) as connection:
        Redrive(connection, plan).run()


class Moody:
    """A handler that fails while it is told to."""

    def __init__(self) -> None:
        self.is_broken = True

    def __call__(self, event: StreamEvent[Any]) -> None:
        if self.is_broken and event.position == 1:
            raise ValueError("the printer is on fire")


def test_an_event_that_was_retried_buried_redriven_handled_and_archived(
    penstock: Penstock, bench: Workbench
) -> None:
    handler = Moody()

    def bill(event: StreamEvent[Any]) -> None:
        handler(event)

    bench.send(2)
    bench.publish()
    lane = bench.consumer(bill, name="bill", retry=Retry.fixed(seconds=0.01, attempts_max=3))

    def outcome() -> str:
        run_until_idle(lane)
        return dict(bench.settled()).get(1, "")

    wait_until(lambda: outcome() == "dead", what="the event is buried")
    buried = told(penstock, "orders/1")
    assert buried["consumers"][0]["state"].startswith("buried as letter")
    handler.is_broken = False
    redrive = threading.Thread(target=lambda: redrive_all(bench))
    redrive.start()
    wait_until(lambda: outcome() == "handled", what="the event is handled at last")
    redrive.join()
    with archiver(bench.settings) as running:
        running.archive_all()
    journey = told(penstock, "orders/1")
    assert (journey["found_in"], journey["event_type"], journey["key"]) == (
        "outbox",
        "placed",
        "k1",
    )
    assert whats(journey["steps"]) == ["sent", "numbered", "appended", "archived"]
    [chapter] = journey["consumers"]
    assert (chapter["consumer"], chapter["state"]) == (BILL, "handled")
    assert whats(chapter["steps"]) == [
        "failed and parked",
        "failed and parked",
        "buried",
        "redrive asked for",
        "redriven",
        "handled",
    ]
    details = [step["detail"] for step in chapter["steps"]]
    assert details[0].startswith("attempt 1: ValueError: the printer is on fire; again ")
    assert details[2].startswith("attempt 3: exhausted: ")
    assert details[3].endswith(": mended")
    assert all(step["after_ms"] >= 0 for step in chapter["steps"][1:])
    by_uuid = told(penstock, journey["event_uuid"])
    assert by_uuid == journey
    printed = penstock("journey", "orders/1").stdout
    assert "Handled by test.bill" in printed
    assert "What cannot be seen from here" in printed


def test_an_event_that_only_the_archive_has(penstock: Penstock, bench: Workbench) -> None:
    bench.send(2)
    bench.publish()
    with archiver(bench.settings) as running:
        running.archive_all()
    bench.connection.execute("DELETE FROM events.outbox_event")
    journey = told(penstock, "orders/2")
    assert (journey["found_in"], journey["event_type"]) == ("archive", "placed")
    assert whats(journey["steps"]) == ["sent", "appended", "archived"]


def test_metadata_that_only_postgresql_can_read_hides_no_event(
    penstock: Penstock, bench: Workbench
) -> None:
    # Of more digits, and deeper, than Python reads.
    for metadata in ('{"n": 1e5000}', f'{{"n": {"[" * 2000}{"]" * 2000}}}'):
        bench.connection.execute(
            "SELECT events.send('orders', 'placed', '{}', metadata => %s::jsonb)", (metadata,)
        )
    bench.publish()
    for place in ("orders/1", "orders/2"):
        assert whats(told(penstock, place)["steps"]) == ["sent", "numbered", "appended"]
    with archiver(bench.settings) as running:
        running.archive_all()
    bench.connection.execute("DELETE FROM events.outbox_event")
    for place in ("orders/1", "orders/2"):
        assert told(penstock, place)["found_in"] == "archive"


def test_an_event_that_waits_and_one_that_is_not_reached(
    penstock: Penstock, bench: Workbench
) -> None:
    def bill(event: StreamEvent[Any]) -> None:
        if event.key == "k1":
            raise ValueError("no")

    bench.send(4)
    bench.publish()
    lane = bench.consumer(bill, name="bill", retry=Retry.fixed(seconds=900, attempts_max=3))
    run_until_idle(lane)
    [chapter] = told(penstock, "orders/4")["consumers"]
    assert (chapter["state"], whats(chapter["steps"])) == ("parked", ["parked"])
    bench.send(1)
    bench.publish()
    [chapter] = told(penstock, "orders/5")["consumers"]
    assert chapter["state"] == "not reached: 1 to go"
    assert told(penstock, "--key", "k1")["events"][0]["position"] == 5


def test_an_event_that_waits_for_its_version_has_had_no_attempt(
    penstock: Penstock, bench: Workbench
) -> None:
    bench.connection.execute("SELECT events.send('orders', 'placed', '{\"n\": 1}', version => 9)")
    bench.publish()

    def bill(event: Placed) -> None: ...

    run_until_idle(bench.consumer(bill, name="bill", on_unknown_version="park"))
    (chapter,) = told(penstock, "orders/1")["consumers"]
    (step,) = chapter["steps"]
    assert step["what"] == "parked"
    assert "no attempt: ContractMissing: placed at orders/1 has version 9" in step["detail"]


def test_what_is_not_there_is_said_to_be_so(penstock: Penstock, bench: Workbench) -> None:
    never = told(penstock, str(new_event_uuid()), code=1)
    assert never["summary"].startswith("It never committed, or has not yet: its id was made ")
    assert told(penstock, str(uuid4()), code=1)["summary"].startswith("Nothing is known of it.")
    assert "no such stream" in told(penstock, "nowhere/1", code=1)["summary"]
    bench.send(1)
    bench.publish()
    assert "the stream ends at 1" in told(penstock, "orders/2", code=1)["summary"]

    def bill(event: Placed) -> None: ...

    run_until_idle(bench.consumer(bill, name="bill"))
    ahead = told(penstock, "orders/3", code=1)
    assert "the stream ends at 1" in ahead["summary"]
    # It is not on its way there.
    assert ahead["consumers"] == []
    assert told(penstock, "--key", "nobody", code=1)["events"] == []
    assert "No event of this key" in penstock("journey", "--key", "nobody", code=1).stderr
    for wrong in (("orders",), (), ("orders/1", "--key", "k")):
        assert penstock("journey", *wrong, code=2).stdout == ""
