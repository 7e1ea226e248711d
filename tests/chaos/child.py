"""Becomes another program that does not outlive its parent: `python -m tests.chaos.child PID …`.

The kernel ends it when the *thread* ends that started it, however that comes about.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, *argv = sys.argv[1:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(parent):
        raise SystemExit(1)
    os.execv(sys.executable, [sys.executable, *argv])  # noqa: S606 - our own command line


if __name__ == "__main__":
    main()
