"""The options that choose dead letters, and how commands ask and are interrupted."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from penstock.ops.dead_letters import Request
from penstock.runtime.stopping import told_of_stop_signals

EXIT_INTERRUPTED = 130
NAME_HELP = "The consumer: its full name, or the part after the pipeline's."
BURIAL_HELP = "Why they were buried: exhausted, fatal, contract, crash, interrupted or tampered."
TIME = "TIME|2h|7d"

Consumer = Annotated[str | None, typer.Option(metavar="NAME", help=NAME_HELP)]


def _option(help_text: str, metavar: str, *names: str) -> Any:
    return Annotated[str | None, typer.Option(*names, metavar=metavar, help=help_text)]


CRITERIA = {
    "consumer": Consumer,
    "stream": _option("Events of this stream.", "STREAM"),
    "event_type": _option("The event's type.", "TYPE", "--type"),
    "error": _option("A part of the error's type.", "TYPE", "--error"),
    "group": _option("As `list --groups` shows it.", "FINGERPRINT"),
    "reason": _option(BURIAL_HELP, "REASON", "--burial-reason"),
    "key": _option("Events with this key.", "KEY"),
    "since": _option("Buried at or after this time.", TIME),
    "until": _option("Buried before this time.", TIME),
    "position": _option("At these positions.", "A[..B]"),
    "state": _option("dead, held or redriving.", "STATE"),
}
"""The fields of a `Request`, as options."""

References = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID|UUID|STREAM/POSITION", help="Letters by name."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Reveal = Annotated[
    bool,
    typer.Option("--reveal", help="Open what is encrypted; needs the right to use its KMS key."),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
By = Annotated[
    str | None, typer.Option("--by", metavar="NAME", help="Who does it; by default user@host.")
]
Why = Annotated[
    str, typer.Option("--reason", metavar="TEXT", help="Why; kept for whoever looks later.")
]


def with_criteria(command: Callable[..., None], **others: Any) -> Callable[..., None]:
    """Give a command the options that choose letters; it receives them as its `request`.

    `others` replace single ones.
    """
    options = {**CRITERIA, **others}

    @functools.wraps(command)
    def run(*arguments: Any, **given: Any) -> None:
        criteria = {name: given.pop(name) for name in options}
        command(*arguments, request=Request(**criteria), **given)

    own = inspect.signature(command, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
        for name, option in options.items()
    ]
    kept = [parameter for name, parameter in own.parameters.items() if name != "request"]
    first = [parameter for parameter in kept if parameter.kind is not parameter.KEYWORD_ONLY]
    then = [parameter for parameter in kept if parameter.kind is parameter.KEYWORD_ONLY]
    run.__signature__ = own.replace(parameters=[*first, *added, *then])  # type: ignore[attr-defined]
    return run


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether SIGINT or SIGTERM has come meanwhile, to be asked between two steps."""
    signals: list[None] = []
    with told_of_stop_signals(lambda: signals.append(None)):
        yield lambda: bool(signals)
