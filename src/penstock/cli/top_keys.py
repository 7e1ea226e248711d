"""A terminal that hands over each key at once, and is left as it was found."""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

READ_BYTES: Final = 1024
ESCAPE_SECONDS: Final = 0.05
"""How long the rest of a sequence may take; an Escape alone is one after that."""
ENDING: Final = (signal.SIGTERM, signal.SIGHUP)

_ESCAPE: Final = "\x1b"
_NAMES: Final = {"\r": "enter", "\n": "enter", "\x7f": "b", "\x08": "b", "\x03": "q", "\x04": "q"}
_SEQUENCES: Final = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "5~": "page up",
    "6~": "page down",
}


class KeyReader:
    """Turns what a terminal sends into names of keys; sequences may come in pieces."""

    def __init__(self) -> None:
        self._rest = ""

    @property
    def is_within_sequence(self) -> bool:
        """Whether an Escape was read that may be the beginning of something."""
        return bool(self._rest)

    def feed(self, sent: bytes) -> list[str]:
        """The keys that are complete now. What is no key that is known here is left out."""
        text = self._rest + sent.decode("utf-8", "ignore")
        self._rest = ""
        keys = []
        while text:
            if text[0] != _ESCAPE:
                keys.append(_NAMES.get(text[0], text[0]))
                text = text[1:]
                continue
            end = _end_of_sequence(text)
            if end is None:
                self._rest = text
                break
            keys.append(_SEQUENCES.get(text[2:end], "" if end > 1 else "escape"))
            text = text[end:]
        return [key for key in keys if key]

    def settle(self) -> list[str]:
        """Nothing more came: an Escape that was waiting was the key itself."""
        was_alone, self._rest = self._rest == _ESCAPE, ""
        return ["escape"] if was_alone else []


def _end_of_sequence(text: str) -> int | None:
    # Introduced by ESC [ or ESC O, ended by a letter or ~; None where it is not complete.
    if len(text) == 1:
        return None
    if text[1] not in "[O":
        return 1
    for place in range(2, len(text)):
        if text[place].isalpha() or text[place] == "~":
            return place + 1
    return None


class Keyboard:
    """Waits for keys, for news from other threads and for a changed size, all at once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._reader = KeyReader()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self.is_ended = False
        """Whether the terminal is gone, or a signal asked for the end."""

    def wake(self) -> None:
        """End the present wait, from any thread or signal handler."""
        # A full pipe wakes as well as one more byte would; a closed one has nobody to wake.
        with suppress(BlockingIOError, OSError):
            os.write(self._wake_write, b"w")

    def wait(self, seconds: float) -> list[str]:
        """The keys that came; nothing when woken, or when so much time has passed."""
        if self._reader.is_within_sequence:
            seconds = ESCAPE_SECONDS
        ready, _, _ = select.select([self._descriptor, self._wake_read], [], [], seconds)
        if self._wake_read in ready:
            os.read(self._wake_read, READ_BYTES)
        if self._descriptor not in ready:
            return self._reader.settle() if not ready else []
        try:
            sent = os.read(self._descriptor, READ_BYTES)
        except OSError:
            sent = b""
        self.is_ended = self.is_ended or not sent
        return self._reader.feed(sent)

    def end(self, *_signal: Any) -> None:
        """Ask for the end, as a signal does."""
        self.is_ended = True
        self.wake()

    def close(self) -> None:
        """Give the pipe back."""
        os.close(self._wake_read)
        os.close(self._wake_write)


@contextmanager
def keyboard(descriptor: int) -> Iterator[Keyboard]:
    """Keys one by one, unechoed, while the block lasts; then the terminal is as before."""
    before = termios.tcgetattr(descriptor)
    keys = Keyboard(descriptor)
    handlers = {number: signal.signal(number, keys.end) for number in ENDING}
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_signal: keys.wake())
    try:
        tty.setcbreak(descriptor)
        _forbid_suspending(descriptor)
        yield keys
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        keys.close()
        # A terminal that is gone needs nothing.
        with suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _forbid_suspending(descriptor: int) -> None:
    # A stopped process would leave the shell on the alternate screen, without an echo.
    attributes = termios.tcgetattr(descriptor)
    attributes[6][termios.VSUSP] = bytes([os.fpathconf(descriptor, "PC_VDISABLE") & 0xFF])
    termios.tcsetattr(descriptor, termios.TCSADRAIN, attributes)
