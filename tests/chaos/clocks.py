"""Wall clocks that jump: those of whole hosts, by way of libfaketime where it is installed."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

LIBRARY = "libfaketimeMT.so.1"
PLACES = ("lib/*/faketime", "lib64/faketime", "lib/faketime", "local/lib/faketime")
"""Where distributions put it, below /usr."""
OVERRIDE = "CHAOS_LIBFAKETIME"
"""An environment variable with the library's path, where it lies somewhere else."""
OPTIONS = {
    "FAKETIME_CACHE_DURATION": "1",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    "NO_FAKE_STAT": "1",
}
# Not time.sleep(), which fails under some versions and which no process of ours calls.
PROBE = "import threading; threading.Event().wait(0.01)"
PROBE_SECONDS = 10.0


class Clocks:
    """One clock for each host; what was started under it sees it jump.

    The monotonic clock never jumps, as on a real machine. Redis keeps the true time: entry ids
    are positions, so its clock decides nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library, self._reason = usable_library()
        self._names: set[str] = set()

    @property
    def why_not(self) -> str | None:
        """Why no clock can jump here; None where they can."""
        if self._library is None:
            return self._reason
        if not self._names:
            return "no process was started with a clock of its own"
        return None

    @property
    def names(self) -> list[str]:
        """The hosts that have a clock of their own."""
        return sorted(self._names)

    def environment(self, name: str) -> dict[str, str]:
        """What a host's processes are started with; empty where there is no library."""
        if self._library is None:
            return {}
        if name not in self._names:
            self._folder.mkdir(exist_ok=True)
            self.set(name, 0.0)
            self._names.add(name)
        return {
            "LD_PRELOAD": str(self._library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file(name)),
            **OPTIONS,
        }

    def set(self, name: str, seconds: float) -> None:
        """Let a host's clock differ by so much from now on; it notices within a second."""
        fresh = self._file(name).with_suffix(".new")
        fresh.write_text(f"{seconds:+.3f}\n")
        # Renamed, so that nobody reads half of it.
        fresh.rename(self._file(name))

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.clock"


@functools.cache
def usable_library() -> tuple[Path | None, str]:
    """Where libfaketime lies and works; or None, and what stands against it."""
    named = os.environ.get(OVERRIDE)
    places = (Path("/usr").glob(f"{place}/{LIBRARY}") for place in PLACES)
    found = Path(named) if named else next((path for place in places for path in place), None)
    if found is None:
        return None, f"{LIBRARY} is not installed (libfaketime), so no wall clock can jump"
    # Some versions hang, or break waiting: a worker that cannot wait proves nothing.
    try:
        probe = subprocess.run(
            [sys.executable, "-I", "-c", PROBE],
            env={"LD_PRELOAD": str(found), "FAKETIME": "+0", **OPTIONS},
            capture_output=True,
            check=False,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None, f"{found} lets programs hang"
    return (found, "") if probe.returncode == 0 else (None, f"{found} does not let programs wait")
