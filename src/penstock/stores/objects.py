"""Object stores: S3 and whatever speaks like it, a directory, or memory for tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from penstock.core.archive import PROBES
from penstock.core.masking import masked_url
from penstock.errors import ServerUnavailable, ServerUnsuitable, SettingsError

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Backend

MEMORY = "memory://"
CONNECT_SECONDS = 5
# One object is at most tens of megabytes; whatever takes longer is away.
ANSWER_SECONDS = 60
# Whoever asks goes on asking by himself, and says so meanwhile.
RETRIES = 1
LISTED_AT_ONCE = 1000
# What is said where a file that was about to get its name is there no more.
_SWEPT = "Unable to rename file: No such file"


class WriteSwept(ServerUnavailable):
    """Somebody has removed what was half written of an object, so it was not stored."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a store lists."""

    name: str
    stored_bytes: int


class ObjectStore:
    """Named bytes, written once. Every method may raise ServerUnavailable or ServerUnsuitable."""

    def __init__(
        self, url: str, open_backend: Callable[[], Backend], folder: Path | None = None
    ) -> None:
        self.url = masked_url(url)
        """As anybody may see it."""
        self._open_backend = open_backend
        self._folder = folder

    @cached_property
    def _backend(self) -> Backend:
        return self._open_backend()

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Store an object, durably, unless one of that name is there; then it returns False."""
        obstore = _obstore()
        with self._asking():
            try:
                obstore.put(self._backend, name, data, mode="create")
            except obstore.exceptions.AlreadyExistsError:
                return False
            self._make_durable(name)
        return True

    def put(self, name: str, data: bytes) -> None:
        """Store an object, durably, in place of what is there.

        Raises WriteSwept where `remove_leftovers` came in between.
        """
        obstore = _obstore()
        with self._asking():
            try:
                obstore.put(self._backend, name, data, use_multipart=False)
            except obstore.exceptions.GenericError as error:
                if self._folder is not None and _SWEPT in str(error):
                    raise WriteSwept(
                        f"{name} in {self.url} (archive_url) was not written: what there was of it "
                        "was removed meanwhile. Nothing was lost; write it again."
                    ) from None
                raise
            self._make_durable(name)

    def get(self, name: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        obstore = _obstore()
        with self._asking():
            try:
                return bytes(obstore.get(self._backend, name).bytes())
            except (obstore.exceptions.NotFoundError, FileNotFoundError) as error:
                if self._is_gone(error):
                    raise
                return None

    def names(self, folder: str, after: str | None = None) -> Iterator[StoredObject]:
        """What lies in and below a folder, behind a name if one is given; in no certain order."""
        with self._asking():
            pages = _obstore().list(
                self._backend, f"{folder}/", offset=after, chunk_size=LISTED_AT_ONCE
            )
            for page in pages:
                for found in page:
                    yield StoredObject(found["path"], found["size"])

    def move_aside(self, name: str, to: str) -> None:
        """Give an object another name; after a crash in between it has both."""
        data = self.get(name)
        if data is not None:
            self.put_if_absent(to, data)
            self.delete(name)

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there is no trouble."""
        obstore = _obstore()
        with self._asking():
            try:
                obstore.delete(self._backend, name)
            except (obstore.exceptions.NotFoundError, FileNotFoundError):
                return

    def leftovers(self, name: str) -> list[str]:
        """What writers that were killed have left of an object, or are about to name so.

        Only a directory has any, and no list of objects tells of them.
        """
        if self._folder is None:
            return []
        path = self._folder / name
        with self._asking():
            beside = path.parent.iterdir() if path.parent.is_dir() else ()
            found = [each.name for each in beside if each.name.startswith(f"{path.name}#")]
        return [name.removesuffix(path.name) + each for each in sorted(found)]

    def remove_leftovers(self, name: str) -> None:
        """Remove those, durably. Who is writing just now has to write again."""
        found = self.leftovers(name)
        if self._folder is None or not found:
            return
        with self._asking():
            for left in found:
                (self._folder / left).unlink(missing_ok=True)
            self._make_durable(name.rpartition("/")[0])

    @property
    def is_directory(self) -> bool:
        """Whether a volume that is not mounted would look like an empty store."""
        return self._folder is not None

    def require_folders(self, folders: Iterable[str]) -> None:
        """Raise ServerUnavailable where this is a directory that lacks one of these."""
        if self._folder is None:
            return
        with self._asking():
            lacking = [name for name in folders if not (self._folder / name).is_dir()]
        if lacking:
            raise ServerUnavailable(
                f"{self.url} (archive_url) has no folder {lacking[0]}, although objects were "
                "archived there: perhaps its volume is not mounted. Nothing was lost, and nothing "
                "is begun anew in its place; it is looked at again. If that folder is gone for "
                "good, make an empty one."
            )

    def require_put_if_absent(self, token: str) -> None:
        """Raise ServerUnsuitable unless a second object of the same name is refused."""
        probe = f"{PROBES}/probe-{token}"
        try:
            self.put_if_absent(probe, b"1")
            is_overwritten = self.put_if_absent(probe, b"2") or self.get(probe) != b"1"
        finally:
            self.delete(probe)
        if is_overwritten:
            raise ServerUnsuitable(
                f"{self.url} (archive_url) does not keep what is there: of two objects with one "
                "name it took the second, although told not to (If-None-Match). Two archivers "
                "could overwrite each other's, so nothing was archived. Use a store with "
                "conditional writes."
            )

    def _make_durable(self, name: str) -> None:
        """A directory's files survive a power cut only when they and their folders are synced."""
        if self._folder is None:
            return
        path = self._folder / name
        for part in (path, *path.parents):
            descriptor = os.open(part, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if part == self._folder:
                return

    def _is_gone(self, error: BaseException) -> bool:
        """Whether not an object is missing, but the place where it would be."""
        if self._folder is not None:
            return isinstance(error, FileNotFoundError) and not self._folder.exists()
        return "<Code>NoSuchBucket</Code>" in str(error)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        exceptions = _obstore().exceptions
        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise ServerUnsuitable(
                f"{self.url} (archive_url) refuses: {_first_line(error)} Nothing was lost. See to "
                "the rights of the credentials that the AWS_* variables name."
            ) from None
        except exceptions.NotSupportedError as error:
            raise ServerUnsuitable(
                f"{self.url} (archive_url) cannot do what an archive needs: {_first_line(error)}"
            ) from None
        except (exceptions.BaseError, OSError) as error:
            reason = (
                "there is no such bucket or folder." if self._is_gone(error) else _first_line(error)
            )
            raise ServerUnavailable(
                f"{self.url} (archive_url) cannot be used now: {reason} Nothing was "
                "lost; it is asked again."
            ) from None


def open_store(url: str, *, create: bool = False) -> ObjectStore:
    """The store behind an archive_url; a folder is made with `create`, when it is first used.

    Nothing is asked of it yet. Raises SettingsError.
    """
    if url == MEMORY:
        return ObjectStore(url, _memory)
    if url.startswith("s3://"):
        return ObjectStore(url, partial(_s3, url))
    if "://" in url and not url.startswith("file://"):
        raise SettingsError(
            f"archive_url={masked_url(url)!r} names no store that is known; write s3://bucket/"
            "prefix, file:///folder or the path of a folder."
        )
    folder = Path(unquote(urlsplit(url).path) if url.startswith("file://") else url).absolute()
    local = _obstore().store.LocalStore
    return ObjectStore(url, partial(local, folder, mkdir=create), folder)


def _s3(url: str) -> Backend:
    """Region, endpoint and credentials are found in the usual AWS_* variables."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    try:
        store: Backend = _obstore().store.S3Store.from_url(
            url,
            config={"endpoint": endpoint} if endpoint else None,
            client_options={
                "allow_http": (endpoint or "").startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                "timeout": timedelta(seconds=ANSWER_SECONDS),
            },
            retry_config={
                "max_retries": RETRIES,
                "retry_timeout": timedelta(seconds=ANSWER_SECONDS),
            },
        )
    except (ValueError, _obstore().exceptions.BaseError) as error:
        raise SettingsError(
            f"archive_url={masked_url(url)!r} cannot be understood: {_first_line(error)}"
        ) from None
    return store


@cache
def _memory() -> Backend:
    """One for the whole process, so that whoever opens it again finds what is there."""
    store: Backend = _obstore().store.MemoryStore()
    return store


@cache
def _obstore() -> ModuleType:
    try:
        import obstore  # noqa: PLC0415 - an extra, and only for who archives
        import obstore.store  # noqa: PLC0415
    except ImportError:
        raise SettingsError(
            'An archive needs more than the core: pip install "penstock[archive]".'
        ) from None
    return obstore


def _first_line(error: BaseException) -> str:
    """What a store says goes on for pages, with the request and its headers."""
    line = masked_url(str(error).strip().partition("\n")[0])[:300]
    return line if line.endswith(".") else f"{line}."
