"""A small KMS of our own, over HTTP as AWS speaks it, that can be away and can say no."""

from __future__ import annotations

import base64
import json
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# What comes from a proxy, a portal or a broken server in the place of an answer, with code 200.
WRONG_BODIES: dict[str, bytes] = {
    "a page": b"<html>Sign in to this network</html>",
    "nothing": b"",
    "an empty object": b"{}",
    "a list": b"[]",
    "no text": b"\xff\xfe{",
    "half of it": b'{"Plaintext": "AAAA',
    "a short key": b'{"Plaintext": "AAAAAAAAAAAAAAAAAAAAAA==", "CiphertextBlob": "", "KeyId": "a"}',
    "no base64": b'{"Plaintext": "abc", "CiphertextBlob": "abc", "KeyId": "a"}',
    "a number": b'{"Plaintext": 7, "CiphertextBlob": 7, "KeyId": 7}',
}
_ERRORS: dict[str, tuple[int, Any]] = {
    "refuse": (400, {"__type": "AccessDeniedException", "Message": "no longer yours"}),
    "fail": (500, {"__type": "KMSInternalException", "Message": "not now"}),
    "throttle": (429, b"slow down"),
    "stop at the gate": (403, b"<html>Not from here</html>"),
}


class FakeKms:
    """One wrapping key. `answer` is what it does: serve, one of _ERRORS or of WRONG_BODIES, or
    "give another": a key, as it should be, but not the one that was wrapped."""

    def __init__(self) -> None:
        self.arn = f"arn:aws:kms:eu-west-1:000000000000:key/{uuid.uuid4()}"
        self.answer = "serve"
        self.asked: list[str] = []
        self._cipher = AESGCM(AESGCM.generate_key(256))

    def handle(self, target: str, request: dict[str, Any]) -> tuple[int, Any]:
        action = target.rpartition(".")[2]
        self.asked.append(action)
        if self.answer in WRONG_BODIES:
            return 200, WRONG_BODIES[self.answer]
        if self.answer in _ERRORS:
            return _ERRORS[self.answer]
        context = json.dumps(request.get("EncryptionContext", {}), sort_keys=True).encode()
        if action == "Decrypt":
            wrapped = base64.b64decode(request["CiphertextBlob"])
            try:
                secret = self._cipher.decrypt(wrapped[:12], wrapped[12:], context)
            except InvalidTag:
                return 400, {"__type": "InvalidCiphertextException", "Message": ""}
            if self.answer == "give another":
                secret = AESGCM.generate_key(256)
            return 200, {"Plaintext": base64.b64encode(secret).decode(), "KeyId": self.arn}
        secret = AESGCM.generate_key(256)
        if action == "Encrypt":
            secret = base64.b64decode(request["Plaintext"])
        nonce = uuid.uuid4().bytes[:12]
        wrapped = nonce + self._cipher.encrypt(nonce, secret, context)
        return 200, {
            "KeyId": self.arn,
            "Plaintext": base64.b64encode(secret).decode(),
            "CiphertextBlob": base64.b64encode(wrapped).decode(),
        }


@contextmanager
def running_kms(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKms]:
    """The fake, and an environment that leads to it."""
    kms = FakeKms()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, answer = kms.handle(self.headers["X-Amz-Target"], json.loads(body))
            raw = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_arguments: Any) -> None:
            """Nobody reads it."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="kms")
    thread.start()
    lead_to(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    try:
        yield kms
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lead_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Have AWS' own tools ask there."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "eu-west-1",
    }.items():
        monkeypatch.setenv(name, value)


def hide_package(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    for name in [*sys.modules, package]:
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
