"""PostgreSQL with a synchronous standby: crashed, failed over, and given a new standby."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, LiteralString

import psycopg

from penstock.errors import PenstockError
from penstock.stores.servers import EmbeddedPostgres
from penstock.stores.servers.binaries import postgres_home
from penstock.stores.servers.identity import Identity, through_shim
from penstock.stores.servers.postgres import USER
from tests.process_group import is_alive
from tests.proxy import Proxy
from tests.waiting import wait_until

OWN_NAME = "chaos"
"""The application name of the harness's own connections, which no fault ends."""
STANDBY_NAME = "standby"
SETTINGS: Mapping[str, str] = {
    # The processes die, the machine does not: what is written survives without being flushed.
    "fsync": "off",
    "synchronous_commit": "on",
    "max_connections": "300",
    "shared_buffers": "64MB",
    "wal_keep_size": "1GB",
    "wal_retrieve_retry_interval": "50ms",
    "max_wal_size": "4GB",
}
CONNECT_SECONDS = 3
BACKUP_SECONDS = 60.0
TICK_SECONDS = 0.1
TICKS_UNTIL_GIVEN_UP = 100
TICKS_UNTIL_RELEASED = 20
TICKS_UNTIL_CERTAIN = 5
PROMOTE_SECONDS = 60
NOT_NOW = (psycopg.Error, PenstockError, subprocess.SubprocessError, OSError, AssertionError)

# No row: the standby does not stream.
STATE: LiteralString = """
SELECT sync_state = 'sync', coalesce(flush_lsn >= %s::pg_lsn, false)
  FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'
 ORDER BY 1 DESC, 2 DESC LIMIT 1
"""


