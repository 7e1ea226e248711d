"""A process group of its own that tests may kill: `python -m tests.process_host FOLDER KIND…`.

Each KIND becomes one child that writes its process and worker ids to FOLDER/started. `obedient`
ends at SIGTERM, `deaf` ignores it, `brief` ends at once with code 3.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from penstock.runtime.processes import (
    WORKER_ID,
    ProcessGroup,
    ProcessSpec,
    end_with_parent,
    stop_on_signals,
)

SHUTDOWN_SECONDS = 1.0


def main() -> None:
    folder, *kinds = sys.argv[1:]
    group = ProcessGroup(
        [ProcessSpec(kind, child_command(folder, kind)) for kind in kinds],
        shutdown_seconds=SHUTDOWN_SECONDS,
        on_death=lambda worker_id: note(Path(folder, "dead"), worker_id),
    )
    sys.exit(0 if group.run() else 1)


def child_command(folder: str, kind: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        __spec__.name,
        folder,
        "--child",
        kind,
        WORKER_ID,
        str(os.getpid()),
    ]


def child(folder: str, kind: str, worker_id: str, parent: int) -> None:
    end_with_parent(parent)
    stop = threading.Event()
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        stop_on_signals(stop, SHUTDOWN_SECONDS)
    note(Path(folder, "started"), f"{kind} {os.getpid()} {worker_id}")
    if kind == "brief":
        sys.exit(3)
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    waiting.join()


def note(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(sys.argv[1], sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
