"""One server process in one folder: claimed, logged, watched, and never left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

from penstock.errors import ServerFailedToStart
from penstock.stores.servers.identity import Identity, through_shim

CLAIM_SECONDS = 15.0
START_SECONDS = 60.0
STOP_SECONDS = 15.0
POLL_SECONDS = 0.02
LOG_TAIL_BYTES = 2000

# Below every system's range for outgoing connections: a port from that range could be taken by a
# client while the server is down, even by a client of this very server, connected to itself.
PORTS = range(15_000, 32_000)
PORT_TRIES_MAX = 100
PORT_TAKEN = "Address already in use"


class PortTaken(ServerFailedToStart):
    """Somebody was faster: a port that was free a moment ago is not any more."""


class ServerProcess:
    """Starts, watches and ends one server. Its output goes to `{name}.log` in the folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._log_start_bytes = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not ended since."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The server's process id; only a started server has one."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def run(self, command: list[str], identity: Identity, claim: int) -> None:
        """Run a preparatory command to its end; raises ServerFailedToStart if it fails."""
        self.spawn(command, identity, claim)
        assert self._process is not None
        try:
            code = self._process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self.end(signal.SIGKILL)
        if code != 0:
            raise self._failure(f"{Path(command[0]).name} " + _ending(code))

    def spawn(self, command: list[str], identity: Identity, claim: int) -> None:
        """Start the server without waiting; it inherits the claim on its folder."""
        assert not self.is_running, f"{self.name} runs already"

        def start() -> subprocess.Popen[bytes]:
            with self.log.open("ab") as log:
                self._log_start_bytes = log.tell()
                return subprocess.Popen(  # noqa: S603 - our own shim and servers
                    through_shim(identity, command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(os.environ),
                    cwd="/",
                    pass_fds=(claim,),
                    # Out of the terminal's reach: Ctrl-C is for the parent, which then stops us.
                    start_new_session=True,
                )

        self._process = _in_lasting_thread(start)

    def wait_until_ready(self, is_ready: Callable[[], bool]) -> None:
        """Return once the server serves; otherwise end it and raise ServerFailedToStart."""
        assert self._process is not None, f"{self.name} was not started"
        deadline = time.monotonic() + START_SECONDS
        try:
            while not is_ready():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(POLL_SECONDS)
                    raise self._failure(f"{self.name} " + _ending(code))
                if time.monotonic() > deadline:
                    raise self._failure(f"{self.name} " + _ending(None))
        except BaseException:
            self.end(signal.SIGKILL)
            raise

    def wait_on_some_port(
        self, is_ready: Callable[[], bool], try_another: Callable[[], None] | None
    ) -> None:
        """The same; where the port was taken meanwhile, another is tried, if that may be."""
        for _ in range(PORT_TRIES_MAX):
            try:
                self.wait_until_ready(is_ready)
            except PortTaken:
                if try_another is None:
                    raise
                try_another()
            else:
                return

    def end(self, number: signal.Signals) -> None:
        """Send the signal and wait for the end; kill after a limit. Safe to repeat."""
        if self._process is None:
            return
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _failure(self, what: str) -> ServerFailedToStart:
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start_bytes, size - LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        kind = PortTaken if PORT_TAKEN in tail else ServerFailedToStart
        return kind(f"{what}. The end of {self.log}:\n{tail or '(empty)'}")


@contextlib.contextmanager
def claimed(folder: Path, *, patience_seconds: float | None = None) -> Iterator[int]:
    """Create the folder if needed and yield a descriptor that no other server holds.

    Every process that inherits the descriptor keeps the claim, so it ends with the last process
    of a server, not with a file that somebody must remember to remove. A predecessor that is
    still shutting down is waited for, as a rule for CLAIM_SECONDS.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        patience = CLAIM_SECONDS if patience_seconds is None else patience_seconds
        deadline = time.monotonic() + patience
        while not _try_claim(descriptor):
            if time.monotonic() > deadline:
                raise ServerFailedToStart(
                    f"Another server is using {folder}. Stop it, or choose another folder."
                )
            threading.Event().wait(POLL_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    for _ in range(PORT_TRIES_MAX):
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerFailedToStart(f"No free port was found in {PORT_TRIES_MAX} tries on 127.0.0.1.")


def _try_claim(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_lasting_thread(
    start: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    # Linux sends the parent-death signal when the *thread* that forked ends. The main thread
    # lasts as long as the process; for any other caller a thread is made that lasts long enough.
    if threading.current_thread() is threading.main_thread():
        return start()
    started: Future[subprocess.Popen[bytes]] = Future()

    def last_as_long_as_the_server() -> None:
        try:
            process = start()
        except BaseException as error:  # noqa: BLE001 - carried over to the caller
            started.set_exception(error)
        else:
            started.set_result(process)
            process.wait()

    threading.Thread(target=last_as_long_as_the_server, daemon=True).start()
    return started.result()


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    # PGPORT and its kin are meant for other servers. LC_ALL=C keeps messages in English and
    # spares PostgreSQL the locales that a slim image does not have.
    kept = {name: value for name, value in inherited.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def _ending(code: int | None) -> str:
    if code is None:
        return f"was not ready after {START_SECONDS:.0f} seconds"
    return f"ended with code {code} instead of starting"
