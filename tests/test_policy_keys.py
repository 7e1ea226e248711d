"""Data keys that are wrapped anew or shredded while others work with them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from penstock.core.settings import Settings
from penstock.core.wrapped_keys import decode_keys
from penstock.errors import KeyRefused, KeyUnavailable
from penstock.ops.policy_keys import rewrap, rotate, shred
from penstock.stores import sealing
from penstock.stores.key_copies import ArchiveShelf, KeyCopies
from penstock.stores.kms import NewKey
from penstock.stores.kms.key_file import KeyFile
from penstock.stores.kms.protocol import Context
from penstock.stores.objects import open_store
from penstock.stores.unwrapping import unwrapping
from penstock.telemetry import signals
from tests.archiving import archiver, settings_for
from tests.publishing import worker
from tests.signing import keys_of
from tests.test_consumer import heard
from tests.vault import STREAM, Admitted, Vault, new_key_file


@pytest.fixture
def vault(database_url: str, tmp_path: Path) -> Iterator[Vault]:
    vault = Vault(database_url, None, new_key_file(tmp_path))
    vault.make_confidential()
    yield vault
    vault.close()


@pytest.fixture
def new(tmp_path: Path) -> str:
    """A wrapping key that nobody has used yet."""
    return f"file:{tmp_path / 'new.key'}"


def wrapping_keys(vault: Vault) -> list[str]:
    """What the data keys are wrapped with, by version, and what the next one will be."""
    rows = vault.connection.execute("SELECT kms_key_id FROM events.data_key ORDER BY version")
    (following,) = vault.row("SELECT kms_key_id FROM events.stream_policy")
    return [*(kms_key_id for (kms_key_id,) in rows), following]


def rotate_elsewhere(vault: Vault) -> None:
    with psycopg.connect(vault.database_url, autocommit=True) as connection:
        rotate(connection, Settings(**vault.settings), STREAM, by="janitor")


def at_wrapping(
    monkeypatch: pytest.MonkeyPatch, kms_key_id: str, turn: int, act: Callable[[], None]
) -> None:
    """Something happens while a key is wrapped for the so-many-th time with this KMS key."""
    wrap, turns = KeyFile.wrap, [0]

    def wrap_late(self: KeyFile, secret: bytes, context: Context) -> NewKey:
        wrapped = wrap(self, secret, context)
        if wrapped.kms_key_id == kms_key_id:
            turns[0] += 1
            if turns[0] == turn:
                act()
        return wrapped

    monkeypatch.setattr(KeyFile, "wrap", wrap_late)


@pytest.mark.parametrize("turn", [1, 2])
def test_a_rotation_during_a_rewrap_leaves_no_key_with_the_former_kms_key(
    vault: Vault, new: str, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    vault.send("one")
    at_wrapping(monkeypatch, new, turn, lambda: rotate_elsewhere(vault))
    done, _ = rewrap(vault.connection, Settings(**vault.settings), STREAM, new, by="test")
    assert (done, wrapping_keys(vault)) == (3, [new] * 4)
    # What the documentation advises afterwards.
    Path(vault.kms_key_id.removeprefix("file:")).unlink()
    unwrapping.cache_clear()
    sealing.forget()
    vault.send("two")
    seen: list[str] = []

    def note(event: Admitted) -> None:
        seen.append(event.diagnosis)

    with vault.working(note):
        vault.wait_for_outcomes("handled", "handled")
    assert seen == ["one", "two"]


def test_a_rewrap_that_is_killed_in_the_middle_is_finished_by_the_next(
    vault: Vault, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        at_wrapping(patched, new, 1, lambda: rotate_elsewhere(vault))
        # Of the key that the rotation made, after all others.
        at_wrapping(patched, new, 3, crash)
        with pytest.raises(KeyboardInterrupt):
            rewrap(vault.connection, Settings(**vault.settings), STREAM, new, by="test")
    old = vault.kms_key_id
    assert wrapping_keys(vault) == [new, new, old, new]
    rewrap(vault.connection, Settings(**vault.settings), STREAM, None, by="test")
    assert wrapping_keys(vault) == [new] * 4


@pytest.mark.parametrize("turn", [1, 2])
def test_a_kms_key_that_cannot_be_used_changes_nothing(
    vault: Vault, new: str, monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    def fail() -> None:
        raise KeyUnavailable("not now")

    at_wrapping(monkeypatch, new, turn, fail)
    with pytest.raises(KeyUnavailable):
        rewrap(vault.connection, Settings(**vault.settings), STREAM, new, by="test")
    assert wrapping_keys(vault) == [vault.kms_key_id] * 3


def test_a_kms_key_that_does_not_give_back_what_it_wrapped_changes_nothing(
    vault: Vault, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwrap = KeyFile.unwrap

    def unwrap_wrong(self: KeyFile, wrapped: bytes, context: Context) -> bytes:
        secret = unwrap(self, wrapped, context)
        return b"x" * 32 if str(self._path) in new else secret

    monkeypatch.setattr(KeyFile, "unwrap", unwrap_wrong)
    with pytest.raises(KeyRefused, match="another one"):
        rewrap(vault.connection, Settings(**vault.settings), STREAM, new, by="test")
    assert wrapping_keys(vault) == [vault.kms_key_id] * 3


# ── copies ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def archived(vault: Vault, tmp_path: Path) -> Settings:
    """The settings of a service that archives the vault's events."""
    (tmp_path / "archive").mkdir()
    return settings_for(vault.database_url, tmp_path / "archive", archive_count_max=1)


