"""Python source, laid out as a formatter leaves it, in which nothing foreign can run.

Text of another service reaches the source in two ways only: as a string literal, by `quoted`, and
as a docstring, by `docstring`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

LINE_MAX = 100
_INDENT = 4


@dataclass(frozen=True, slots=True)
class Atom:
    """What is never broken: a name, a literal."""

    text: str
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Brackets:
    """A call, a subscript or a display: `head` ends with what `tail` closes."""

    head: str
    items: tuple[Code, ...]
    tail: str
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternatives:
    """Types with `|` between them."""

    members: tuple[Code, ...]


Code: TypeAlias = Atom | Brackets | Alternatives


def name(text: str) -> Atom:
    """A name that the module has to know."""
    return Atom(text, (text,))


def call(function: str, *items: Code) -> Brackets:
    """A call of something that the module has to know."""
    return Brackets(f"{function}(", items, ")", (function.partition(".")[0],))


def argument(keyword: str, value: Atom | Brackets) -> Atom | Brackets:
    """An argument of a call."""
    if isinstance(value, Atom):
        return replace(value, text=f"{keyword}={value.text}")
    return replace(value, head=f"{keyword}={value.head}")


def subscript(generic: str, *items: Code) -> Brackets:
    """A type with parameters."""
    return Brackets(f"{generic}[", items, "]", (generic,))


def names_in(code: Code) -> Iterator[str]:
    """The names that a piece of code needs."""
    if isinstance(code, Alternatives):
        for member in code.members:
            yield from names_in(member)
        return
    yield from code.uses
    if isinstance(code, Brackets):
        for item in code.items:
            yield from names_in(item)


def flat(code: Code) -> str:
    """On one line, however long."""
    match code:
        case Atom(text):
            return text
        case Brackets(head, items, tail):
            return head + ", ".join(map(flat, items)) + tail
        case Alternatives(members):
            return " | ".join(map(flat, members))


def width(text: str) -> int:
    """The columns that a line takes."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def laid_out(code: Code, indent: int, *, before: int | None = None, after: int = 0) -> str:
    """On one line if it fits between what stands before and after it, else broken."""
    column = indent if before is None else before
    fits = column + width(flat(code)) + after <= LINE_MAX
    return flat(code) if fits else broken(code, indent)


def broken(code: Code, indent: int) -> str:
    """Over several lines; the first one continues a line that has the indent given."""
    match code:
        case Atom(text):
            return text
        case Brackets(head, items, tail):
            # Formatters add no comma behind a single parameter: it would make a tuple of it.
            comma = "," if len(items) > 1 or tail != "]" else ""
            inner = indent + _INDENT
            rows = [f"{' ' * inner}{laid_out(item, inner, after=len(comma))}" for item in items]
            return f"{head}\n" + ",\n".join(rows) + f"{comma}\n{' ' * indent}{tail}"
        case Alternatives(members):
            first, *others = members
            rows = [laid_out(first, indent)]
            rows += [laid_out(other, indent, before=indent + 2) for other in others]
            return f"\n{' ' * indent}| ".join(rows)


def field_lines(field_name: str, annotation: Code, value: Atom | Brackets | None) -> str:
    """A field of a class, with its value if it has one."""
    lead = f"{' ' * _INDENT}{field_name}: "
    line = lead + flat(annotation) + (f" = {flat(value)}" if value else "")
    if width(line) <= LINE_MAX:
        return line
    start = f"{lead}{flat(annotation)} = "
    if value and (lines := _with_broken_value(start, value)):
        return lines
    if isinstance(value, Atom) and (isinstance(annotation, Atom) or len(value.text) > 30):
        # A long literal cannot be broken; what holds it can.
        value = call("Field", argument("default", value))
        if lines := _with_broken_value(start, value):
            return lines
    start = lead + _broken_annotation(annotation)
    if value is None:
        return start
    last = start.rpartition("\n")[2]
    return f"{start} = {laid_out(value, _INDENT, before=width(last) + 3)}"


def _with_broken_value(start: str, value: Atom | Brackets) -> str:
    """Empty if breaking the value alone is not enough."""
    if isinstance(value, Brackets) and width(start + value.head) <= LINE_MAX:
        return start + broken(value, _INDENT)
    below = " " * _INDENT * 2 + flat(value)
    if width(start) < LINE_MAX and width(below) <= LINE_MAX:
        return f"{start}(\n{below}\n{' ' * _INDENT})"
    return ""


def _broken_annotation(annotation: Code) -> str:
    if not isinstance(annotation, Alternatives):
        return broken(annotation, _INDENT)
    inner = _INDENT * 2
    return f"(\n{' ' * inner}{laid_out(annotation, inner)}\n{' ' * _INDENT})"


def member_lines(member: str, value: str) -> str:
    """A member of an enumeration."""
    line = f"{' ' * _INDENT}{member} = {value}"
    inner = " " * _INDENT * 2 + value
    if width(line) <= LINE_MAX or width(inner) > LINE_MAX:
        return line
    return f"{' ' * _INDENT}{member} = (\n{inner}\n{' ' * _INDENT})"


def is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can hold; pydantic refuses others."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(text: str) -> str:
    """A string literal that is exactly this text, in the quotes that need fewer escapes."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    return f"{quote}{_escaped(text).replace(quote, chr(92) + quote)}{quote}"


def _escaped(text: str, keep: str = "") -> str:
    return "".join(
        character
        if character in keep or (character.isprintable() and character != "\\")
        # By repr(), which knows every character that cannot stand for itself.
        else repr(character)[1:-1]
        for character in text
    )


def docstring(text: str, indent: int = 0) -> str:
    """A docstring that says this; empty if there is nothing to say."""
    escaped = _escaped("\n".join(text.strip().splitlines()), keep="\n")
    if not escaped:
        return ""
    lines = [line.rstrip() for line in escaped.split("\n")]
    body = _without_closing_quotes("\n".join(lines))
    if len(lines) > 1:
        body += "\n"
    pad = " " * indent
    return "\n".join(pad + line if line else "" for line in f'"""{body}'.split("\n")) + (
        f'{pad}"""' if body.endswith("\n") else '"""'
    )


def _without_closing_quotes(text: str) -> str:
    last = len(text) - 1
    return "".join(
        f"\\{character}"
        if character == '"' and (place in (0, last) or text[place + 1] == '"')
        else character
        for place, character in enumerate(text)
    )


def comment(notes: Iterable[str], indent: int = 0) -> list[str]:
    """A comment that names what the code below it leaves out. Notes are never foreign text."""
    named = list(dict.fromkeys(notes))
    return [f"{' ' * indent}# Left out: {', '.join(named)}"] if named else []
