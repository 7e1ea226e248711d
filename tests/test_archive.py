"""The archive: every position in exactly one object, whoever dies when."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from penstock.core.archive import manifest_name, object_name
from penstock.core.settings import Settings
from penstock.errors import (
    ArchiveDamaged,
    LeaseLost,
    ServerUnavailable,
    ServerUnsuitable,
    SettingsError,
)
from penstock.pipeline import stream_archive
from penstock.pipeline.janitor import Janitor
from penstock.stores import archive_manifest, objects
from penstock.stores.cold_tier import ColdTier, own_cold_tier, source_cold_tier
from penstock.stores.objects import ObjectStore, open_store
from penstock.telemetry import signals
from penstock.telemetry.signals import Signal
from tests.archiving import (
    STREAM,
    ArchiveWorker,
    archived,
    archiver,
    checkpoint,
    expire,
    publish,
    ranges,
    settings_for,
    warm_rows,
)
from tests.publishing import Crash, ask, at, crash, told


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    return settings_for(database_url, tmp_path / "archive")


@pytest.fixture
def tiers(settings: Settings) -> Iterator[Callable[[], tuple[ColdTier, ColdTier]]]:
    """Opens the archive: by the table, and by the manifest alone."""
    with psycopg.connect(settings.database_url, autocommit=True) as connection:

        def opened() -> tuple[ColdTier, ColdTier]:
            own = own_cold_tier(settings, STREAM, lambda: connection)
            assert own is not None
            return own, source_cold_tier(str(settings.archive_url), STREAM)

        yield opened


Tiers = Callable[[], tuple[ColdTier, ColdTier]]


def read_all(tier: ColdTier, count: int = 7) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    while rows := tier.read(found[-1][0] if found else 0, count):
        found += rows
    return found


def files(settings: Settings) -> list[str]:
    assert settings.archive_url is not None
    folder = Path(settings.archive_url)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# ── cutting ────────────────────────────────────────────────────────────────────────────────────


def test_what_is_archived_reads_as_it_did_in_the_outbox(settings: Settings, tiers: Tiers) -> None:
    publish(settings, 30, key="k", metadata={"payload": ',"payload":'})
    with archiver(settings) as running:
        running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 20), (21, 30)]
    for tier in tiers():
        assert tier.bounds() == (1, 30)
        assert read_all(tier) == warm_rows(settings.database_url)
        tier.close()
    first = Path(str(settings.archive_url), object_name(STREAM, 1, 10))
    import zstandard

    lines = zstandard.ZstdDecompressor().stream_reader(first.read_bytes()).read().splitlines()
    assert [json.loads(line)["position"] for line in lines] == list(range(1, 11))


def test_an_object_is_cut_by_age_where_few_events_come(settings: Settings) -> None:
    publish(settings, 3)
    with archiver(settings) as running:
        assert running.step() == 0
        ask(
            settings.database_url,
            "UPDATE events.outbox_event SET created_at = created_at - interval '301 s'",
        )
        assert running.step() == 3
    assert ranges(settings) == [(1, 3)]


def test_an_object_is_cut_by_size(database_url: str, tmp_path: Path) -> None:
    settings = settings_for(database_url, tmp_path, archive_count_max=100_000)
    publish(settings, 300, metadata={"filling": "x" * 1000})
    small = settings_for(
        database_url, tmp_path, archive_count_max=100_000, archive_bytes_max=100_000
    )
    with archiver(settings) as running:
        assert running.step() == 0
    with archiver(small) as running:
        assert running.step() == 100
        assert running.step() == 100


def test_a_hole_is_a_line_of_its_object_and_belongs_to_its_range(
    settings: Settings, tiers: Tiers
) -> None:
    publish(settings, 8)
    ask(
        settings.database_url,
        "INSERT INTO events.hole (stream_name, first, last, reason) VALUES (%s, 9, 108, 'test')",
        STREAM,
    )
    ask(settings.database_url, "UPDATE events.stream SET head = 108")
    publish(settings, 12)
    with archiver(settings) as running:
        running.archive_all()
    assert ranges(settings) == [(1, 109), (110, 119)]
    assert read_all(tiers()[0]) == warm_rows(settings.database_url)[:-1]


def test_every_stream_has_its_own_archive(settings: Settings) -> None:
    for stream_name in ("orders", "orders/eu", "orders.eu"):
        publish(settings, 10, stream_name)
    with archiver(settings) as running:
        running.archive_all()
    for stream_name in ("orders", "orders/eu", "orders.eu"):
        assert ranges(settings, stream_name) == [(1, 10)]
    assert object_name("orders/eu", 1, 10) in files(settings)


def test_an_event_is_found_by_the_time_at_which_it_was_sent(
    settings: Settings, tiers: Tiers
) -> None:
    publish(settings, 20)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    for position in range(1, 21):
        ask(
            settings.database_url,
            "UPDATE events.outbox_event SET created_at = %s WHERE position = %s",
            start + timedelta(hours=position),
            position,
        )
    with archiver(settings) as running:
        running.archive_all()
    for tier in tiers():
        assert tier.position_at(start) == 1
        assert tier.position_at(start + timedelta(hours=12, seconds=1)) == 13
        assert tier.position_at(start + timedelta(hours=21)) is None


# ── crashes and rivals ─────────────────────────────────────────────────────────────────────────

CRASH_POINTS: list[type[Signal]] = [
    signals.ArchiveBegun,
    signals.ArchiveOpened,
    signals.ObjectPlanned,
    signals.ObjectStored,
    signals.ObjectArchived,
    signals.ManifestWritten,
]


@pytest.mark.parametrize("signal_type", CRASH_POINTS)
def test_a_crash_anywhere_leaves_neither_overlap_nor_hole(
    settings: Settings, tiers: Tiers, signal_type: type[Signal]
) -> None:
    publish(settings, 25)
    dying = ArchiveWorker(settings)
    with at(signal_type, crash), pytest.raises(Crash):
        dying.archive_all()
    dying.die()
    # More has come meanwhile, and objects may be larger now: what was planned stays as it was.
    publish(settings, 15)
    with archiver(settings_for(settings.database_url, str(settings.archive_url))) as running:
        running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 20), (21, 30), (31, 40)]
    for tier in tiers():
        assert read_all(tier) == warm_rows(settings.database_url)
    assert [name for name in files(settings) if name.endswith(".zst")] == [
        found.name for found in archived(settings)
    ]


def test_a_planned_range_is_finished_as_planned_under_other_limits(settings: Settings) -> None:
    publish(settings, 40)
    dying = ArchiveWorker(settings)
    with at(signals.ObjectPlanned, crash), pytest.raises(Crash):
        dying.step()
    dying.die()
    larger = settings_for(settings.database_url, str(settings.archive_url), archive_count_max=15)
    with archiver(larger) as running:
        running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 25), (26, 40)]


def test_an_object_that_was_stored_and_not_recorded_is_adopted(settings: Settings) -> None:
    publish(settings, 10)
    dying = ArchiveWorker(settings)
    with at(signals.ObjectStored, crash), pytest.raises(Crash):
        dying.step()
    dying.die()
    with told(signals.ObjectAdopted) as adopted, archiver(settings) as running:
        running.archive_all()
    assert len(adopted) == 1
    assert checkpoint(settings.database_url) == 10


def test_what_a_dying_archiver_could_not_list_is_listed_by_its_successor(
    settings: Settings, tiers: Tiers
) -> None:
    publish(settings, 10)
    dying = ArchiveWorker(settings)
    with at(signals.ObjectArchived, crash), pytest.raises(Crash):
        dying.step()
    dying.die()
    assert tiers()[1].bounds() is None
    with archiver(settings) as running:
        running.step()
    assert tiers()[1].bounds() == (1, 10)


def test_an_archiver_that_stood_still_records_nothing_after_its_successor(
    settings: Settings,
    tiers: Tiers,
) -> None:
    publish(settings, 20)
    late = ArchiveWorker(settings)

    def succeed() -> None:
        expire(settings.database_url)
        with archiver(settings) as successor:
            successor.archive_all()

    with told(signals.LeaseLost) as lost, at(signals.ObjectPlanned, succeed):
        late.step()
    late.close()
    assert lost
    assert ranges(settings) == [(1, 10), (11, 20)]
    assert read_all(tiers()[1]) == warm_rows(settings.database_url)


def test_an_archiver_that_stood_still_hides_nothing_that_its_successor_has_listed(
    settings: Settings, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(settings, 20)
    late = ArchiveWorker(settings)
    write = archive_manifest.write_manifest

    def write_late(*listed: Any) -> None:
        monkeypatch.setattr(stream_archive, "write_manifest", write)
        expire(settings.database_url)
        with archiver(settings) as successor:
            successor.archive_all()
        assert tiers()[1].bounds() == (1, 20)
        write(*listed)

    monkeypatch.setattr(stream_archive, "write_manifest", write_late)
    late.step()
    late.close()
    assert tiers()[1].bounds() == (1, 20)


def test_the_fence_refuses_a_plan_of_another_term(settings: Settings) -> None:
    publish(settings, 10)
    late = ArchiveWorker(settings)
    ask(settings.database_url, "SELECT events.ensure_archiver('orders')")
    lease = late.keeper.acquire(late.archiver._connection, STREAM, "archiver")
    assert lease is not None
    packed = late.archiver._bench.cutter.cut(late.archiver._connection, STREAM, 0)
    assert packed is not None
    ask(settings.database_url, "UPDATE events.stream_lease SET term = term + 1")
    with pytest.raises(LeaseLost):
        late.archiver._table.plan(late.archiver._connection, lease, packed.plan)
    late.die()


def test_objects_that_a_failover_made_unknown_are_moved_aside(
    settings: Settings, tiers: Tiers
) -> None:
    publish(settings, 20)
    with archiver(settings) as running:
        running.archive_all()
    # A standby took over that had not heard of the second object, nor of its events.
    ask(settings.database_url, "DELETE FROM events.archive_object WHERE first = 11")
    ask(settings.database_url, "UPDATE events.stream_lease SET checkpoint = 10")
    ask(settings.database_url, "UPDATE events.outbox_event SET payload = '7' WHERE position > 10")
    with told(signals.ObjectSuperseded) as superseded, archiver(settings) as running:
        running.archive_all()
    assert [signal.name for signal in superseded] == [object_name(STREAM, 11, 20)]
    assert superseded[0].moved_to in files(settings)
    assert ranges(settings) == [(1, 10), (11, 20)]
    for tier in tiers():
        assert read_all(tier) == warm_rows(settings.database_url)


def test_another_object_under_the_planned_name_is_refused_and_kept(settings: Settings) -> None:
    publish(settings, 10)
    dying = ArchiveWorker(settings)
    with at(signals.ObjectPlanned, crash), pytest.raises(Crash):
        dying.step()
    dying.die()
    path = Path(str(settings.archive_url), object_name(STREAM, 1, 10))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"mine")
    with told(signals.ArchiveRefused) as refused, archiver(settings) as running:
        assert running.step() == 0
        assert running.step() == 0
        assert path.read_bytes() == b"mine"
        assert len(refused) == 1
        path.unlink()
        running.archive_all()
    assert ranges(settings) == [(1, 10)]


# ── the store ──────────────────────────────────────────────────────────────────────────────────


def test_a_store_that_overwrites_is_refused(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overwriting(self: ObjectStore, name: str, data: bytes) -> bool:
        self.put(name, data)
        return True

    monkeypatch.setattr(ObjectStore, "put_if_absent", overwriting)
    publish(settings, 10)
    with archiver(settings) as running, pytest.raises(ServerUnsuitable, match="If-None-Match"):
        running.step()
    assert ranges(settings) == []


def test_a_store_that_is_away_is_said_once_and_loses_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(settings, 20)
    real, is_away = ObjectStore.put_if_absent, [True]

    def failing(self: ObjectStore, name: str, data: bytes) -> bool:
        if is_away[0]:
            raise ServerUnavailable("gone fishing")
        return real(self, name, data)

    monkeypatch.setattr(objects.ObjectStore, "put_if_absent", failing)
    with (
        told(signals.ServerLost, signals.ServerFound) as heard,
        archiver(settings) as running,
    ):
        for _ in range(3):
            assert running.step() == 0
            running.archiver._outage._retry_at = 0.0
        is_away[0] = False
        running.archive_all()
    assert [type(signal) for signal in heard] == [signals.ServerLost, signals.ServerFound]
    assert ranges(settings) == [(1, 10), (11, 20)]


@pytest.mark.parametrize("is_mount_point_left", [True, False])
@pytest.mark.parametrize("is_running", [True, False])
def test_a_folder_that_lost_its_volume_is_waited_for_and_not_begun_anew(
    settings: Settings, tiers: Tiers, *, is_mount_point_left: bool, is_running: bool
) -> None:
    publish(settings, 10)
    folder = Path(str(settings.archive_url))
    away = folder.with_name("volume")
    with ExitStack() as stack:
        first = stack.enter_context(archiver(settings))
        first.archive_all()
        folder.rename(away)
        if is_mount_point_left:
            folder.mkdir()
        # A stream that has never been archived is none of the place's either.
        publish(settings, 10, "returns")
        publish(settings, 10)
        running = first if is_running else stack.enter_context(archiver(settings))
        if not is_running:
            expire(settings.database_url)
        with told(signals.ServerLost) as lost:
            for _ in range(3):
                assert running.step() == 0
                running.archiver._outage._retry_at = 0.0
        assert [signal for signal in lost if "mounted" in signal.error]
        with pytest.raises(ServerUnavailable):
            tiers()[0].read(0, 10)
        assert not folder.exists() or not list(folder.iterdir())
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)
        running.archive_all()
    assert ranges(settings) == [(1, 10), (11, 20)]
    assert ranges(settings, "returns") == [(1, 10)]


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: b"x" + data[1:], None])
def test_a_damaged_object_is_never_given_out(
    settings: Settings, tiers: Tiers, damage: Callable[[bytes], bytes] | None
) -> None:
    publish(settings, 20)
    with archiver(settings) as running:
        running.archive_all()
    path = Path(str(settings.archive_url), object_name(STREAM, 11, 20))
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    for tier in tiers():
        assert len(tier.read(0, 100)) == 10
        with pytest.raises(ArchiveDamaged, match="archive verify"):
            tier.read(10, 100)


def test_a_manifest_that_is_no_manifest_is_said_to_be_none(settings: Settings) -> None:
    path = Path(str(settings.archive_url), manifest_name(STREAM))
    path.parent.mkdir(parents=True)
    path.write_text('{"format": 1, "stream": "others", "objects": []}')
    with pytest.raises(ArchiveDamaged, match="manifest"):
        source_cold_tier(str(settings.archive_url), STREAM).bounds()


def test_an_archive_that_nobody_has_begun_is_empty(settings: Settings, tiers: Tiers) -> None:
    Path(str(settings.archive_url)).mkdir()
    for tier in tiers():
        assert tier.bounds() is None
        assert tier.read(0, 10) == []


def test_an_address_that_names_no_store_is_refused_without_its_password() -> None:
    with pytest.raises(SettingsError) as refused:
        open_store("ftp://me:hunter2@host/x")
    assert "hunter2" not in str(refused.value)


# ── pruning ────────────────────────────────────────────────────────────────────────────────────


def prune(settings: Settings) -> None:
    from penstock.runtime.leases import LeaseKeeper

    with closing(LeaseKeeper(settings)) as keeper, closing(Janitor(settings, keeper)) as janitor:
        while not janitor.step().is_idle:
            pass


def test_nothing_is_pruned_ahead_of_the_archiver_not_even_before_it_has_run(
    settings: Settings,
) -> None:
    publish(settings, 20)
    ask(
        settings.database_url,
        "UPDATE events.outbox_event SET published_at = published_at - interval '30 days'",
    )
    prune(settings)
    assert len(warm_rows(settings.database_url)) == 20
    with archiver(settings) as running:
        assert running.step() == 10
    prune(settings)
    assert [position for position, _ in warm_rows(settings.database_url)] == list(range(11, 21))


def test_an_archive_begins_behind_what_was_pruned_before(settings: Settings) -> None:
    publish(settings, 20)
    ask(settings.database_url, "DELETE FROM events.outbox_event WHERE position <= 5")
    with told(signals.ArchiveBegun) as begun, archiver(settings) as running:
        running.archive_all()
    assert begun == [signals.ArchiveBegun(STREAM, 6)]
    assert ranges(settings) == [(6, 15)]


def test_rows_that_vanished_are_said_and_not_skipped(settings: Settings) -> None:
    publish(settings, 20)
    with archiver(settings) as running:
        running.step()
        ask(settings.database_url, "DELETE FROM events.outbox_event WHERE position = 13")
        with told(signals.ArchiveRefused) as refused:
            assert running.step() == 0
    assert "position 13" in refused[0].reason
    assert ranges(settings) == [(1, 10)]
