"""What is read step by step: shown on a terminal meanwhile, and ended by Ctrl-C between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from penstock.cli.letter_options import EXIT_INTERRUPTED, interruptible
from penstock.cli.output import error_console, print_note


@contextmanager
def steps_shown() -> Iterator[Callable[[str, int, int], None]]:
    """Gives a function to call after each step: with what, how far, and of how many.

    It raises typer.Exit once somebody has interrupted, which is for work that changes nothing.
    """
    with (
        interruptible() as is_interrupted,
        Progress(
            *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()),
            console=error_console,
            transient=True,
            disable=not error_console.is_terminal,
        ) as bar,
    ):
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)
            if is_interrupted():
                print_note("Interrupted. Nothing was changed; begin again whenever you like.")
                raise typer.Exit(EXIT_INTERRUPTED)

        yield show