class PostgresPair:
    """A primary and a synchronous standby. A keeper thread sees to it that there is a standby.

    A commit is acknowledged when the standby has it, so a failover loses none that was. Two
    honest limits: while there is no standby that streams, commits wait for nobody (they would
    hang otherwise) and `fail_over` refuses; and a commit whose backend is ended while it waits
    is visible on the primary without being on the standby, as PostgreSQL itself warns.
    """

    def __init__(self, folder: Path, *, with_standby: bool = True) -> None:
        self._folder = folder
        self._made = 1
        self._with_standby = with_standby
        self._primary = EmbeddedPostgres(folder / "1", durable=False, settings=SETTINGS)
        self._standby: EmbeddedPostgres | None = None
        # Held by whoever changes which servers there are and whether they run.
        self._changing = threading.RLock()
        self._is_up = False
        self._is_waited_for = False
        self._is_confirmed = False
        self._target: str | None = None
        self._sync_ticks = 0
        self._missing_ticks = 0
        self._closed = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="standby-keeper", daemon=True)
        self.proxy: Proxy | None = None
        self.failovers = 0

    def start(self) -> None:
        """Serve; the standby follows in the background."""
        self._primary.start()
        self._is_up = True
        self.proxy = Proxy.to(self._primary.url)
        if self._with_standby:
            self._keeper.start()

    def stop(self) -> None:
        """End both servers."""
        self._closed.set()
        self.thaw()
        if self._keeper.is_alive():
            self._keeper.join()
        if self.proxy is not None:
            self.proxy.close()
        for server in (self._standby, self._primary):
            if server is not None:
                server.crash()

    @property
    def url(self) -> str:
        """The current primary, without the proxy."""
        return self._primary.url

    @property
    def is_up(self) -> bool:
        """Whether the primary is meant to run just now."""
        return self._is_up

    @property
    def is_synchronous(self) -> bool:
        """Whether the standby has every commit that was ever acknowledged."""
        return self._is_waited_for and self._is_confirmed

    def wait_until_synchronous(self) -> None:
        """A failover is possible and loses nothing."""
        wait_until(lambda: self.is_synchronous, what="the standby is synchronous")

    # ── what is done to them ──────────────────────────────────────────────────────────────────

    def crash(self) -> None:
        """End the primary without a checkpoint; nobody is told but by broken connections."""
        with self._changing:
            self._is_up = False
            self._primary.crash()

    def restart(self) -> None:
        """Recover after a crash, on the same port; safe to repeat."""
        with self._changing:
            if self._is_up:
                return
            self._primary.start()
            # What recovery found is visible at once, whether or not the standby has it.
            self._doubt()
            self._is_up = True

    def fail_over(self) -> bool:
        """Crash the primary and promote the standby; False where that would lose commits."""
        with self._changing:
            if not self._is_up or not self.is_synchronous or self._standby is None:
                return False
            assert self.proxy is not None
            old, new = self._primary, self._standby
            try:
                # Connected first: a standby that is not there must not cost the primary.
                with connected(new.url) as connection:
                    self.crash()
                    done = connection.execute("SELECT pg_promote(true, %s)", [PROMOTE_SECONDS])
                    assert done.fetchone() == (True,), "the standby was not promoted in time"
            except psycopg.Error:
                self.restart()
                return False
            self._primary, self._standby = new, None
            self._is_waited_for = False
            self._doubt()
            self._is_up = True
            self.failovers += 1
            self.proxy.retarget(new.url)
        shutil.rmtree(_folder_of(old), ignore_errors=True)
        return True

    def freeze(self, which: str = "primary") -> bool:
        """Stop every process of the primary or the standby; False where there is none."""
        with self._changing:
            server = self._primary if which == "primary" else self._standby
            if server is None or not self._is_up:
                return False
            return _send_all(server, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let every process of both go on."""
        for server in (self._primary, self._standby):
            if server is not None:
                _send_all(server, signal.SIGCONT)

    # ── the keeper ────────────────────────────────────────────────────────────────────────────

    def _keep(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            if not self._is_up:
                continue
            # Whatever goes wrong here was done to the servers on purpose: look again later.
            with suppress(*NOT_NOW):
                if self._standby is None:
                    self._build()
                else:
                    with self._changing:
                        self._look_after(self._standby)

    def _build(self) -> None:
        """Copy the primary and let the copy follow it."""
        primary = self._primary
        self._made += 1
        standby = EmbeddedPostgres(self._folder / str(self._made), durable=False, settings=SETTINGS)
        folder = _folder_of(standby)
        try:
            _copy(primary.url, folder / "data", self._closed)
            standby.start()
        except BaseException:
            standby.crash()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._missing_ticks = 0
        self._standby = standby

    def _look_after(self, standby: EmbeddedPostgres | None) -> None:
        if standby is None or not self._is_up:
            return
        with connected(self.url) as connection:
            row = connection.execute(STATE, [self._target or "0/0", STANDBY_NAME]).fetchone()
            is_sync, has_target = row or (False, False)
            self._missing_ticks = 0 if row else self._missing_ticks + 1
            if row and not self._is_waited_for:
                self._wait_for_commits(connection, STANDBY_NAME)
                self._is_waited_for = True
                self._doubt()
            elif row and not self._is_confirmed:
                self._confirm(connection, is_sync=is_sync, has_target=has_target)
            is_needed = self._missing_ticks < TICKS_UNTIL_RELEASED and is_alive(standby.pid)
            if not is_needed and self._is_waited_for:
                # Nobody confirms commits: let them go.
                self._is_waited_for = False
                self._wait_for_commits(connection, "")
        if self._missing_ticks >= TICKS_UNTIL_GIVEN_UP or not is_alive(standby.pid):
            self._standby = None
            _send_all(standby, signal.SIGCONT)
            standby.crash()
            shutil.rmtree(_folder_of(standby), ignore_errors=True)

    def _doubt(self) -> None:
        """Whether the standby has every commit has to be found out again."""
        self._is_confirmed = False
        self._target = None
        self._sync_ticks = 0

    def _confirm(
        self, connection: psycopg.Connection[Any], *, is_sync: bool, has_target: bool
    ) -> None:
        # A new setting reaches the server's processes one by one, so commits are waited for with
        # certainty only a moment later; what was written until then has to arrive as well.
        self._sync_ticks = self._sync_ticks + 1 if is_sync else 0
        if self._sync_ticks < TICKS_UNTIL_CERTAIN:
            return
        if self._target is None:
            # It is the checkpointer that tells commits to wait, and a busy machine lets it be
            # late; it looks at the settings before it does this.
            connection.execute("CHECKPOINT")
            self._target = _written(connection)
        else:
            self._is_confirmed = has_target

    def _wait_for_commits(self, connection: psycopg.Connection[Any], name: str) -> None:
        connection.execute(
            psycopg.sql.SQL("ALTER SYSTEM SET synchronous_standby_names = {}").format(name)
        )
        connection.execute("SELECT pg_reload_conf()")


@contextmanager
def connected(url: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the harness itself, in autocommit."""
    with psycopg.connect(
        url, autocommit=True, connect_timeout=CONNECT_SECONDS, application_name=OWN_NAME
    ) as connection:
        yield connection


def _written(connection: psycopg.Connection[Any]) -> str:
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return str(row[0])


def _copy(url: str, target: Path, abandoned: threading.Event) -> None:
    """A base backup that starts as a standby of its source."""
    parts = psycopg.conninfo.conninfo_to_dict(url)
    source = f"host={parts['host']} port={parts['port']} user={USER}"
    command = [str(postgres_home() / "bin" / "pg_basebackup"), "--pgdata", str(target)]
    command += ["--dbname", f"{source} application_name={STANDBY_NAME}", "--write-recovery-conf"]
    command += ["--checkpoint", "fast", "--no-sync", "--wal-method", "stream"]
    target.parent.mkdir(parents=True, mode=0o700)
    with (
        (target.parent / "backup.log").open("wb") as log,
        subprocess.Popen(
            through_shim(Identity.OWN, command), stdout=log, stderr=subprocess.STDOUT
        ) as backup,
    ):
        try:
            wait_until(
                lambda: backup.poll() is not None or abandoned.is_set(),
                what="the base backup is done",
                seconds=BACKUP_SECONDS,
            )
        finally:
            backup.kill()
    if backup.returncode != 0:
        raise subprocess.CalledProcessError(backup.returncode, command)
    # Once promoted it must not wait for a standby that it does not have yet.
    with (target / "postgresql.auto.conf").open("a") as settings:
        settings.write("synchronous_standby_names = ''\n")


def _folder_of(server: EmbeddedPostgres) -> Path:
    return server._folder


def _send_all(server: EmbeddedPostgres, number: signal.Signals) -> bool:
    """Signal the postmaster and all its children; False where it has ended."""
    pid = server.pid
    if not is_alive(pid):
        return False
    # The postmaster stops first, or it would start others meanwhile.
    with suppress(ProcessLookupError):
        os.kill(pid, number)
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    for child in map(int, children):
        with suppress(ProcessLookupError):
            os.kill(child, number)
    return True
