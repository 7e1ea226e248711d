"""Valkey with a replica: killed, restarted with less than it had, failed over to the past."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from penstock.stores.servers import EmbeddedValkey
from tests.process_group import is_alive
from tests.proxy import Proxy
from tests.waiting import wait_until

Persistence = Literal["aof", "none", "snapshot"]
"""What a restart finds: the append-only file, nothing, or the last snapshot."""

SOCKET_SECONDS = 3.0
NOWHERE = ("127.0.0.1", 1)
"""Where no server is: a replica of it keeps what it has and gets nothing new."""
SETTINGS = {"replica-serve-stale-data": "yes", "repl-diskless-sync-delay": "0"}


class RedisPair:
    """A primary with an append-only file, and a replica that may be cut off and promoted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self._primary = self._new()
        self._replica = self._new()
        self._is_up = False
        self._changing = threading.RLock()
        self.proxy: Proxy | None = None
        self.failovers = 0

    def start(self) -> None:
        """Serve; the replica follows within a second or two."""
        self._primary.launch()
        self._replica.launch()
        self._primary.wait_until_ready()
        self._replica.wait_until_ready()
        self._is_up = True
        self.proxy = Proxy.to(self._primary.url)
        self.attach_replica()

    def stop(self) -> None:
        """End both servers."""
        self.thaw()
        if self.proxy is not None:
            self.proxy.close()
        for server in (self._replica, self._primary):
            server.crash()

    @property
    def url(self) -> str:
        """The current primary, without the proxy."""
        return self._primary.url

    @property
    def replica_url(self) -> str:
        """The server that would be promoted."""
        return self._replica.url

    @property
    def is_up(self) -> bool:
        """Whether the primary is meant to run just now."""
        return self._is_up

    # ── ending and starting ───────────────────────────────────────────────────────────────────

    def kill(self) -> None:
        """End the primary without a word."""
        with self._changing:
            self._is_up = False
            self._primary.crash()

    def restart(self, persistence: Persistence = "aof") -> None:
        """Serve again on the same port with what is left; safe to repeat."""
        with self._changing:
            if self._is_up:
                return
            folder = _folder_of(self._primary)
            if persistence != "aof":
                shutil.rmtree(folder / "appendonlydir", ignore_errors=True)
            if persistence == "none":
                (folder / "dump.rdb").unlink(missing_ok=True)
            # With an append-only file to be kept, a server would not look at its snapshot.
            self._primary = EmbeddedValkey(
                folder,
                persistence="none" if persistence == "snapshot" else "everysec",
                port=self._primary.port,
                settings=SETTINGS,
            )
            self._primary.start()
            if persistence == "snapshot":
                self._begin_file()
            self._is_up = True

    def _begin_file(self) -> None:
        """Write the append-only file from memory, so that the next restart can rely on it."""
        with connected(self.url) as client:
            client.config_set("appendonly", "yes")
            wait_until(
                lambda: (
                    not any(
                        client.info("persistence")[name]
                        for name in ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
                    )
                ),
                what="the append-only file is complete",
            )

    def save_snapshot(self) -> None:
        """Write what a restart with "snapshot" will find."""
        with connected(self.url) as client:
            client.save()

    def size_of_file(self) -> int:
        """How many bytes the part of the append-only file has that grows."""
        newest = _newest_part(_folder_of(self._primary))
        return newest.stat().st_size if newest is not None else 0

    def forget_since(self, size_bytes: int) -> int:
        """Cut the append-only file of a dead primary; returns how many bytes were lost.

        This is what a power failure does to a file that is flushed once a second.
        """
        assert not self._is_up, "a running server would go on writing behind the cut"
        newest = _newest_part(_folder_of(self._primary))
        if newest is None or newest.stat().st_size <= size_bytes:
            return 0
        lost = newest.stat().st_size - size_bytes
        os.truncate(newest, size_bytes)
        return lost

    def freeze(self) -> bool:
        """Stop the primary's process; False where it has ended."""
        return self._signal(self._primary, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let both go on."""
        for server in (self._primary, self._replica):
            self._signal(server, signal.SIGCONT)

    # ── failover ──────────────────────────────────────────────────────────────────────────────

    def attach_replica(self) -> None:
        """Let the replica follow the primary; it takes about a second until it does."""
        with connected(self.replica_url) as replica:
            replica.replicaof("127.0.0.1", self._primary.port)

    @property
    def replica_follows(self) -> bool:
        """Whether the replica has everything but the last moments."""
        with connected(self.replica_url) as replica:
            return bool(replica.info("replication").get("master_link_status") == "up")

    def cut_off_replica(self) -> None:
        """From now on the replica learns nothing more."""
        with connected(self.replica_url) as replica:
            replica.replicaof(*NOWHERE)

    def fail_over_to_stale_replica(self) -> None:
        """Kill the primary and promote the replica with whatever it has; a new replica follows."""
        with self._changing:
            assert self.proxy is not None
            old, new = self._primary, self._replica
            with connected(new.url) as client:
                client.replicaof("NO", "ONE")
            self.kill()
            self._primary, self._replica = new, self._new()
            self.proxy.retarget(new.url)
            self._is_up = True
            self.failovers += 1
            self._replica.start()
            self.attach_replica()
        shutil.rmtree(_folder_of(old), ignore_errors=True)

    # ── what a running server is made to do ───────────────────────────────────────────────────

    def flush(self) -> None:
        """Remove every key."""
        with connected(self.url) as client:
            client.flushall()

    def limit_memory(self, size_bytes: int | None) -> None:
        """Refuse writes beyond a size; None: no limit."""
        with connected(self.url) as client:
            client.config_set("maxmemory", size_bytes or 0)

    def refuse_writes(self) -> None:
        """Serve reads only, as a replica does whose primary is gone."""
        with connected(self.url) as client:
            client.replicaof(*NOWHERE)

    def accept_writes(self) -> None:
        """Be a primary again, with everything that was there."""
        with connected(self.url) as client:
            client.replicaof("NO", "ONE")

    def heal(self) -> None:
        """Bring the pair back to normal from whatever state it was left in."""
        self.thaw()
        self.restart()
        with suppress(redis.RedisError):
            self.limit_memory(None)
            self.accept_writes()

    def _new(self) -> EmbeddedValkey:
        self._made += 1
        return EmbeddedValkey(self._folder / str(self._made), settings=SETTINGS)

    def _signal(self, server: EmbeddedValkey, number: signal.Signals) -> bool:
        if not self._is_up or not is_alive(server.pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(server.pid, number)
        return True


@contextmanager
def connected(url: str) -> Iterator[redis.Redis]:
    """A client of the harness itself, which never repeats a command."""
    client: Any = redis.Redis.from_url(
        url, socket_timeout=SOCKET_SECONDS, retry=Retry(NoBackoff(), 0)
    )
    with closing(client):
        yield client


def _folder_of(server: EmbeddedValkey) -> Path:
    return server._folder


def _newest_part(folder: Path) -> Path | None:
    """The file that appends go to; older parts are only read."""
    parts = (folder / "appendonlydir").glob("*.incr.aof")
    return max(parts, key=lambda part: int(part.name.split(".")[-3]), default=None)
