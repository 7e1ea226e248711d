"""A TCP proxy that breaks connections on purpose: between a client and a real server."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

_CHUNK_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Link:
    """One client's connection and its counterpart at the server."""

    client: socket.socket
    server: socket.socket
    matched: int = 0

    def reset(self) -> None:
        """End it like a machine that vanished."""
        for side in (self.client, self.server):
            with suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.finish()

    def finish(self) -> None:
        """End it like a program that closed its side; both pumps stop."""
        for side in (self.client, self.server):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                side.close()


class Proxy:
    """Forwards to one server; faults are switched on and off while connections are open."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self._cut_match: bytes | None = None
        self._cut_after = 0
        self._cut_done = threading.Event()
        self._swallow_replies = threading.Event()
        self._flow = threading.Event()
        self._flow.set()
        self._refuse = threading.Event()
        self._delay_seconds = 0.0
        self._closed = threading.Event()
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    @classmethod
    def to(cls, url: str) -> Self:
        """A proxy in front of the server of a URL."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        return cls(parts.hostname, parts.port)

    def url(self, url: str) -> str:
        """The same URL through this proxy."""
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    def retarget(self, url: str) -> None:
        """Forward to the server of this URL from now on; whoever is connected is cut off."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        with self._lock:
            self._target = (parts.hostname, parts.port)
        self.cut()

    def cut(self) -> None:
        """Reset every open connection; new ones are welcome."""
        with self._lock:
            links, self._links = self._links, []
            self.cuts += len(links)
        for link in links:
            link.reset()

    def cut_reply_to(self, match: bytes, *, nth: int = 1) -> threading.Event:
        """Forward the nth request that contains `match`, then reset instead of its reply. Once.

        Returns what is set when it has happened.
        """
        with self._lock:
            self._cut_match, self._cut_after = match, nth
            self._cut_done = threading.Event()
            for link in self._links:
                link.matched = 0
            return self._cut_done

    def spare_replies(self) -> None:
        """Forget a `cut_reply_to` that has not happened."""
        with self._lock:
            self._cut_match = None

    @contextmanager
    def swallowing_replies(self) -> Iterator[None]:
        """Requests arrive; what the server answers is lost."""
        self._swallow_replies.set()
        try:
            yield
        finally:
            self._swallow_replies.clear()

    @contextmanager
    def black_hole(self) -> Iterator[None]:
        """Nothing moves in either direction, and nobody is told; afterwards it all arrives."""
        self._flow.clear()
        try:
            yield
        finally:
            self._flow.set()

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Nobody gets in: open connections are cut, new ones are reset at once."""
        self._refuse.set()
        self.cut()
        try:
            yield
        finally:
            self._refuse.clear()

    def delay(self, seconds: float) -> None:
        """Hold every chunk back for this long; 0 ends it."""
        self._delay_seconds = seconds

    def heal(self) -> None:
        """End every fault that is switched on."""
        self._delay_seconds = 0.0
        self._refuse.clear()
        self._swallow_replies.clear()
        self._flow.set()
        self.spare_replies()

    def close(self) -> None:
        """Stop listening and cut everything."""
        self._closed.set()
        self._flow.set()
        # Closing alone would leave the accepting thread waiting.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            target = self._target
            try:
                link = _Link(client, socket.create_connection(target))
            except OSError:
                client.close()
                continue
            if self._refuse.is_set() or self._closed.is_set():
                link.reset()
                continue
            for side in (link.client, link.server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                is_current = target == self._target
                self._links += [link] if is_current else []
            if not is_current:
                link.reset()
                continue
            self._start(self._forward_requests, link)
            self._start(self._forward_replies, link)

    def _start(self, pump: Callable[[_Link], None], link: _Link) -> None:
        def run() -> None:
            with suppress(OSError):
                pump(link)
            with self._lock, suppress(ValueError):
                self._links.remove(link)
            link.finish()

        threading.Thread(target=run, name="proxy-pump", daemon=True).start()

    def _forward_requests(self, link: _Link) -> None:
        while chunk := link.client.recv(_CHUNK_BYTES):
            self._hold()
            with self._lock:
                if self._cut_match is not None and self._cut_match in chunk:
                    link.matched += 1
            link.server.sendall(chunk)

    def _forward_replies(self, link: _Link) -> None:
        while chunk := link.server.recv(_CHUNK_BYTES):
            self._hold()
            if self._is_cut_due(link):
                link.reset()
                return
            if not self._swallow_replies.is_set():
                link.client.sendall(self._pass_on(chunk))

    def _pass_on(self, chunk: bytes) -> bytes:
        """What a client gets to see of what the server says."""
        return chunk

    def _is_cut_due(self, link: _Link) -> bool:
        with self._lock:
            if self._cut_match is None or link.matched < self._cut_after:
                return False
            self._cut_match = None
            self.cuts += 1
            self._cut_done.set()
            return True

    def _hold(self) -> None:
        if self._delay_seconds:
            self._closed.wait(self._delay_seconds)
        self._flow.wait()
