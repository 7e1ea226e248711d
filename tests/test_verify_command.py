"""`penstock verify` as people and cron meet it, and while everybody works."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.cli import looking
from penstock.cli.output import console
from penstock.core.settings import DAY_SECONDS, Settings
from penstock.errors import RetryableError
from penstock.ops import consumers as consumers_module
from penstock.ops.consumers import Consumers
from penstock.ops.seeking import Seeker
from penstock.ops.verify import Verify
from penstock.ops.verify_tiers import HotTier
from penstock.stores.cleanup import Cleanup
from penstock.stores.postgres import connect
from penstock.stores.redis_log import RedisLog
from tests.bookkeeper import BILL, Bookkeeper
from tests.lanes_at_work import Counted, Shop, insert
from tests.test_cli import Penstock

EXIT_UNREACHABLE = 75
ROUNDS = 4
RETENTION_DAYS = 0.5 / DAY_SECONDS
SMALL = {"publish_batch_size": 20, "hot_log_length_max": 100}


@pytest.fixture
def penstock(tmp_path: Path, database_url: str, capsys: pytest.CaptureFixture[str]) -> Penstock:
    return Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": database_url}, capsys)


@pytest.fixture
def books(database_url: str) -> Iterator[Bookkeeper]:
    """Ten events, of which a consumer has handled seven."""
    books = Bookkeeper(database_url)
    books.stream(10)
    books.consumer(checkpoints=(7,))
    yield books
    books.connection.close()


def forget(books: Bookkeeper, position: int) -> None:
    books.connection.execute("DELETE FROM events.processed_event WHERE position = %s", (position,))


# ── the command ────────────────────────────────────────────────────────────────────────────────


def test_books_that_balance_are_no_news_for_cron(penstock: Penstock, books: Bookkeeper) -> None:
    said = penstock("verify")
    assert (said.stdout, said.stderr) == ("", "")


def test_whatever_is_wrong_is_one_line_and_exit_1(penstock: Penstock, books: Bookkeeper) -> None:
    forget(books, 3)
    books.settle(5, "dead")
    said = penstock("verify", code=1)
    skipped, unaccounted = said.stdout.splitlines()
    assert skipped.startswith(f"SKIPPED 1 in {BILL}: ")
    assert unaccounted.startswith(f"UNACCOUNTED 1 in {BILL}: ")
    assert "settled_retention_days (7)" in said.stderr
    assert "balance" not in penstock("verify", "--consumer", "bill_order", code=1).stdout


def test_rows_that_are_given_up_are_no_anomaly_and_others_still_are(
    penstock: Penstock, books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers_module, "FORGET_BATCH", 3)
    consumers = Consumers(books.connection)
    with pytest.raises(KeyboardInterrupt):
        consumers.forget(BILL, on_progress=_interrupt)
    report = json.loads(penstock("verify", "--json").stdout)
    (counts,) = report["streams"][0]["consumers"]
    assert (counts["handled"], counts["pruned"], counts["pending"]) == (4, 3, 3)
    # It goes on instead: what comes later is expected to be there.
    books.connection.execute("UPDATE events.stream_lease SET checkpoint = 8")
    assert f"SKIPPED 1 in {BILL}: " in penstock("verify", code=1).stdout
    books.connection.execute("UPDATE events.stream_lease SET checkpoint = 7")
    # It is moved back: what is handled again has rows again.
    seeker = Seeker(books.connection)
    seeker.seek(seeker.plan(BILL, 4), again=True, by="me")
    books.connection.execute("UPDATE events.stream_lease SET checkpoint = 4")
    assert f"SKIPPED 1 in {BILL}: " in penstock("verify", code=1).stdout
    consumers.forget(BILL)
    assert penstock("verify").stdout == ""


def _interrupt(_deleted: int) -> None:
    raise KeyboardInterrupt


def test_people_see_the_numbers(
    penstock: Penstock, books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    books.connection.execute("DELETE FROM events.outbox_event WHERE position <= 2")
    monkeypatch.setattr(console, "_force_terminal", True)
    said = penstock("verify").stdout
    assert said.splitlines() == [
        "orders: positions up to 10; proved from 3 on, since what came before is pruned",
        f"  {BILL}: of 10 due 5 handled, 3 pending, 2 pruned",
        "The books balance.",
    ]


def test_programs_get_json(penstock: Penstock, books: Bookkeeper) -> None:
    forget(books, 3)
    said = json.loads(penstock("verify", "--json", "--no-hot-log", code=1).stdout)
    assert said["balance"] is False
    (finding,) = said["findings"]
    assert (finding["anomaly"], finding["where"], finding["count"]) == ("skipped", BILL, 1)
    assert "at 3, checkpoint 7" in finding["examples"][0]
    (stream,) = said["streams"]
    assert (stream["name"], stream["head"], stream["proved_from"]) == ("orders", 10, 1)
    (consumer,) = stream["consumers"]
    assert consumer == {
        "name": BILL,
        "due": 10,
        "handled": 6,
        "passed": 0,
        "parked": 0,
        "dead": 0,
        "pending": 3,
        "pruned": 0,
        "before": 0,
        "behind": 0,
        "holes": 0,
    }


def test_no_answer_is_another_code_than_no(penstock: Penstock, books: Bookkeeper) -> None:
    unreachable = "postgresql://nobody@127.0.0.1:1/nothing"
    said = penstock("verify", code=EXIT_UNREACHABLE, DATABASE_URL=unreachable)
    assert "cannot be reached" in said.stderr
    assert "no stream 'order'" in penstock("verify", "--stream", "order", code=2).stderr
    # A cache that is away is worth a remark, no more.
    said = penstock("verify", "--json", REDIS_URL="redis://127.0.0.1:1/0")
    (tier,) = json.loads(said.stdout)["streams"][0]["tiers"]
    assert "cannot be reached" in tier["remark"]
    assert tier["was_read"] is False


def test_silence_does_not_mean_that_a_hot_log_agrees_that_nobody_has_read(
    penstock: Penstock, books: Bookkeeper
) -> None:
    books.connection.execute(
        "INSERT INTO events.stream (name, origin) SELECT 'mails', origin FROM events.stream"
    )
    said = penstock("verify", REDIS_URL="redis://127.0.0.1:1/0")
    assert said.stdout == ""
    # Once for the server, and not for each of its streams.
    (line,) = said.stderr.splitlines()
    assert line.startswith("The hot log was not compared with PostgreSQL")
    assert "cannot be reached" in line
    assert penstock("verify", "--no-hot-log", REDIS_URL="redis://127.0.0.1:1/0").stderr == ""


def test_an_answer_that_a_time_limit_cuts_short_is_no_answer(
    penstock: Penstock, books: Bookkeeper, database_url: str
) -> None:
    with psycopg.connect(database_url) as forgotten:
        if forgotten.info.server_version < 170000:
            pytest.skip("PostgreSQL 17 is the first to have transaction_timeout")
        forgotten.execute("LOCK TABLE events.stream")
        limited = f"{database_url}?options=-c%20transaction_timeout%3D50ms"
        said = penstock("verify", code=EXIT_UNREACHABLE, DATABASE_URL=limited)
    assert "transaction timeout" in said.stderr
    assert "neither proved nor refuted" in said.stderr


def test_whoever_interrupts_it_is_not_told_that_something_is_wrong(
    penstock: Penstock, books: Bookkeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted() -> Iterator[Any]:
        yield lambda: True

    monkeypatch.setattr(looking, "interruptible", interrupted)
    assert "Interrupted" in penstock("verify", code=130).stderr


# ── online ─────────────────────────────────────────────────────────────────────────────────────


def test_whoever_works_meanwhile_is_no_anomaly(database_url: str, redis_url: str) -> None:
    """Senders, a publisher, lanes that are split anew, keys that are parked, and a janitor."""
    stop = threading.Event()
    failed: set[tuple[str, int]] = set()

    def handle(event: Counted, cursor: psycopg.Cursor[Any]) -> None:
        if event.number % 7 == 0 and (event.key, event.number) not in failed:
            failed.add((event.key, event.number))
            raise RetryableError("not now", after_seconds=0.01)
        insert(event, cursor)

    with closing(Shop(database_url, redis_url, **SMALL)) as shop, shop.publisher():
        background = threading.Thread(target=_disturb, args=(shop, database_url, stop))
        background.start()
        try:
            for deploy, lanes in enumerate((4, 3), start=1):
                with shop.worker(lanes=lanes, deploy=deploy, handler=handle, batch_size=5):
                    for _ in range(ROUNDS):
                        _demand_balance(database_url, redis_url)
        finally:
            stop.set()
            background.join()
        with shop.worker(lanes=3, deploy=2, handler=handle):
            shop.wait_until_handled()
            assert _demand_balance(database_url, redis_url) > 0
    assert failed, "nothing was ever parked"


def _disturb(shop: Shop, database_url: str, stop: threading.Event) -> None:
    """Send, and prune whatever may go."""
    limits: dict[str, Any] = {"retention_days": RETENTION_DAYS, "batch_size": 100}
    with closing(connect(database_url, "janitor")) as connection:
        while not stop.wait(0.01):
            shop.send(10)
            Cleanup().prune_settled(connection, since=None, **limits)
            Cleanup().prune_outbox(connection, "counts", after=0, **limits)


def _demand_balance(database_url: str, redis_url: str) -> int:
    """Returns how many events were handled."""
    settings = Settings(
        database_url=database_url,
        settled_retention_days=RETENTION_DAYS,
        cleanup_every_seconds=RETENTION_DAYS * DAY_SECONDS,
    )
    with (
        closing(connect(database_url, "verify")) as connection,
        closing(RedisLog(redis_url)) as log,
    ):
        report = Verify(connection, settings, tiers=(HotTier(log),), window_events=50).run()
    assert report.balance, "\n".join(map(str, report.findings))
    books = [books for stream in report.streams for books in stream.consumers]
    for each in books:
        places = (each.handled, each.passed, each.parked, each.dead, each.pending, each.pruned)
        assert sum(places) == each.due
    return sum(each.handled + each.pruned for each in books)