def shred_first(vault: Vault, settings: Settings) -> None:
    """From now on nobody is to have version 1."""
    with psycopg.connect(vault.database_url, autocommit=True) as connection:
        rotate(connection, settings, STREAM, by="test")
        sealing.forget()
        assert shred(connection, settings, STREAM, 1, by="test").is_complete


def copied(settings: Settings) -> list[tuple[int, bool]]:
    """The versions in the archive's copy, and which of them are shredded."""
    copy = Path(str(settings.archive_url), STREAM, "keys.json").read_bytes()
    found = decode_keys(STREAM, copy, keys_of(settings.database_url))
    return [(key.version, key.is_shredded) for key in found]


def test_who_stood_still_before_copying_keys_brings_no_shredded_one_back(
    vault: Vault, archived: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    vault.send("one")
    with worker(archived) as publisher:
        publisher.publish_all()
    write = ArchiveShelf.write_keys

    def write_late(self: ArchiveShelf, stream_name: str, copy: bytes) -> None:
        monkeypatch.setattr(ArchiveShelf, "write_keys", write)
        shred_first(vault, archived)
        assert copied(archived) == [(1, True), (2, False)]
        write(self, stream_name, copy)

    monkeypatch.setattr(ArchiveShelf, "write_keys", write_late)
    with archiver(archived) as running:
        running.archive_all()
        assert copied(archived) == [(1, True), (2, False)]


def test_a_volume_that_is_not_mounted_still_has_its_copy(vault: Vault, archived: Settings) -> None:
    vault.send("one")
    with worker(archived) as publisher:
        publisher.publish_all()
    with archiver(archived) as running:
        running.archive_all()
    folder = Path(str(archived.archive_url))
    folder.rename(folder.with_name("volume"))
    folder.mkdir()
    rotate(vault.connection, archived, STREAM, by="test")
    done = shred(vault.connection, archived, STREAM, 1, by="test")
    assert not done.is_complete
    assert "mounted" in str(done.copies[-1].problem)
    assert not list(folder.iterdir())


def test_a_copy_that_arrives_after_all_is_replaced_without_another_object(
    vault: Vault, archived: Settings
) -> None:
    vault.send("one")
    with worker(archived) as publisher:
        publisher.publish_all()
    path = Path(str(archived.archive_url), STREAM, "keys.json")
    with archiver(archived) as running:
        running.archive_all()
        late = path.read_bytes()
        shred_first(vault, archived)
        path.write_bytes(late)
        assert copied(archived) == [(1, False)]
        running.archiver._next_copying_at = 0.0
        assert running.step() == 0
        assert copied(archived) == [(1, True), (2, False)]


def test_what_a_killed_writer_left_of_a_copy_goes_with_the_shredded_key(
    vault: Vault, archived: Settings
) -> None:
    folder = Path(str(archived.archive_url), STREAM)
    rotate(vault.connection, archived, STREAM, by="test")
    # Where the bytes are until the file gets its name.
    for name in ("keys.json#1", "keys.json#3"):
        (folder / name).write_bytes((folder / "keys.json").read_bytes())
    assert shred(vault.connection, archived, STREAM, 1, by="test").is_complete
    assert [path.name for path in folder.iterdir()] == ["keys.json"]
    assert copied(archived) == [(1, True), (2, False)]


def test_the_archiver_removes_what_a_killed_writer_left_of_a_copy(
    vault: Vault, archived: Settings
) -> None:
    vault.send("one")
    with worker(archived) as publisher:
        publisher.publish_all()
    left = Path(str(archived.archive_url), STREAM, "keys.json#1")
    with archiver(archived) as running:
        running.archive_all()
        left.write_bytes(left.with_name("keys.json").read_bytes())
        running.archiver._next_copying_at = 0.0
        assert running.step() == 0
        assert not left.exists()


def test_a_writer_whose_half_written_copy_was_removed_writes_again(
    vault: Vault, archived: Settings
) -> None:
    store = open_store(str(archived.archive_url))
    copies = KeyCopies(archived, ArchiveShelf(store), "test")
    copies.refresh(vault.connection, STREAM)
    done = threading.Event()

    def sweep() -> None:
        while not done.is_set():
            store.remove_leftovers(f"{STREAM}/keys.json")

    rival = threading.Thread(target=sweep)
    rival.start()
    try:
        for _ in range(300):
            Path(str(archived.archive_url), STREAM, "keys.json").write_bytes(b"another")
            copies.refresh(vault.connection, STREAM)
            assert copied(archived) == [(1, False)]
    finally:
        done.set()
        rival.join()


def test_a_copy_that_cannot_be_written_holds_up_no_other_stream(
    vault: Vault, archived: Settings
) -> None:
    for stream_name in ("a", "z"):
        vault.make_confidential(stream_name=stream_name)
    folder = Path(str(archived.archive_url))
    # In the way of the file.
    (folder / STREAM / "keys.json").mkdir(parents=True)
    copies = KeyCopies(archived, ArchiveShelf(open_store(str(folder))), "archiver")
    with heard(signals.ServerLost) as lost, heard(signals.ServerFound) as found:
        for _ in range(2):
            copies.refresh_all(vault.connection, ["a", STREAM, "z"])
        assert all((folder / name / "keys.json").is_file() for name in ("a", "z"))
        assert [each.server for each in lost] == [f"the copy of the data keys of {STREAM}"]
        (folder / STREAM / "keys.json").rmdir()
        copies.refresh_all(vault.connection, [STREAM])
    assert len(found) == 1
    assert copied(archived) == [(1, False)]
