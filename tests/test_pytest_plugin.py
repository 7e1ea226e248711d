"""The pytest plugin as an application uses it: a project of its own, and pytest on it."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest

from penstock import Pipeline
from penstock.errors import UsageError
from penstock.stores.configuration import NAMES
from penstock.stores.servers import Servers
from penstock.testing.bench import bench_on
from tests.events import Placed

SHOP = """
from datetime import timedelta

from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from penstock import Event, FatalError, Pipeline, Retry

pipeline = Pipeline("shop", database_url="postgresql://production.invalid/shop")

class Base(DeclarativeBase): ...

class Invoice(Base):
    __tablename__ = "invoice"
    order_id: Mapped[int] = mapped_column(primary_key=True)

class OrderPlaced(Event, type="orders.placed", version=1, key="order_id"):
    order_id: int

class InvoiceSent(Event, type="invoices.sent", version=1, key="order_id"):
    order_id: int

@pipeline.consumer("orders", name="bill", lanes=2, retry=Retry.fixed(seconds=3600))
def bill(event: OrderPlaced, session: Session) -> None:
    if event.order_id == 13:
        raise FatalError("no bill for that")
    if event.order_id == 14:
        raise LookupError("try again in an hour")
    session.add(Invoice(order_id=event.order_id))
    pipeline.send(session, "invoices", InvoiceSent(order_id=event.order_id))
    pipeline.schedule(
        session, "orders", OrderPlaced(order_id=event.order_id + 100),
        timer_id=f"again-{event.order_id}", delay=timedelta(days=30),
    )

@pipeline.consumer("invoices", name="count")
async def count(event: InvoiceSent) -> None:
    counted.append(event.order_id)

counted: list[int] = []
"""

TESTS = """
from datetime import UTC, datetime, timedelta

import pytest
import shop
from sqlalchemy import select
from sqlalchemy.orm import Session

@pytest.fixture(autouse=True)
def tables(penstock):
    shop.Base.metadata.create_all(shop.pipeline.engine)
    shop.counted.clear()

def invoices():
    with Session(shop.pipeline.engine) as session:
        return sorted(session.scalars(select(shop.Invoice.order_id)))

def test_everything_that_follows_has_happened(penstock):
    for order_id in (1, 2, 13, 14):
        shop.pipeline.send_now("orders", shop.OrderPlaced(order_id=order_id))
    penstock.run_until_idle()
    assert invoices() == [1, 2]
    assert sorted(shop.counted) == [1, 2]
    (dead,) = penstock.dead_letters
    assert (dead.letter.consumer, dead.letter.error_message) == ("shop.bill", "no bill for that")
    assert dead.entry().plain_payload() == {"order_id": 13}

def test_a_month_later(penstock):
    shop.pipeline.send_now("orders", shop.OrderPlaced(order_id=3))
    penstock.run_until_idle()
    assert len(penstock.fire_timers(until=datetime.now(UTC) + timedelta(days=31))) == 1
    penstock.run_until_idle()
    assert invoices() == [3, 103]

def test_nothing_is_left_of_other_tests(penstock):
    penstock.run_until_idle()
    assert invoices() == []
    assert penstock.dead_letters == []

def test_what_is_not_done_in_time_is_told(penstock):
    with Session(shop.pipeline.engine) as session, session.begin():
        shop.pipeline.send(session, "orders", shop.OrderPlaced(order_id=5))
        session.flush()
        with pytest.raises(AssertionError, match="shop.bill has not begun|before it|a position"):
            shop.pipeline.send_now("orders", shop.OrderPlaced(order_id=4))
            penstock.run_until_idle(seconds=0)
    penstock.run_until_idle()
    assert invoices() == [4, 5]
"""

WAITING = """
import threading
from collections.abc import Iterator

from penstock import Event, Guarantee, Pipeline, Retry

pipeline = Pipeline("shop", database_url="postgresql://production.invalid/shop", shutdown_seconds=1)

class Asked(Event, type="asked", version=1, key="n"):
    n: int

class Client: ...

@pipeline.resource
def client() -> Iterator[Client]:
    if is_away:
        raise ConnectionRefusedError("nobody is there")
    yield Client()

is_away: list[bool] = []
seen: list[int] = []
is_over = threading.Event()

