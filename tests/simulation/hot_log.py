"""A model of the hot log on a server that may lose anything: what the scripts in stores/lua do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import ServerUnavailable, StreamForeign
from penstock.stores.hot_log import Fence, HotLogClosed, HotLogGap, HotLogTermOver
from penstock.stores.redis_log import ALIVE_SECONDS
from tests.simulation.machine import Actor, Machine

Id = tuple[int, int]


class Meta(NamedTuple):
    """The hash beside a log."""

    fence: Fence
    base: int
    seen: float
    """When its publisher was here last."""


class HotServer:
    """What a Redis server holds of one stream."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.entries: list[tuple[Id, bytes]] = []
        self.last_id: Id = (0, 0)
        """The largest id that the key remembers, whether its entry is there or not."""
        self.meta: Meta | None = None
        self.alive_seconds: float = ALIVE_SECONDS
        self.readers: list[Actor] = []
        """Who waits for the next entry, or did."""
        self.eager: list[Actor] = []
        """Those of them that a sender's COMMIT wakes too."""
        self.is_away = False
        self.loss_share = 0.0
        """How likely a connection breaks at a command, before or after the server ran it."""
        self.losses = 0

    def tail(self) -> int | None:
        """The last position; None where the log is empty or ends with an id of somebody else."""
        if not self.entries:
            return None
        (position, sequence), _ = self.entries[-1]
        return position if sequence == 0 else None

    def delete_log(self) -> None:
        """DEL: the key forgets its largest id too."""
        self.entries = []
        self.last_id = (0, 0)

    def add(self, entry_id: Id, entry: bytes) -> bool:
        """XADD: only behind the largest id."""
        if entry_id <= self.last_id:
            return False
        self.last_id = entry_id
        self.entries.append((entry_id, entry))
        self._wake(self.readers)
        return True

    def ring(self) -> None:
        """Somebody has sent something."""
        self._wake(self.eager)

    def _wake(self, actors: list[Actor]) -> None:
        for actor in actors:
            actor.wake_at = min(actor.wake_at, self.machine.now)
        actors.clear()

    def snapshot(self) -> tuple[list[tuple[Id, bytes]], Id, Meta | None]:
        """Everything, as a file on disk would have it."""
        return list(self.entries), self.last_id, self.meta

    def restore(self, saved: tuple[list[tuple[Id, bytes]], Id, Meta | None]) -> None:
        """Start again with what was saved."""
        entries, self.last_id, self.meta = saved
        self.entries = list(entries)


