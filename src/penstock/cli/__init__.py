"""The command line. Exit codes: 0 fine, 1 the answer is no, 2 wrong usage or settings."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, TextIO

import typer

from penstock.cli.commands import Commands
from penstock.cli.invocation import Invocation
from penstock.cli.output import print_error
from penstock.errors import PenstockError, UsageError
from penstock.stores.postgres import trouble_in_words

EXIT_NO = 1
EXIT_USAGE = 2
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

# Plain tracebacks: the pretty ones can print local variables, and those hold passwords.
application = typer.Typer(
    name="penstock",
    cls=Commands,
    help="Events from PostgreSQL to their handlers, each exactly once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {version('penstock')}")
        raise typer.Exit


@application.callback()
def remember_application(
    context: typer.Context,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            envvar="PENSTOCK_APP",
            metavar="MODULE:ATTRIBUTE",
            help="Where your Pipeline is, for example shop:pipeline.",
        ),
    ] = None,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """Events from PostgreSQL to their handlers, each exactly once."""
    context.obj = Invocation(app or None)


def main() -> None:
    """Run the command line; errors of Penstock's own and of servers become one message each."""
    try:
        _run()
    finally:
        # What cannot be said on stderr changes nothing, the exit code neither.
        with suppress(OSError):
            _flush(sys.stderr)


def _run() -> None:
    try:
        _require_text(sys.argv)
        try:
            application()
        finally:
            # Whether the answer can be written is known now, and not only when Python ends.
            _flush_answer()
    except Exception as error:
        told = error if isinstance(error, PenstockError) else _in_words(error)
        if told is None:
            raise
        print_error(str(told))
        sys.exit(EXIT_USAGE if isinstance(told, UsageError) else EXIT_NO)


def _flush_answer() -> None:
    """Write what is left of the answer. Raises OSError where there is no room for it."""
    try:
        _flush(sys.stdout)
    except BrokenPipeError:
        # Whoever read it has seen enough.
        sys.exit(EXIT_NO)


def _flush(stream: TextIO | None) -> None:
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        # When Python ends, it tries once more.
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        raise


def _in_words(error: Exception) -> PenstockError | str | None:
    """What a server's error, or a full disk, means to whoever gave a command; None: it is a bug."""
    if not isinstance(error, OSError) or error.errno not in FULL:
        return trouble_in_words(error)
    what = error.filename or "the answer"
    return f"There is no room for {what}: {error.strerror}. What was committed before stays."


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse bytes that are no UTF-8, which Python hands over as something that nobody can send."""
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="ignore").decode():
            raise UsageError(f"The argument {argument!r} is not UTF-8.")
