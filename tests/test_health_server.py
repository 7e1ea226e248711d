"""The probes' server takes whoever hangs up, and a lack of descriptors, in its stride."""

from __future__ import annotations

import errno
import http.client
import logging
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.runtime.health import GroupReport
from penstock.runtime.health_server import PAUSE_SECONDS, HealthServer
from tests.waiting import SOON_SECONDS, wait_until

REQUEST = b"GET /healthz HTTP/1.0\r\n\r\n"


@contextmanager
def serving(read: Any = lambda: None) -> Iterator[HealthServer]:
    server = HealthServer("127.0.0.1", 0, read)
    try:
        yield server
    finally:
        server.close()


def connected(server: HealthServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), SOON_SECONDS)


def hang_up(client: socket.socket) -> None:
    """At once and without a word, so that the kernel sends a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def is_answering() -> bool:
    return any("process_request" in thread.name for thread in threading.enumerate())


def test_a_probe_that_hangs_up_leaves_no_trace_in_the_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked, gone = threading.Event(), threading.Event()

    def read() -> GroupReport | None:
        asked.set()
        assert gone.wait(SOON_SECONDS)
        return None

    with serving(read) as server:
        for request in (REQUEST, REQUEST[:6]):
            client = connected(server)
            client.sendall(request)
            wait_until(asked.is_set if request == REQUEST else is_answering, what="it was heard")
            hang_up(client)
            gone.set()
            wait_until(lambda: not is_answering(), what="it is done with")
    assert capfd.readouterr().err == ""
    assert caplog.text == ""


def test_an_answer_that_cannot_be_made_is_one_line_in_the_log(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> GroupReport | None:
        raise LookupError("no report")

    with caplog.at_level(logging.WARNING, "penstock"), serving(read) as server:
        with connected(server) as client:
            client.sendall(REQUEST)
            assert client.recv(1) == b""
        wait_until(lambda: not is_answering(), what="it is done with")
    assert [record.getMessage() for record in caplog.records] == [
        "A probe got no answer: LookupError: no report"
    ]
    assert capfd.readouterr().err == ""


def test_without_descriptors_probes_wait_and_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = socketserver.TCPServer.get_request
    tried_at: list[float] = []

    def get_request(server: socketserver.TCPServer) -> Any:
        tried_at.append(time.monotonic())
        if len(tried_at) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", get_request)
    with serving() as server:
        client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=SOON_SECONDS)
        client.request("GET", "/healthz")
        assert client.getresponse().status == 503
        client.close()
    assert tried_at[3] - tried_at[0] >= 3 * PAUSE_SECONDS