class ModelHotLog:
    """Stands in for RedisLog: one process's connection to the server."""

    keeps_entries = True

    def __init__(self, server: HotServer) -> None:
        self._server = server

    def check(self) -> None:
        """It can be used."""

    def open(
        self,
        stream_name: str,  # noqa: ARG002 - the protocol's; there is one stream
        fence: Fence,
        *,
        base: int,
    ) -> int | None:
        server = self._arrive("open")
        meta, now = server.meta, server.machine.now
        if meta is not None:
            former = meta.fence
            if former.origin != fence.origin:
                raise StreamForeign(former.origin)
            if former.incarnation != fence.incarnation:
                is_alive = now - meta.seen < server.alive_seconds
                if is_alive or not _is_heir(former.incarnation, fence.incarnation):
                    raise StreamForeign(former.incarnation)
            elif former.term > fence.term:
                raise HotLogTermOver("the log", former.term)
        server.meta = Meta(fence, base, now)
        last = server.tail()
        if last is None:
            server.delete_log()
        self._answer()
        return last

    def restart(self, stream_name: str, fence: Fence, *, base: int) -> None:  # noqa: ARG002
        server = self._arrive("restart")
        meta = self._require(fence)
        server.delete_log()
        server.meta = meta._replace(base=base)
        self._answer()

    def append(
        self,
        stream_name: str,
        fence: Fence,
        *,
        first: int,
        entries: Sequence[bytes],
        hole_last: int | None = None,
    ) -> int:
        server = self._arrive("append")
        meta = self._require(fence)
        if not server.entries:
            last = meta.base
            if first != last + 1:
                raise HotLogClosed(stream_name)
        else:
            tail = server.tail()
            if tail is None:
                server.delete_log()
                raise HotLogClosed(stream_name)
            last = tail
            if first > last + 1:
                raise HotLogGap(stream_name, last)
        final = hole_last or first + len(entries) - 1
        is_hole = final - first > len(entries) - 1
        for position in range(max(final, last + 1) if is_hole else last + 1, final + 1):
            if not server.add((position, 0), entries[0 if is_hole else position - first]):
                server.delete_log()
                raise HotLogClosed(stream_name)
        server.meta = meta._replace(seen=server.machine.now)
        self._answer()
        return max(last, final)

    def read(
        self,
        stream_name: str,  # noqa: ARG002
        *,
        after: int,
        count: int,
        wait_seconds: float,
        unless: int | None = None,
    ) -> list[tuple[int, bytes]]:
        server = self._arrive("read")
        found = self._behind(after, count)
        if not found and wait_seconds and server.machine.current is not None:
            server.readers.append(server.machine.current)
            if unless is not None:
                server.eager.append(server.machine.current)
            server.machine.sleep(wait_seconds)
            found = self._behind(after, count)
        self._answer()
        return found

    def _behind(self, after: int, count: int) -> list[tuple[int, bytes]]:
        found = [
            (entry_id[0], entry if entry_id[1] == 0 else b"")
            for entry_id, entry in self._server.entries
            if entry_id > (after, 0)
        ]
        return found[:count]

    def last(self, stream_name: str, fence: Fence | None = None) -> int | None:  # noqa: ARG002
        server = self._arrive("last")
        base = None
        if server.meta is not None and fence is not None and _is_same(server.meta.fence, fence):
            server.meta = server.meta._replace(seen=server.machine.now)
            base = server.meta.base
        self._answer()
        return server.tail() if server.entries else base

    def incarnation(self, stream_name: str) -> str | None:  # noqa: ARG002
        server = self._arrive("incarnation")
        self._answer()
        return None if server.meta is None else server.meta.fence.incarnation

    def trim(self, stream_name: str, *, through: int) -> int:  # noqa: ARG002
        server = self._arrive("trim")
        last = server.tail()
        if last is None:
            return 0
        keep_from = (min(through + 1, last), 0)
        kept = [entry for entry in server.entries if entry[0] >= keep_from]
        removed = len(server.entries) - len(kept)
        server.entries = kept
        return removed

    def close(self) -> None:
        """Nothing is kept."""

    def _require(self, fence: Fence) -> Meta:
        meta = self._server.meta
        if meta is None:
            raise HotLogClosed("there is no record")
        if meta.fence.origin != fence.origin:
            raise StreamForeign(meta.fence.origin)
        if meta.fence.incarnation != fence.incarnation:
            raise HotLogClosed("another timeline writes it")
        if meta.fence.term > fence.term:
            raise HotLogTermOver("the log", meta.fence.term)
        if meta.fence.term < fence.term:
            raise HotLogClosed("the record is older than this term")
        return meta

    def _arrive(self, what: str) -> HotServer:
        server = self._server
        server.machine.breathe()
        server.machine.note(f"hot log: {what}")
        if server.is_away or self._is_lost_now():
            raise ServerUnavailable("the model of Redis is away")
        return server

    def _answer(self) -> None:
        if self._is_lost_now():
            raise ServerUnavailable("the answer was lost")

    def _is_lost_now(self) -> bool:
        server = self._server
        if server.loss_share and server.machine.dice() < server.loss_share:
            server.losses += 1
            server.machine.note("FAULT the connection to the hot log breaks")
            return True
        return False


def _is_same(one: Fence, other: Fence) -> bool:
    return (one.incarnation, one.term) == (other.incarnation, other.term)


def _is_heir(before: str, now: str) -> bool:
    """Whether a later timeline of the same cluster and database follows an earlier one."""
    return before.rpartition("/")[0] == now.rpartition("/")[0] and before < now
