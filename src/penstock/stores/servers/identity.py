"""Under whose name a server runs: PostgreSQL refuses root, everything else is content."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")
PROBE_SECONDS = 10.0


class Identity(StrEnum):
    """Who a server is for the operating system; the words are the shim's."""

    OWN = "own"
    NAMESPACE = "namespace"
    NOBODY = "nobody"


def through_shim(identity: Identity, command: list[str]) -> list[str]:
    """The command line that runs a command under an identity and ends it with this process."""
    # -I and -S keep the user's site-packages and environment out, and save half the start-up.
    return [sys.executable, "-I", "-S", str(SHIM), str(os.getpid()), identity, *command]


def identity_for_postgres() -> Identity:
    """The least intrusive identity under which PostgreSQL agrees to run here."""
    if os.geteuid() != 0:
        return Identity.OWN
    if os.environ.get("PENSTOCK_NO_USERNS") != "1" and _namespaces_are_allowed():
        return Identity.NAMESPACE
    return Identity.NOBODY


@functools.cache
def _namespaces_are_allowed() -> bool:
    # Containers, hardened kernels and macOS all refuse in ways of their own: trying is the test.
    if sys.platform != "linux":
        return False
    attempt = subprocess.run(  # noqa: S603 - our own shim
        through_shim(Identity.NAMESPACE, [sys.executable, "-I", "-S", "-c", ""]),
        capture_output=True,
        check=False,
        timeout=PROBE_SECONDS,
    )
    return attempt.returncode == 0


def hand_over(folder: Path, identity: Identity) -> None:
    """Make the folder and its contents belong to the identity.

    Does nothing unless they belong to another, as after a run under another identity.
    """
    if os.geteuid() != 0:
        return
    uid, gid = _owner_under(identity)
    if folder.stat().st_uid == uid:
        return
    for path in folder.rglob("*"):
        os.chown(path, uid, gid, follow_symlinks=False)
    # The folder itself comes last: an interrupted walk is then repeated, not believed.
    os.chown(folder, uid, gid)


def _owner_under(identity: Identity) -> tuple[int, int]:
    if identity is not Identity.NOBODY:
        return os.geteuid(), os.getegid()
    import pwd  # noqa: PLC0415 - not every system without a root user has one

    nobody = pwd.getpwnam("nobody")
    return nobody.pw_uid, nobody.pw_gid
