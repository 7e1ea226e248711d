"""A consumer reads archive, outbox and hot log as one stream: in order, once, without a seam."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis

from penstock.core.events import StreamEvent
from penstock.core.options import ConsumerOptions, Start
from penstock.core.settings import Settings
from penstock.errors import ArchiveDamaged, ServerUnavailable
from penstock.ops.replay_planning import ReplayPlanner, ReplayRequest
from penstock.ops.verify import Verify
from penstock.pipeline import consumer as consumers
from penstock.stores.cold_tier import ColdTier, own_cold_tier
from penstock.stores.sources import Bounds
from penstock.stores.starts import Starts, with_archive
from penstock.telemetry import signals
from tests.archiving import archiver
from tests.bench_of_one import Workbench, run_until_idle
from tests.failing import drive, effects, heard
from tests.publishing import log_key
from tests.services import Producer, Reader
from tests.waiting import wait_until

ARCHIVED = 30
WARM = 10
LIVE = 5
LAST = ARCHIVED + WARM + LIVE


class Archived(Workbench):
    """`orders`, of which the first are in the archive alone and the last in the hot log."""

    def archive(self, *, keep_from: int) -> None:
        """Archive everything, and prune the outbox up to there."""
        with archiver(self.settings) as working:
            working.archive_all()
        self.connection.execute("DELETE FROM events.outbox_event WHERE position < %s", (keep_from,))

    def fill(self) -> None:
        """The three tiers."""
        self.send(ARCHIVED)
        self.publish()
        self.archive(keep_from=ARCHIVED + 1)
        self.send(WARM)
        self.publish()
        self.forget_hot_log()
        self.send(LIVE)
        self.publish()

    def forget_hot_log(self) -> None:
        log = self.hot_log()
        if log.keeps_entries:
            with closing(redis.Redis.from_url(str(self.settings.redis_url))) as client:
                client.xtrim("penstock:{orders}:log", maxlen=0, approximate=False)
        log.close()


def settings_of(tmp_path: Path) -> dict[str, Any]:
    return {
        "archive_url": str(tmp_path / "archive"),
        "archive_count_max": 10,
        "archive_age_seconds": 0.001,
    }


EFFECTS = "CREATE TABLE effect (serial bigint GENERATED ALWAYS AS IDENTITY, n bigint)"


@pytest.fixture
def bench(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Archived]:
    with closing(Archived(database_url, redis_url, **settings_of(tmp_path))) as opened:
        opened.connection.execute(EFFECTS)
        yield opened


@pytest.fixture
def bench_without_redis(database_url: str, tmp_path: Path) -> Iterator[Archived]:
    with closing(Archived(database_url, None, **settings_of(tmp_path))) as opened:
        opened.connection.execute(EFFECTS)
        yield opened


def note(event: StreamEvent[Any], cursor: psycopg.Cursor[Any]) -> None:
    cursor.execute("INSERT INTO effect (n) VALUES (%s)", (event.position,))


# ── reading ────────────────────────────────────────────────────────────────────────────────────


def test_a_new_consumer_reads_all_tiers_without_a_seam(bench: Archived) -> None:
    bench.fill()
    with heard(signals.ColdTierRead, signals.WarmTierRead, signals.ConsumerStartedLate) as told:
        run_until_idle(bench.consumer(note, batch_size=7))
    assert effects(bench) == list(range(1, LAST + 1))
    assert not any(isinstance(each, signals.ConsumerStartedLate) for each in told)
    cold = [each for each in told if isinstance(each, signals.ColdTierRead)]
    assert (cold[0].first, cold[-1].last) == (1, ARCHIVED)
    # While the archive leads on, nobody is asked in vain.
    assert [type(each) for each in told].index(signals.WarmTierRead) == len(cold)


def test_holes_are_passed_in_the_archive_too(bench_without_redis: Archived) -> None:
    bench = bench_without_redis
    bench.send(4)
    bench.publish()
    bench.connection.execute(
        "INSERT INTO events.hole (stream_name, first, last, reason) VALUES ('orders', 5, 9, 't')"
    )
    bench.connection.execute("UPDATE events.stream SET head = 9, published = 9")
    bench.send(6)
    bench.publish()
    bench.archive(keep_from=99)
    lane = bench.consumer(note)
    with heard(signals.HolePassed) as told:
        drive(lane, lambda: len(effects(bench)) == 10)
    assert effects(bench) == [1, 2, 3, 4, *range(10, 16)]
    assert [(each.first, each.last) for each in told] == [(5, 9)]


class Fickle:
    """An archive that is away, or damaged, for as long as it is told to be."""

    def __init__(self, archive: ColdTier) -> None:
        self._archive = archive
        self.failure: Exception | None = None
        self.asked = threading.Event()

    def bounds(self) -> tuple[int, int] | None:
        return self._archive.bounds()

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        self.asked.set()
        if self.failure is not None:
            raise self.failure
        return self._archive.read(after, count)

    def position_at(self, moment: datetime) -> int | None:
        return self._archive.position_at(moment)

    def close(self) -> None:
        self._archive.close()


@pytest.fixture
def fickle(bench: Archived, monkeypatch: pytest.MonkeyPatch) -> Fickle:
    archive = own_cold_tier(bench.settings, "orders", lambda: bench.connection)
    assert archive is not None
    fickle = Fickle(archive)
    monkeypatch.setattr(consumers, "own_cold_tier", lambda *_: fickle)
    return fickle


def test_a_store_that_is_away_is_waited_for_and_nothing_is_skipped(
    bench: Archived, fickle: Fickle
) -> None:
    bench.fill()
    fickle.failure = ServerUnavailable("no route to the store")
    lane = bench.consumer(note)
    with heard(signals.ServerLost, signals.ServerFound, signals.ConsumerBlocked) as told:
        drive(lane, fickle.asked.is_set)
        for _ in range(5):
            lane.step()
        assert effects(bench) == []
        fickle.failure = None
        drive(lane, lambda: len(effects(bench)) == LAST)
    assert effects(bench) == list(range(1, LAST + 1))
    assert [type(each) for each in told] == [signals.ServerLost, signals.ServerFound]
    assert told[0].server == "the archive"


def test_a_damaged_object_blocks_its_consumer_and_says_so(bench: Archived, fickle: Fickle) -> None:
    bench.fill()
    fickle.failure = ArchiveDamaged("the checksum is wrong.")
    with heard(signals.ConsumerBlocked) as told:
        drive(bench.consumer(note), lambda: bool(told))
    assert effects(bench) == []
    assert "the checksum is wrong. test.consumer has skipped nothing" in told[0].reason


def test_what_no_tier_has_blocks_as_before(bench: Archived) -> None:
    bench.fill()
    consumer = bench.consumer(note)
    bench.connection.execute("DELETE FROM events.archive_object WHERE first = 11")
    with heard(signals.ConsumerBlocked) as told:
        drive(consumer, lambda: bool(told))
    assert effects(bench) == list(range(1, 11))
    assert told[0].position == 11


# ── where a consumer starts ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("start", "expected", "is_late"),
    [
        ("earliest", 1, False),
        (7, 7, False),
        ("latest", LAST + 1, False),
        (datetime(2020, 1, 1, tzinfo=UTC), 1, False),
        (datetime(2100, 1, 1, tzinfo=UTC), LAST + 1, False),
    ],
)
def test_starts_are_as_if_nothing_had_been_pruned(
    bench: Archived, start: Start, expected: int, is_late: bool
) -> None:
    bench.fill()
    options = ConsumerOptions(stream_name="orders", name="new", start=start)
    archive = own_cold_tier(bench.settings, "orders", lambda: bench.connection)
    with heard(signals.ConsumerStartedLate) as told:
        assert Starts("events", archive).choose(bench.connection, "t.new", options) == expected
        assert bool(told) is is_late
        # Without the archive the same start is late, or where it was.
        assert Starts().choose(bench.connection, "t.new", options) == max(expected, ARCHIVED + 1)


class Kept:
    """What is kept outside of the archive."""

    def bounds(self) -> Bounds:
        return Bounds(20, 29)

    def position_at(self, moment: datetime) -> int | None:
        return 20 if moment < NOON else None


class Objects:
    """An archive of a range; its events were sent a minute apart."""

    def __init__(self, first: int, last: int) -> None:
        self.range = (first, last)

    def bounds(self) -> tuple[int, int] | None:
        return self.range

    def read(self, after: int, count: int) -> list[tuple[int, str]]:
        raise NotImplementedError

    def position_at(self, moment: datetime) -> int | None:
        return max(self.range[0], 20 - int((NOON - moment) / timedelta(minutes=1)))

    def close(self) -> None: ...


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_an_archive_that_does_not_reach_up_to_the_outbox_is_no_start() -> None:
    assert with_archive(Kept(), Objects(1, 19)).bounds() == (1, 29)
    assert with_archive(Kept(), Objects(5, 25)).bounds() == (5, 29)
    assert with_archive(Kept(), Objects(1, 18)).bounds() == (20, 29)
    assert with_archive(Kept(), Objects(1, 18)).position_at(NOON - timedelta(minutes=7)) == 20
    assert with_archive(Kept(), Objects(1, 19)).position_at(NOON - timedelta(minutes=7)) == 13
    assert with_archive(Kept(), None).bounds() == (20, 29)


# ── the books, replays, other services ─────────────────────────────────────────────────────────


def test_the_books_count_what_waits_in_the_archive_as_pending(bench: Archived) -> None:
    bench.fill()
    lane = bench.consumer(note, batch_size=7)
    assert not lane.step().is_idle
    report = Verify(bench.connection, bench.settings).run()
    assert report.balance, report.findings
    ((books,),) = [stream.consumers for stream in report.streams]
    assert (books.due, books.pruned, books.handled, books.pending) == (LAST, 7, 0, LAST - 7)
    bench.connection.execute("DELETE FROM events.archive_object WHERE first = 1")
    report = Verify(bench.connection, bench.settings).run()
    assert [(f.anomaly.name, f.count) for f in report.findings] == [("LOST", 3)]


def test_a_replay_is_planned_over_all_tiers(bench: Archived) -> None:
    bench.fill()
    run_until_idle(bench.consumer(note))
    planner = ReplayPlanner(bench.connection, bench.settings)
    plan = planner.plan(ReplayRequest(original="test.consumer", first=2))
    assert [(share.tier, share.first, share.last) for share in plan.shares] == [
        ("archive", 2, ARCHIVED),
        ("outbox", ARCHIVED + 1, ARCHIVED + WARM),
        ("hot log", ARCHIVED + WARM + 1, LAST),
    ]
    since = datetime.now(UTC) - timedelta(hours=1)
    plan = planner.plan(ReplayRequest(original="test.consumer", since=since))
    assert (plan.replay.first, plan.replay.last, plan.events) == (1, LAST, LAST)


@contextmanager
def producing(database_url: str, redis_url: str, tmp_path: Path) -> Iterator[ArchivedProducer]:
    with closing(ArchivedProducer(database_url, redis_url, **settings_of(tmp_path))) as opened:
        yield opened


class ArchivedProducer(Producer, Archived):
    """A service whose stream others read, down to its archive."""


def test_another_service_reads_the_archive_by_its_manifest_alone(
    database_url: str, redis_url: str, template_database: str, tmp_path: Path
) -> None:
    from tests.databases import new_database

    with (
        producing(database_url, redis_url, tmp_path) as producer,
        new_database(database_url, template_database) as own_url,
    ):
        producer.send(ARCHIVED)
        producer.publish()
        producer.archive(keep_from=ARCHIVED + 1)
        producer.forget_hot_log()
        producer.published(WARM)
        source = {
            "redis_url": redis_url,
            "mac_key": producer.mac_key,
            "archive_url": str(tmp_path / "archive"),
        }
        with (
            closing(Reader(own_url, None, **source)) as reader,
            heard(signals.HotWindowOnly, signals.ConsumerStartedLate) as told,
        ):
            reader.run(1, ARCHIVED + WARM)
            assert all(each == sorted(each) for each in reader.handled_by_key().values())
            assert told == []


def test_a_hole_between_the_archive_and_the_hot_log_blocks_nobody(
    database_url: str, redis_url: str, template_database: str, tmp_path: Path
) -> None:
    from tests.databases import new_database

    with (
        producing(database_url, redis_url, tmp_path) as producer,
        new_database(database_url, template_database) as own_url,
        closing(redis.Redis.from_url(redis_url, protocol=2)) as client,
    ):
        producer.published(ARCHIVED)
        producer.archive(keep_from=ARCHIVED + 1)
        producer.connection.execute("UPDATE events.stream SET timeline = '00000000'")
        producer.published(1)
        hole_last = producer.head() - 1
        client.xtrim(log_key("orders"), minid=f"{hole_last}-0", approximate=False)
        source = {
            "redis_url": redis_url,
            "mac_key": producer.mac_key,
            "archive_url": str(tmp_path / "archive"),
        }
        with (
            closing(Reader(own_url, None, **source)) as reader,
            heard(signals.ConsumerBlocked) as blocked,
            reader.working(),
        ):
            wait_until(lambda: len(reader.handled()) == ARCHIVED + 1, what="all is handled")
            assert blocked == []


def test_without_an_archive_no_cold_tier_is_opened(database_url: str) -> None:
    assert own_cold_tier(Settings(database_url=database_url), "orders", pytest.fail) is None