@pipeline.consumer("strict", name="strict", order="stream", retry=Retry.fixed(seconds=3600))
def in_order(event: Asked) -> None:
    if event.n == 13:
        raise LookupError("try again in an hour")
    seen.append(event.n)

@pipeline.consumer(
    "calls", name="call", guarantee=Guarantee.AT_MOST_ONCE, start="earliest"
)
def call(event: Asked) -> None:
    settled.wait(30)
    pipeline.send_now("answers", event)

settled = threading.Event()

@pipeline.consumer("answers", name="answer")
def answer(event: Asked) -> None:
    seen.append(event.n)

@pipeline.consumer("mails", name="mail")
def mail(event: Asked, client: Client) -> None:
    seen.append(event.n)

@pipeline.consumer("hanging", name="hang")
def hang(event: Asked) -> None:
    is_over.wait(60)
"""

WAITS = """
from datetime import timedelta

import psycopg
import pytest
import waiting
from waiting import Asked, pipeline, seen
from sqlalchemy.orm import Session

@pytest.fixture(autouse=True)
def clear():
    seen.clear()
    waiting.is_away.clear()

def test_a_stream_that_waits_behind_a_retry_is_left_for_later(penstock):
    for n in (1, 13, 2):
        pipeline.send_now("strict", Asked(n=n))
    penstock.run_until_idle()
    assert set(seen) == {1}

def test_a_timer_that_is_held_is_left_alone(penstock):
    with Session(pipeline.engine) as session, session.begin():
        pipeline.schedule(session, "strict", Asked(n=1), delay=timedelta(), timer_id="held")
    with psycopg.connect(penstock.database_url) as connection:
        connection.execute("UPDATE events.timer SET held_at = now(), held_reason = 'no'")
    penstock.run_until_idle()
    assert seen == []

def test_what_follows_of_a_call_after_its_event_was_settled_has_happened(penstock, monkeypatch):
    look = penstock._unfinished
    def settle(connection):
        unfinished = look(connection)
        if not unfinished:
            waiting.settled.set()
        return unfinished
    monkeypatch.setattr(penstock, "_unfinished", settle)
    pipeline.send_now("calls", Asked(n=1))
    penstock.run_until_idle()
    assert seen == [1]

def test_a_resource_that_is_not_to_be_had_is_named(penstock):
    waiting.is_away.append(True)
    pipeline.send_now("mails", Asked(n=1))
    with pytest.raises(AssertionError, match="mail has not begun; .*client.*nobody is there"):
        penstock.run_until_idle(seconds=1)

def test_a_handler_that_hangs_fails_its_test(penstock):
    pipeline.send_now("hanging", Asked(n=1))
    with pytest.raises(AssertionError, match="not come to its end.*shop.hang has 1 events"):
        penstock.run_until_idle(seconds=0.5)
    waiting.is_over.set()
