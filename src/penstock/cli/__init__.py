"""The command line. Exit codes: 0 fine, 1 the answer is no, 2 wrong usage or settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from penstock.cli.commands import Commands
from penstock.cli.invocation import Invocation
from penstock.cli.output import print_error
from penstock.errors import PenstockError, UsageError
from penstock.stores.postgres import trouble_in_words

EXIT_NO = 1
EXIT_USAGE = 2

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
        _require_text(sys.argv)
        application()
    except Exception as error:
        told = error if isinstance(error, PenstockError) else trouble_in_words(error)
        if told is None:
            raise
        print_error(str(told))
        sys.exit(EXIT_USAGE if isinstance(told, UsageError) else EXIT_NO)


def _require_text(arguments: Sequence[str]) -> None:
    """Refuse bytes that are no UTF-8, which Python hands over as something that nobody can send."""
    for argument in arguments:
        if not argument.isascii() and argument != argument.encode(errors="ignore").decode():
            raise UsageError(f"The argument {argument!r} is not UTF-8.")
