"""A real terminal for tests: tmux where there is one, otherwise a pty behind an emulator.

Either starts a shell and types into it, so that a test sees what a person would, also before the
command and after it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.waiting import SOON_SECONDS, wait_until

PROMPT = "ready> "
KEYS = {"up": "\x1b[A", "down": "\x1b[B", "enter": "\r", "escape": "\x1b"}
# The window is the shell's own terminal, so that the kernel tells it of keys and sizes.
ON_TERMINAL = """
import fcntl, os, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp("sh", ["sh", "-i"])
"""
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class Device(Protocol):
    """What shows text and takes keys."""

    def type(self, text: str) -> None:
        """Press these keys."""

    def resize(self, columns: int, rows: int) -> None:
        """Make the window larger or smaller."""

    def screen(self) -> list[str]:
        """The lines that are to be seen."""

    def is_alternate(self) -> bool:
        """Whether a program has a screen of its own, that leaves no trace."""

    def close(self) -> None:
        """End it, and whatever runs in it."""


class Terminal:
    """A shell on a terminal."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.wait_for(lambda lines: lines[0].startswith(PROMPT.strip()), "the shell's prompt")

    def type(self, *texts: str) -> None:
        """Press these keys, by name or as they are."""
        self._device.type("".join(KEYS.get(text, text) for text in texts))

    def command(self, *words: str) -> None:
        self.type(shlex.join(words), "enter")

    def resize(self, columns: int, rows: int) -> None:
        self._device.resize(columns, rows)

    def lines(self) -> list[str]:
        return self._device.screen()

    def is_alternate(self) -> bool:
        return self._device.is_alternate()

    def line(self, part: str) -> str:
        """The first line with this in it."""
        return next(line for line in self.lines() if part in line)

    def wait_for(
        self, holds: Callable[[list[str]], bool], what: str, seconds: float = SOON_SECONDS
    ) -> None:
        wait_until(
            lambda: holds(self.lines()),
            what=lambda: f"{what} on a screen with\n" + "\n".join(self.lines()),
            seconds=seconds,
        )

    def wait_for_text(self, text: str) -> None:
        self.wait_for(lambda lines: text in "\n".join(lines), f"{text!r} is to be seen")

    def close(self) -> None:
        self._device.close()


def open_terminal(
    folder: Path,
    environment: Mapping[str, str],
    *,
    columns: int = 120,
    rows: int = 40,
    kind: str | None = None,
) -> Terminal:
    """A shell in a folder, with these variables; `kind` names one of KINDS."""
    kind = kind or ("tmux" if shutil.which("tmux") else "pty")
    shell = folder / "shell.sh"
    shell.write_text(f"PS1='{PROMPT}'; PS2=''\n")
    return Terminal(KINDS[kind](folder, {**environment, "ENV": str(shell)}, columns, rows))


class Tmux:
    """A window of a tmux server of its own."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], columns: int, rows: int
    ) -> None:
        # A socket's path must be short.
        self._folder = tempfile.TemporaryDirectory(prefix="tmux-")
        self._socket = f"{self._folder.name}/socket"
        size = ("-x", str(columns), "-y", str(rows))
        self._run(
            "-f", "/dev/null", "new-session", "-d", *size, "sh -i", cwd=folder, env=environment
        )

    def type(self, text: str) -> None:
        self._run("send-keys", "-H", *(f"{byte:02x}" for byte in text.encode()))

    def resize(self, columns: int, rows: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self) -> list[str]:
        return self._run("capture-pane", "-p").split("\n")

    def is_alternate(self) -> bool:
        return self._run("display-message", "-p", "#{alternate_on}").strip() == "1"

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._run("kill-server")
        self._folder.cleanup()

    def _run(self, *words: str, **options: Any) -> str:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            ["tmux", "-S", self._socket, *words],
            check=True,
            capture_output=True,
            encoding="utf-8",
            **options,
        )
        return done.stdout


class Pty:
    """A pseudo-terminal, read by an emulator in a thread."""

    def __init__(
        self, folder: Path, environment: Mapping[str, str], columns: int, rows: int
    ) -> None:
        pyte = pytest.importorskip("pyte", reason="neither tmux nor pyte is here")
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._is_alternate = False
        self._leader, follower = pty.openpty()
        self._set_size(columns, rows)
        self._shell = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", ON_TERMINAL],
            cwd=folder,
            env={**environment, "TERM": environment.get("TERM", "xterm-256color")},
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def type(self, text: str) -> None:
        os.write(self._leader, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def screen(self) -> list[str]:
        with self._lock:
            return [line.rstrip() for line in self._screen.display]

    def is_alternate(self) -> bool:
        return self._is_alternate

    def close(self) -> None:
        self._shell.send_signal(signal.SIGHUP)
        os.close(self._leader)
        self._shell.kill()
        self._shell.wait()

    def _read(self) -> None:
        # The end of the shell closes the other side, which is an error for this one.
        with suppress(OSError, ValueError):
            while select.select([self._leader], [], [])[0]:
                sent = os.read(self._leader, 65_536)
                with self._lock:
                    self._stream.feed(sent)
                    # The emulator has one screen only: remember which one it should be.
                    places = sent.rfind(ALTERNATE_ON), sent.rfind(ALTERNATE_OFF)
                    if max(places) >= 0:
                        self._is_alternate = places[0] > places[1]

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._leader, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


KINDS: Mapping[str, type[Tmux] | type[Pty]] = {"tmux": Tmux, "pty": Pty}