"""


def run_pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "test_shop.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npenstock_app = shop:pipeline\n")
    return tmp_path


def test_an_application_is_tested_on_real_servers(project: Path) -> None:
    done = run_pytest(project)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout


def test_the_readme_s_test_fails_where_the_handler_does(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    _, _, rest = (root / "README.md").read_text().partition("def test_order(penstock):")
    body, _, _ = rest.partition("```")
    test = f"from shop import *\n\ndef test_order(penstock):{body}"
    (tmp_path / "test_order.py").write_text(test)
    (tmp_path / "pytest.ini").write_text("[pytest]\npenstock_app = shop:pipeline\n")
    handler, write, rest = (root / "examples" / "shop.py").read_text().partition("    session.add(")
    broken = f"{handler}    raise LookupError('no rate')\n{write}{rest}"
    (tmp_path / "shop.py").write_text(broken)
    done = run_pytest(tmp_path)
    assert "1 failed" in done.stdout
    # Not for another reason: its event is parked, and what it was to write is not there.
    assert "'NoneType' object has no attribute 'cents'" in done.stdout


def test_what_has_to_wait_is_left_and_what_hangs_is_told(tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(WAITING)
    (tmp_path / "test_waiting.py").write_text(WAITS)
    (tmp_path / "pytest.ini").write_text("[pytest]\npenstock_app = waiting:pipeline\n")
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "5 passed" in done.stdout


@pytest.mark.parametrize("declared", [(), ("invoices",)])
def test_streams_of_other_services_are_the_tests_own(
    declared: tuple[str, ...], database_url: str, servers: Servers, template_database: str
) -> None:
    pipeline = Pipeline("billing", database_url="postgresql://production.invalid/billing")
    pipeline.source("orders", redis_url=None, source_url=database_url)
    for stream_name in declared:
        pipeline.stream(stream_name)
    seen: list[int] = []

    @pipeline.consumer("orders", name="bill")
    def bill(event: Placed) -> None:
        seen.append(event.n)

    with bench_on(servers, template_database, pipeline) as bench:
        pipeline.send_now("orders", Placed(n=2))
        bench.run_until_idle()
    assert seen == [2]
    with psycopg.connect(database_url) as connection:
        # Whoever reads a stream is waited for there; the real consumer must not be outrun.
        assert connection.execute("SELECT FROM events.remote_consumer").fetchall() == []
    with pytest.raises(UsageError, match="belongs to another service"):
        pipeline.send_now("orders", Placed(n=3))


def test_nothing_in_a_test_reaches_a_server_of_the_application(
    monkeypatch: pytest.MonkeyPatch, servers: Servers, template_database: str
) -> None:
    schemes = {"database": "postgresql", "redis": "redis", "timer_redis": "redis", "archive": "s3"}
    for name, scheme in schemes.items():
        monkeypatch.setenv(f"PENSTOCK_{name.upper()}_URL", f"{scheme}://production.invalid/0")
    assert {name.removesuffix("_url") for name in NAMES if name.endswith("_url")} == {*schemes}
    pipeline = Pipeline("shop")
    with bench_on(servers, template_database, pipeline):
        assert "production" not in repr(pipeline.settings)
        pipeline.timers.publish(1, "reminders", activate_in=timedelta(days=1), timer_id="seven")
        assert pipeline.timers.get_pending_timers("reminders") == ["seven"]
    assert pipeline.settings.timer_redis_url == "redis://production.invalid/0"


def test_an_application_without_redis_is_tested_without_it(
    servers: Servers, template_database: str
) -> None:
    pipeline = Pipeline("shop", database_url="postgresql://production.invalid/0", redis_url=None)
    with bench_on(servers, template_database, pipeline) as bench:
        assert pipeline.settings.redis_url is None
        assert pipeline.settings.database_url == bench.database_url


def test_who_does_not_say_where_the_pipeline_is_is_told_how(project: Path) -> None:
    (project / "pytest.ini").write_text("[pytest]\n")
    done = run_pytest(project, "-k", "month")
    assert done.returncode == 1
    assert "penstock_app = shop:pipeline" in done.stdout


def test_the_pipeline_is_found_from_a_folder_within_the_project(project: Path) -> None:
    (project / "tests").mkdir()
    (project / "tests" / "test_it.py").write_text(
        "def test_it(penstock_pipeline):\n    assert penstock_pipeline.name == 'shop'\n"
    )
    done = run_pytest(project / "tests")
    assert done.returncode == 0, done.stdout
    (project / "pytest.ini").write_text("[pytest]\npenstock_app = shop:nothing\n")
    assert "penstock_app shop:nothing: module 'shop' has no" in run_pytest(project / "tests").stdout


def test_a_worker_that_cannot_work_ends_the_test_with_its_reason(project: Path) -> None:
    (project / "conftest.py").write_text(
        "import pytest, shop\n"
        "@pytest.fixture(scope='session')\n"
        "def penstock_pipeline():\n"
        "    return shop.pipeline\n"
    )
    (project / "test_shop.py").write_text(
        "import psycopg\n"
        "def test_it(penstock):\n"
        "    with psycopg.connect(penstock.database_url, autocommit=True) as connection:\n"
        "        connection.execute('DROP TABLE events.parked_event')\n"
        "    penstock.run_until_idle()\n"
    )
    done = run_pytest(project)
    assert done.returncode == 1
    assert "parked_event" in done.stdout
    assert "Not idle" not in done.stdout


def test_runs_that_have_nothing_to_do_with_it_import_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('penstock')\n"
        "    assert 'sqlalchemy' not in sys.modules\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
