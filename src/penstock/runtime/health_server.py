"""`/healthz`, `/readyz` and `/metrics` over HTTP. Probes are answered without asking anybody."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.errors import UsageError
from penstock.runtime.exposition import CONTENT_TYPE, exposed
from penstock.runtime.health import GroupReport
from penstock.telemetry.metrics import Reading

REQUEST_SECONDS = 5.0
PAUSE_SECONDS = 0.1
JSON = "application/json"

_logger = logging.getLogger("penstock")


class HealthServer:
    """Answers from the supervisor's last report until it is closed.

    What `more` gives is told as metrics beside those of the report; no two parts of it share one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        read: Callable[[], GroupReport | None],
        *,
        more: Callable[[], Iterable[Sequence[Reading]]] = tuple,
        option: str = "--health-port",
    ) -> None:
        class Handler(_Handler):
            read_report = staticmethod(read)
            read_more = staticmethod(more)

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise UsageError(
                f"{option} {port} on {host} cannot be listened on: {error.strerror}. "
                "Nothing was started; choose another port, or end what uses this one."
            ) from None
        self.port = int(self._server.server_address[1])
        threading.Thread(
            target=self._server.serve_forever, name="penstock-health", daemon=True
        ).start()

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def get_request(self) -> tuple[Any, Any]:
        try:
            return super().get_request()
        except OSError:
            # Out of descriptors, say: whoever knocks is still there, and is heard again at once.
            time.sleep(PAUSE_SECONDS)
            raise

    def handle_error(self, *_: Any) -> None:
        error = sys.exception()
        # Whoever hangs up has no more use for an answer.
        if not isinstance(error, ConnectionError | TimeoutError):
            _logger.warning("A probe got no answer: %s: %s", type(error).__name__, error)


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server_version = "penstock"
    sys_version = ""
    read_report: Callable[[], GroupReport | None]
    read_more: Callable[[], Iterable[Sequence[Reading]]]

    def do_GET(self) -> None:
        report, now = self.read_report(), time.monotonic()
        if report is None:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"reasons": ["still starting"]})
            return
        match self.path.partition("?")[0]:
            case "/healthz":
                status = _status(report.is_alive(now))
                self._answer(status, report.as_json(now))
            case "/readyz":
                reasons = report.obstacles(now)
                self._answer(_status(not reasons), {"ready": not reasons, "reasons": reasons})
            case "/metrics":
                parts = [exposed(report.as_readings()), *map(exposed, self.read_more())]
                self._write(HTTPStatus.OK, CONTENT_TYPE, "".join(parts).encode())
            case _:
                self._answer(HTTPStatus.NOT_FOUND, {"paths": ["/healthz", "/readyz", "/metrics"]})

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        self._write(status, JSON, json.dumps(body).encode())

    def _write(self, status: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Probes come every few seconds; a line each would bury the rest."""


def _status(is_fine: bool) -> HTTPStatus:
    return HTTPStatus.OK if is_fine else HTTPStatus.SERVICE_UNAVAILABLE
