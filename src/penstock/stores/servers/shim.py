"""Becomes a server: gives up root, ties its life to its parent's, and executes the command.

Run as a program, `python -I -S shim.py PARENT_PID IDENTITY COMMAND…`, and never imported by the
package, so it needs nothing but the standard library. IDENTITY is one of:

    own        stay who we are
    namespace  enter a user namespace in which our uid is called 1000: PostgreSQL, which refuses
               root, sees an ordinary user, while all files stay ours
    nobody     become the user nobody, where namespaces are forbidden
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CLONE_NEWUSER = 0x10000000
PR_SET_PDEATHSIG = 1
UID_INSIDE = 1000

EXIT_CANNOT_BECOME = 97
EXIT_PARENT_GONE = 98


def enter_user_namespace() -> None:
    """Call our own uid 1000 from here on; raises OSError where that is forbidden."""
    uid, gid = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUSER) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a user namespace: {os.strerror(number)}")
    # Without CAP_SETGID outside, the kernel accepts a gid_map only after setgroups is denied.
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"{UID_INSIDE} {uid} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"{UID_INSIDE} {gid} 1", encoding="utf-8")


def become_nobody() -> None:
    """Give up root for good, in the order that leaves no way back."""
    import pwd  # noqa: PLC0415 - the other identities work without a user database

    nobody = pwd.getpwnam("nobody")
    os.setgroups([])
    os.setgid(nobody.pw_gid)
    os.setuid(nobody.pw_uid)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for a SIGINT when the parent ends, and leave if it already has.

    For PostgreSQL SIGINT is the fast shutdown; SIGTERM would wait for its clients. A change of
    credentials clears the request, so it comes last. Other systems than Linux have none.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(EXIT_PARENT_GONE)


def main() -> None:
    """Follow the three arguments; on success this process is the server."""
    parent_pid, identity, *command = sys.argv[1:]
    try:
        if identity == "namespace":
            enter_user_namespace()
        elif identity == "nobody":
            become_nobody()
    except (OSError, KeyError) as error:
        sys.stderr.write(f"cannot run the server as {identity}: {error}\n")
        sys.exit(EXIT_CANNOT_BECOME)
    die_with_parent(int(parent_pid))
    os.execv(command[0], command)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main()
