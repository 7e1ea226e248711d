"""Valkey from the wheel: a real server, no installation."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.stores.servers.binaries import valkey_program
from penstock.stores.servers.identity import Identity
from penstock.stores.servers.process import ServerProcess, claimed, free_port

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
PROBE_SECONDS = 1.0

Persistence = Literal["everysec", "none"]
PERSISTENCE_SETTINGS: Mapping[Persistence, Mapping[str, str]] = MappingProxyType(
    {
        "everysec": {"appendonly": "yes", "appendfsync": "everysec"},
        "none": {"appendonly": "no"},
    }
)


class EmbeddedValkey:
    """Runs Valkey from the wheel on a free loopback port, its files in one folder.

    With persistence "everysec" a folder used before is served again with its data. The server
    ends with this process, even when that is killed; on macOS only `stop` ends it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        persistence: Persistence = "everysec",
        port: int | None = None,
        settings: Mapping[str, str] = NO_SETTINGS,
    ) -> None:
        self._is_any_port = port is None
        self.port = free_port() if port is None else port
        self._folder = folder.absolute()
        self._settings = {
            "bind": "127.0.0.1",
            "dir": str(self._folder),
            "save": "",
            "maxmemory-policy": "noeviction",
            **PERSISTENCE_SETTINGS[persistence],
            **settings,
        }
        self._process = ServerProcess("valkey", self._folder)

    @property
    def url(self) -> str:
        """Where it can be reached; certain once it is ready."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended since."""
        return self._process.is_running

    def start(self) -> None:
        """Serve; returns when the data is loaded and commands are accepted."""
        self.launch()
        self.wait_until_ready()

    def launch(self) -> None:
        """Start without waiting for readiness, which `wait_until_ready` then does."""
        command = [str(valkey_program()), "--port", str(self.port)]
        for name, value in self._settings.items():
            command += [f"--{name}", value]
        with claimed(self._folder) as claim:
            self._process.spawn(command, Identity.OWN, claim)

    def wait_until_ready(self) -> None:
        """Return when commands are accepted; raises ServerFailedToStart if they never are."""
        self._process.wait_on_some_port(
            self._is_ready, self._try_another_port if self._is_any_port else None
        )
        self._is_any_port = False

    def _try_another_port(self) -> None:
        self.port = free_port()
        self.launch()

    def stop(self) -> None:
        """Shut down cleanly; what persistence keeps is on disk afterwards."""
        self._process.end(signal.SIGINT)

    def crash(self) -> None:
        """Kill the server; `start` then serves what had been persisted, on the same port."""
        self._process.end(signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        client = redis.Redis(
            port=self.port, socket_timeout=PROBE_SECONDS, retry=Retry(NoBackoff(), 0)
        )
        # The process id is compared because a stranger may have taken the port first.
        with contextlib.closing(client), contextlib.suppress(redis.RedisError, OSError):
            state = client.info()
            return bool(state["process_id"] == self.pid and state["loading"] == 0)
        return False
