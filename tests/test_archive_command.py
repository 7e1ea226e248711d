"""`penstock archive`: what is archived, whether it is whole, and what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.running import choose_roles
from penstock.core.archive import manifest_name, object_name
from penstock.core.settings import Settings
from penstock.errors import UsageError
from tests.archiving import STREAM, archiver, checkpoint, publish, settings_for
from tests.publishing import ask
from tests.test_cli import Penstock


@pytest.fixture
def settings(database_url: str, tmp_path: Path) -> Settings:
    """Twenty-five events, of which twenty are archived."""
    settings = settings_for(database_url, tmp_path / "archive")
    publish(settings, 25)
    with archiver(settings) as running:
        running.archive_all()
    return settings


@pytest.fixture
def penstock(tmp_path: Path, settings: Settings, capsys: pytest.CaptureFixture[str]) -> Penstock:
    variables = {
        "PENSTOCK_DATABASE_URL": settings.database_url,
        "PENSTOCK_ARCHIVE_URL": str(settings.archive_url),
    }
    return Penstock(tmp_path, variables, capsys)


def stored(settings: Settings, name: str) -> Path:
    return Path(str(settings.archive_url), name)


def test_list_shows_objects_and_what_waits(penstock: Penstock) -> None:
    [archive] = json.loads(penstock("archive", "list", "--json").stdout)
    assert (archive["checkpoint"], archive["head"], archive["waiting"]) == (20, 25, 5)
    assert [each["name"] for each in archive["objects"]] == [
        object_name(STREAM, 1, 10),
        object_name(STREAM, 11, 20),
    ]
    assert object_name(STREAM, 11, 20) in penstock("archive", "list").stdout
    assert penstock("archive", "list", "--stream", "nobody", code=2).stdout == ""


def test_a_whole_archive_is_proved(penstock: Penstock) -> None:
    said = penstock("archive", "verify").stdout
    assert said == (
        "orders: 1..20, 20 events in 2 objects: contiguous, checksums right, no overlap.\n"
    )


def test_get_prints_lines_of_one_position_or_a_range(penstock: Penstock) -> None:
    line = json.loads(penstock("archive", "get", "orders/12").stdout)
    assert (line["position"], line["payload"]) == (12, 11)
    lines = penstock("archive", "get", "orders", "9", "12").stdout.splitlines()
    assert [json.loads(each)["position"] for each in lines] == [9, 10, 11, 12]
    assert len(json.loads(penstock("archive", "get", "orders", "9", "12", "--json").stdout)) == 4
    refused = penstock("archive", "get", "orders", "19", "22", code=1)
    assert "orders/21 is not archived" in refused.stderr
    assert penstock("archive", "get", "orders", code=2).stdout == ""


def test_every_kind_of_damage_is_found(penstock: Penstock, settings: Settings) -> None:
    first, second = (stored(settings, object_name(STREAM, *r)) for r in ((1, 10), (11, 20)))
    data = second.read_bytes()
    second.write_bytes(data[:-1])
    said = penstock("archive", "verify", code=1).stdout
    assert "instead of" in said
    assert "another checksum" in said
    second.unlink()
    assert "is not in the store" in penstock("archive", "verify", code=1).stdout
    second.write_bytes(data)
    stray = stored(settings, object_name(STREAM, 5, 12))
    stray.write_bytes(first.read_bytes())
    assert "not in the books" in penstock("archive", "verify", code=1).stdout
    stray.unlink()
    manifest = stored(settings, manifest_name(STREAM))
    listed = json.loads(manifest.read_text())
    listed["objects"][0]["events"] = 11
    manifest.write_text(json.dumps(listed))
    [proof] = json.loads(penstock("archive", "verify", "--json", code=1).stdout)
    assert "manifest" in proof["findings"][0]["what"]


def test_what_the_books_leave_out_or_have_twice_is_found(
    penstock: Penstock, settings: Settings
) -> None:
    move = "UPDATE events.archive_object SET first = %s WHERE last = 20"
    ask(settings.database_url, move, 13)
    assert "positions 11..12 are in no object" in penstock("archive", "verify", code=1).stdout
    ask(settings.database_url, move, 9)
    assert "overlap" in penstock("archive", "verify", code=1).stdout


def test_a_store_that_is_away_proves_nothing(penstock: Penstock, settings: Settings) -> None:
    folder = Path(str(settings.archive_url))
    folder.rename(folder.with_name("elsewhere"))
    assert "neither proved nor refuted" in penstock("archive", "verify", code=75).stderr


def test_an_archiver_can_be_forgotten_only_where_nobody_archives(
    penstock: Penstock, settings: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "archive_url is set" in penstock("archive", "forget", "orders", "--yes", code=1).stderr
    without = Penstock(tmp_path, {"PENSTOCK_DATABASE_URL": settings.database_url}, capsys)
    assert "up to 20" in without("archive", "forget", "orders", "--yes").stdout
    assert checkpoint(settings.database_url) is None
    # What is archived stays so, and archiving goes on behind it.
    with archiver(settings) as running:
        publish(settings, 5)
        running.archive_all()
    assert checkpoint(settings.database_url) == 30
    assert "1..30" in penstock("archive", "verify").stdout


# ── penstock run ───────────────────────────────────────────────────────────────────────────────


def test_without_a_flag_the_archiver_runs_where_there_is_an_archive() -> None:
    def chosen(*, archiver: bool = False, has_archive: bool = True) -> list[str]:
        return choose_roles(
            ["a"], publisher=False, globs=(), archiver=archiver, has_archive=has_archive
        )

    assert chosen() == ["publisher", "archiver", "consumer:a"]
    assert chosen(has_archive=False) == ["publisher", "consumer:a"]
    assert chosen(archiver=True) == ["archiver"]
    with pytest.raises(UsageError, match="PENSTOCK_ARCHIVE_URL"):
        chosen(archiver=True, has_archive=False)
