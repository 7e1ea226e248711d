"""A process group that tests may kill: `python -m tests.process_host FOLDER '{"kinds": […]}'`.

The document may also hold shutdown_seconds, heartbeat_timeout, database_url, crashes_max (guards
against crash loops), with_spare, is_packed (all kinds in one process until it crashes) and
is_explained (every death is somebody else's doing). What the group says over HTTP is at the port
in FOLDER/port; whoever died is in FOLDER/dead.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from penstock.core.crash_budget import CrashLimits
from penstock.core.settings import Settings
from penstock.ops.quarantine import QuarantineTable
from penstock.runtime.children import HEARTBEAT_FD, WORKER_ID, ProcessSpec
from penstock.runtime.health_server import HealthServer
from penstock.runtime.processes import ProcessGroup
from penstock.runtime.quarantine import Quarantine
from penstock.telemetry.logs import configure_logging

CHILD = Path(__file__).with_name("process_child.py")


def main() -> None:
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    configure_logging()
    url = options.get("database_url")
    table = QuarantineTable(Settings(database_url=url)) if url else None
    crashes_max = options.get("crashes_max")
    group = ProcessGroup(
        specs(folder, options),
        shutdown_seconds=options.get("shutdown_seconds", 300.0),
        on_death=lambda worker_id: note(folder / "dead", worker_id) or "is_explained" in options,
        heartbeat_timeout_seconds=options.get("heartbeat_timeout", 30.0),
        limits=CrashLimits(crashes_max=crashes_max) if crashes_max else None,
        quarantine=Quarantine(table),
        spare=spec(folder, "spare", options) if options.get("with_spare") else None,
    )
    server = HealthServer("127.0.0.1", 0, lambda: group.report)
    note(folder / "port", str(server.port))
    sys.exit(0 if group.run() else 1)


def specs(folder: Path, options: dict[str, Any]) -> list[ProcessSpec]:
    each = [spec(folder, kind, options) for kind in options["kinds"]]
    if not options.get("is_packed"):
        return each
    together = spec(folder, options["kinds"][0], options)
    return [ProcessSpec("together", together.argv, apart=tuple(each))]


def spec(folder: Path, kind: str, options: dict[str, Any]) -> ProcessSpec:
    listens = kind not in {"obedient", "deaf", "brief", "thorough"}
    arguments = [str(folder), kind, WORKER_ID, str(os.getpid())]
    arguments += [HEARTBEAT_FD if listens else "none", str(options.get("heartbeat_timeout", 30.0))]
    arguments += [str(options.get("shutdown_seconds", 300.0))]
    argv = [sys.executable, str(CHILD), *arguments]
    return ProcessSpec(
        kind,
        argv,
        quarantine_as=None if kind == "brief" else f"shop.{kind}",
        assignment=f"{kind} {WORKER_ID}" if options.get("with_spare") else None,
    )


def note(path: Path, line: str) -> bool:
    with path.open("a") as file:
        file.write(line + "\n")
    return False


if __name__ == "__main__":
    main()
