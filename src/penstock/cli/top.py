"""`penstock top`: streams and consumers as they move, on the whole screen, with keys to act."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Final, assert_never

import psycopg
import typer
from rich.console import Console
from rich.live import Live

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.top_keys import Keyboard, keyboard
from penstock.cli.top_screen import Screen
from penstock.cli.top_watch import Watcher
from penstock.core.masking import masked_url
from penstock.core.top import Action, Page, Verb, View, by_trouble, press
from penstock.errors import UsageError
from penstock.ops.consumers import Consumers
from penstock.ops.status import trouble_with
from penstock.ops.top import OpenLetter, Sight, latest_letter, look
from penstock.stores.identity import operator_id

CLOCK_SECONDS: Final = 1.0
"""The screen is drawn again at least so often, so that it can say how old it is."""
PAUSE_REASON: Final = "by hand, in penstock top"

Connection = psycopg.Connection[Any]


def top(
    context: typer.Context,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.2, max=3600, help="Look so often.")
    ] = 1.0,
    stream: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Only this stream and its consumers.")
    ] = None,
) -> None:
    """Watch streams, rates, lag, parked keys and errors; pause and resume by a key."""
    require_terminal()
    invocation = invocation_of(context)
    settings = invocation.settings
    connection = invocation.connect("top")
    if stream is not None:
        _require_stream(look(connection, settings.schema), stream)
    with keyboard(sys.stdin.fileno()) as keys:
        watcher = Watcher(
            connection,
            connect=lambda: invocation.connect("top"),
            look=lambda on: look(on, settings.schema, stream=stream),
            redis_url=settings.redis_url,
            interval_seconds=interval,
            on_news=keys.wake,
        )
        screen = Screen(_console(), _title(invocation, stream), interval)
        with suppress(KeyboardInterrupt):
            _Session(watcher, screen, keys, settings.schema).run()


def require_terminal() -> None:
    """Refuse where there is no screen to draw on or no keys to read. Raises UsageError."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            "`penstock top` needs a terminal for its screen and its keys. For a pipe, a file or a "
            "program there is `penstock status --json`."
        )
    if os.environ.get("TERM", "dumb") in {"dumb", "unknown"}:
        raise UsageError(
            "`penstock top` needs a terminal that can place its cursor, and TERM says that this "
            "one cannot. Set TERM, or use `penstock status`, or `penstock status --json`."
        )


def _require_stream(sight: Sight, stream: str) -> None:
    known = [each.name for each in sight.status.streams]
    if stream not in known:
        there = f"there are: {', '.join(known)}." if known else "this database has none yet."
        raise UsageError(f"There is no stream {stream!r}; {there}")


def _console() -> Console:
    # Without the size that a shell may have exported: it would stand still when the window grows.
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    return Console(highlight=False, markup=False, _environ=environment)


def _title(invocation: Invocation, stream: str | None) -> str:
    address = masked_url(invocation.settings.database_url).rpartition("@")[2].partition("?")[0]
    return address if stream is None else f"{address}, stream {stream}"


class _Session:
    """One person before one screen."""

    def __init__(self, watcher: Watcher, screen: Screen, keys: Keyboard, schema: str) -> None:
        self._watcher = watcher
        self._screen = screen
        self._keys = keys
        self._schema = schema
        self._view = View()

    def run(self) -> None:
        """Draw and obey until somebody leaves."""
        self._watcher.start()
        try:
            with Live(console=self._screen.console, screen=True, auto_refresh=False) as live:
                while not self._keys.is_ended:
                    self._take_answers()
                    news = self._watcher.news
                    self._screen.observe(news)
                    live.update(self._screen.draw(news, self._view), refresh=True)
                    scroll = min(self._view.scroll, self._screen.scroll_max)
                    self._view = replace(self._view, scroll=scroll)
                    if not all(map(self._obey, self._keys.wait(CLOCK_SECONDS))):
                        return
        finally:
            self._watcher.stop()

    def _obey(self, key: str) -> bool:
        names = by_trouble(
            (trouble_with(each), each.name) for each in self._watcher.news.sight.status.consumers
        )
        self._view, action = press(self._view, key, names)
        if action is None:
            return True
        if action.verb is Verb.QUIT:
            return False
        self._watcher.ask(action, _question(action, self._schema))
        self._view = replace(self._view, said="…")
        return True

    def _take_answers(self) -> None:
        while not self._watcher.answers.empty():
            result = self._watcher.answers.get().result
            if isinstance(result, OpenLetter):
                self._screen.letter = result
                self._view = replace(self._view, page=Page.LETTER, scroll=0, said="")
            else:
                self._view = replace(self._view, said=result)


def _question(action: Action, schema: str) -> Callable[[Connection], str | OpenLetter]:
    name = action.consumer

    def ask(connection: Connection) -> str | OpenLetter:
        match action.verb:
            case Verb.PAUSE:
                by = operator_id()
                is_new = Consumers(connection, schema).pause([name], by=by, reason=PAUSE_REASON)
                return f"{name} is paused." if is_new else f"{name} was paused already."
            case Verb.RESUME:
                was_paused = Consumers(connection, schema).resume([name])
                return f"{name} goes on." if was_paused else f"{name} was not paused."
            case Verb.OPEN:
                return latest_letter(connection, name, schema) or f"{name} has no dead letter."
            case Verb.QUIT:
                raise AssertionError("leaving asks nothing")
            case unreachable:
                assert_never(unreachable)

    return ask
