"""Texts to show for a format, a length or a pattern."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

FORMATS: Final = {
    "base64": "dGV4dA==",
    "base64url": "dGV4dA==",
    "byte": "dGV4dA==",
    "color": "#336699",
    "date": "2024-01-31",
    "date-time": "2024-01-31T12:00:00Z",
    "directory-path": "/path/to/folder",
    "duration": "P1DT2H",
    "email": "someone@example.com",
    "file-path": "/path/to/file",
    "hostname": "host.example.com",
    "idn-email": "someone@example.com",
    "idn-hostname": "host.example.com",
    "ipv4": "192.0.2.1",
    "ipv4interface": "192.0.2.1/24",
    "ipv4network": "192.0.2.0/24",
    "ipv6": "2001:db8::1",
    "ipv6interface": "2001:db8::1/64",
    "ipv6network": "2001:db8::/64",
    "ipvanyaddress": "192.0.2.1",
    "ipvanyinterface": "192.0.2.1/24",
    "ipvanynetwork": "192.0.2.0/24",
    "iri": "https://example.com/",
    "iri-reference": "/path",
    "json-pointer": "/field",
    "json-string": "{}",
    "multi-host-uri": "postgresql://host.example.com/name",
    "name-email": "Someone <someone@example.com>",
    "path": "/path/to/file",
    "regex": "^a+$",
    "time": "12:00:00Z",
    "uri": "https://example.com/",
    "uri-reference": "/path",
    "uuid": "0190b5a1-8c3e-7d42-9f61-3b7a5c2d8e10",
    "uuid1": "8d3f1c52-bf9a-11ee-a506-0242ac120002",
    "uuid3": "6fa459ea-ee8a-3ca4-894e-db77e160355e",
    "uuid4": "3f2b8c1e-5d47-4a90-b6e3-91c8d2f07a54",
    "uuid5": "886313e1-3b8a-5372-9b90-0c9aee199e5d",
    "uuid6": "1eebf9a8-d3f1-6c52-a506-0242ac120002",
    "uuid7": "0190b5a1-8c3e-7d42-9f61-3b7a5c2d8e10",
    "uuid8": "0190b5a1-8c3e-8d42-9f61-3b7a5c2d8e10",
}

_PALETTE: Final = string.ascii_letters + "1234567890" + string.punctuation + " \t\nß€中"
_TEXT_LENGTH_MAX: Final = 10_000
_REPEATS: Final = (1, 0, 2, 3, 4, 6, 8, 12, 16, 24, 36, 64, 100, 200)
_ALTERNATIVES: Final = (0, 1, 2)


class _Unreadable(Exception):
    """The pattern says something that is not followed here."""


def texts_of_length(minimum: int, maximum: int | None) -> Iterator[str]:
    """Plain texts that are not too short, the plainest first; a limit may forbid them all."""
    length = len("text") if maximum is None else min(len("text"), maximum)
    if minimum <= length:
        yield "text"[:length]
    elif minimum <= _TEXT_LENGTH_MAX:
        yield ("text " * minimum)[: minimum - 1] + "t"


def text_like(pattern: str, is_right: Callable[[str], bool]) -> str | None:
    """A text that the pattern describes and that is right; None where none is found."""
    for alternative, repeats in product(_ALTERNATIVES, _REPEATS):
        try:
            text = _Reading(pattern, alternative, repeats).text()
        except (_Unreadable, re.error):
            return None
        if text is not None and is_right(text):
            return text
    return None


class _Reading:
    """One way through a pattern: which alternative to take, how often to repeat what may be."""

    def __init__(self, pattern: str, alternative: int, repeats: int) -> None:
        self.pattern = pattern
        self.alternative = alternative
        self.repeats = repeats
        self.at = 0
        self.written = alternative

    def text(self) -> str | None:
        """What this way writes; None if it is too long to show."""
        text = self._alternatives()
        if self.at < len(self.pattern):
            raise _Unreadable
        return text if len(text) < _TEXT_LENGTH_MAX else None

    def _alternatives(self) -> str:
        texts = [self._sequence()]
        while self._take("|"):
            texts.append(self._sequence())
        return texts[min(self.alternative, len(texts) - 1)]

    def _sequence(self) -> str:
        text = ""
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            write = self._atom()
            text += "".join(write() for _ in range(self._count()))
            if len(text) > _TEXT_LENGTH_MAX:
                # No more than that is kept: what repeats a long text would repeat all of it.
                text = text[:_TEXT_LENGTH_MAX]
        return text

    def _atom(self) -> Callable[[], str]:
        """The next thing in the pattern, as something that writes it."""
        start = self.at
        self.at += 1
        match self.pattern[start]:
            case "^" | "$":
                return lambda: ""
            case "(":
                text = self._group()
                return lambda: text
            case "[":
                self._skip_set()
            case "\\":
                self._skip_escape()
            case ".":
                pass
            case literal:
                return lambda: literal
        source = self.pattern[start : self.at]
        if source in {r"\b", r"\B", r"\A", r"\Z"}:
            return lambda: ""
        return self._writer_of(source)

    def _writer_of(self, source: str) -> Callable[[], str]:
        one = re.compile(source)
        choices = [sign for sign in _PALETTE if one.fullmatch(sign)]
        if not choices:
            raise _Unreadable

        def write() -> str:
            self.written += len(choices) > 1
            return choices[(self.written - 1) % len(choices)]

        return write

    def _group(self) -> str:
        is_written = True
        if self._take("?"):
            # Looking ahead writes nothing; whether it was content is seen at the end.
            is_written = not self.pattern.startswith(("=", "!", "<=", "<!"), self.at)
            opening = re.compile(r":|P?<\w+>|<?[=!]|[a-z]+:").match(self.pattern, self.at)
            if opening is None:
                raise _Unreadable
            self.at = opening.end()
        text = self._alternatives()
        if not self._take(")"):
            raise _Unreadable
        return text if is_written else ""

    def _skip_set(self) -> None:
        self._take("^")
        self._take("]")
        while not self._take("]"):
            if self.at >= len(self.pattern):
                raise _Unreadable
            self.at += 2 if self.pattern[self.at] == "\\" else 1

    def _skip_escape(self) -> None:
        hexadecimal = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}").match(self.pattern, self.at)
        self.at = hexadecimal.end() if hexadecimal else self.at + 1

    def _count(self) -> int:
        """How often the thing before is written, by the quantifier that follows it."""
        quantifier = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[?+]?").match(self.pattern, self.at)
        if quantifier is None:
            return 1
        self.at = quantifier.end()
        sign, least, comma, most = quantifier.groups()
        if sign:
            minimum, maximum = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        else:
            minimum = int(least or 0)
            maximum = int(most) if most else None if comma else minimum
        count = max(minimum, self.repeats)
        return min(count if maximum is None else min(count, maximum), _TEXT_LENGTH_MAX)

    def _take(self, sign: str) -> bool:
        is_there = self.pattern.startswith(sign, self.at)
        self.at += is_there * len(sign)
        return is_there
