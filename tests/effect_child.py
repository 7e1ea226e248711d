"""A process that makes one call to an outside world, which is a file; killed or held as told.

Arguments: database URL, folder, event, what an unknown outcome means, and where it meets its
fate: `call` (killed in the middle of the call), `wait` (in the call until there is FOLDER/go), or
`-`. PENSTOCK_FAILPOINT kills it at a signal. Prints what the user sees, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from penstock.errors import EffectUnknown
from penstock.pipeline.effects import Effects
from penstock.stores.control_connection import ControlConnection
from penstock.telemetry import failpoints
from tests.waiting import wait_until

CONSUMER = "shop.charge"
EFFECT = "charge"


def outside_calls(folder: Path) -> list[int]:
    """The processes that reached the outside world, in order."""
    path = folder / "outside"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def reach_outside(folder: Path, fate: str) -> dict[str, Any]:
    """A line that survives this process, and perhaps the end of it."""
    with (folder / "outside").open("a") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        os.fsync(file.fileno())
    if fate == "call":
        os.kill(os.getpid(), signal.SIGKILL)
    if fate == "wait":
        wait_until((folder / "go").exists, what="the test lets the call return")
    return {"charged_by": os.getpid()}


def main() -> None:
    database_url, folder, event_uuid, interrupted, fate = sys.argv[1:]
    failpoints.install_failpoints(os.environ.get(failpoints.ENVIRONMENT_NAME))
    control = ControlConnection(database_url, "effect child", statement_seconds=5.0)
    effects = Effects("events", control.get, CONSUMER, "child")
    try:
        seen: dict[str, Any] = {
            "result": effects.once(
                event_uuid,
                EFFECT,
                lambda: reach_outside(Path(folder), fate),
                interrupted=interrupted,  # type: ignore[arg-type]
            )
        }
    except EffectUnknown as error:
        seen = {"unknown": str(error)}
    finally:
        control.close()
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main()
