"""Processes that take requests as lines of JSON on stdin and end with their parent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

END_SECONDS = 10.0

Reply = dict[str, Any]


class Child:
    """A Python module that runs beside this process and answers requests."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def request(self, **request: Any) -> None:
        """Ask, without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def reply(self) -> Reply:
        """The answer to the oldest request."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended before it answered; see above")
        reply: Reply = json.loads(line)
        return reply

    def ask(self, **request: Any) -> Reply:
        """Ask and wait."""
        self.request(**request)
        return self.reply()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The end of its input tells it to finish.
        self._process.stdin.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def serve(answer: Callable[..., Reply]) -> None:
    """Answer requests until the parent closes our input."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def wait_for_parent() -> None:
    """Return when the parent closes our input, or dies."""
    sys.stdin.read()
