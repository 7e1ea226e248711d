"""A stand-in for a worker process; tests/process_host.py knows its arguments.

It writes its process and worker ids to FOLDER/started, then does what its KIND says:

- `obedient` ends at SIGTERM; `deaf` ignores it; `brief` ends at once with code 3;
- `thorough` ends at SIGTERM once there is a file FOLDER/go;
- `beating` is obedient and beats; `hung` beats until its loop has not turned for too long;
- `greedy` beats for a moment and then keeps the interpreter to itself;
- `late` is beating once there is a file FOLDER/go;
- `spare` waits for a line that says which of the others it is, and its id;
- `guilty-…` is brief while a file FOLDER/guilty exists, and beating otherwise.

It loads two modules from their files: importing the whole package would take over a second.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

RUNTIME = Path(__file__).parent.parent / "src" / "penstock" / "runtime"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, RUNTIME / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    folder, kind, worker_id, parent, descriptor, timeout, patience = sys.argv[1:]
    stopping = load("stopping")
    stopping.end_with_parent(int(parent))
    if kind == "spare":
        with Path(folder, "spares").open("a") as file:
            file.write(f"{os.getpid()}\n")
        kind, worker_id = sys.stdin.readline().split()
    stop = threading.Event()
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        stopping.stop_on_signals(stop, float(patience))
    with Path(folder, "started").open("a") as file:
        file.write(f"{kind} {os.getpid()} {worker_id}\n")
    if kind == "brief" or (kind.startswith("guilty") and Path(folder, "guilty").exists()):
        sys.exit(3)
    while kind.startswith("late") and not (Path(folder, "go").exists() or stop.is_set()):
        threading.Event().wait(0.01)
    if descriptor.isdigit():
        pulse = load("heartbeat").Pulse(
            int(descriptor), timeout_seconds=float(timeout), longest_wait_seconds=0.0
        )
        if kind == "hung":
            pulse.watch("a loop that never turns")
        pulse.start()
    if kind == "greedy":
        threading.Event().wait(float(timeout) / 2)
        # PyDLL keeps the GIL, as a handler's C extension may.
        ctypes.PyDLL(None).sleep(1000)
    waiting = threading.Thread(target=stop.wait)
    waiting.start()
    waiting.join()
    while kind == "thorough" and not Path(folder, "go").exists():
        threading.Event().wait(0.01)


if __name__ == "__main__":
    main()
