"""A process group that tests may kill: `python -m tests.process_host FOLDER SECONDS KIND…`.

Each KIND becomes one child that writes its process and worker ids to FOLDER/started. `obedient`
ends at SIGTERM, `deaf` ignores it, `brief` ends at once with code 3. A stop may take SECONDS.
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


def main() -> None:
    folder, seconds, *kinds = sys.argv[1:]
    group = ProcessGroup(
        [ProcessSpec(kind, child_command(folder, seconds, kind)) for kind in kinds],
        shutdown_seconds=float(seconds),
        on_death=lambda worker_id: note(Path(folder, "dead"), worker_id),
    )
    sys.exit(0 if group.run() else 1)


def child_command(folder: str, seconds: str, kind: str) -> list[str]:
    arguments = ["--child", folder, seconds, kind, WORKER_ID, str(os.getpid())]
    return [sys.executable, "-m", "tests.process_host", *arguments]


def child(folder: str, seconds: str, kind: str, worker_id: str, parent: str) -> None:
    end_with_parent(int(parent))
    stop = threading.Event()
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        stop_on_signals(stop, float(seconds))
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
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        main()
