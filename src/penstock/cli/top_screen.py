"""How `penstock top` looks: one page of text, cut to the terminal's size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.cli.letter_output import one_line, print_letter
from penstock.cli.output import console as letter_console
from penstock.cli.output import plain, span
from penstock.cli.top_watch import News
from penstock.core.top import (
    ASCII_BARS,
    BARS,
    Page,
    Tracks,
    Trouble,
    View,
    by_trouble,
    compact,
    selected_of,
    share,
    sparkline,
    window,
)
from penstock.ops.status import ConsumerState, ConsumerStatus, StreamStatus, trouble_with
from penstock.ops.top import NewLetter, OpenLetter, ParkedHead

SILENT_SECONDS: Final = 5.0
"""A view that is so much older than it should be says so."""
PROBLEM_LINES_SHARE: Final = 5
"""Problems take at most this part of the screen."""
LEAST_ROWS: Final = (4, 2, 2, 2)
"""What consumers, streams, parked keys and errors have before one of them has more."""
KEYS: Final = "↑↓ select  p pause  r resume  d dead letter  ? help  q quit"
LETTER_KEYS: Final = "↑↓ scroll  b back  q quit"
HELP: Final = """\
↑ ↓  j k          select a consumer; the one with the most trouble is the first
page up, down     ten at a time
p                 pause it, on all hosts, after a y
r                 let it go on, after a y
enter  d          its latest dead letter, as `penstock dlq show` has it
b  escape         back
q  ctrl-c         leave

Rates are per second, between the last two looks. The small bars are the lag of the last looks, \
the highest one full. Parked: keys that wait for another attempt at their first event; with a ! \
those of them that an operator has to decide about. `penstock status --json` has the same \
numbers for programs."""

_STYLES: Final = {
    Trouble.QUARANTINED: "bold red",
    Trouble.UNSERVED: "bold red",
    Trouble.HELD: "bold yellow",
    Trouble.LATE: "yellow",
    Trouble.PARKED: "yellow",
    Trouble.PAUSED: "cyan",
}
_STATES: Final = {ConsumerState.WAITING: "no worker"}


@dataclass(slots=True)
class Screen:
    """Remembers what the numbers were, and draws what they are."""

    console: Console
    title: str
    interval_seconds: float
    heads: Tracks = field(default_factory=Tracks)
    checkpoints: Tracks = field(default_factory=Tracks)
    lags: Tracks = field(default_factory=Tracks)
    letter: OpenLetter | None = None
    scroll_max: int = 0
    """How far the page that was drawn last can be scrolled."""
    _seen_at: float = 0.0

    def observe(self, news: News) -> None:
        """Take in a sight, once."""
        if news.seen_at == self._seen_at:
            return
        self._seen_at = news.seen_at
        status = news.sight.status
        self.heads.observe(news.seen_at, {each.name: each.head for each in status.streams})
        consumers = status.consumers
        self.checkpoints.observe(news.seen_at, {each.name: each.checkpoint for each in consumers})
        self.lags.observe(news.seen_at, {each.name: each.lag_events for each in consumers})

    def draw(self, news: News, view: View) -> RenderableType:
        """The whole page."""
        width, height = self.console.size
        match view.page:
            case Page.HELP:
                lines = list(Text(HELP).wrap(self.console, width))
                return self._paged("Keys", lines, view, height)
            case Page.LETTER if self.letter is not None:
                lines = self._letter_lines(self.letter, width)
                return self._paged(
                    f"Dead letter of {self.letter.full.letter.consumer}", lines, view, height
                )
        top = self._top(news, width, height)[: height - 1]
        body = self._sections(news, view, width, height - len(top) - 1)
        return Group(*top, *body, *self._gap(len(top), body, height), _foot(view))

    # ── the top ────────────────────────────────────────────────────────────────────────────────

    def _top(self, news: News, width: int, height: int) -> list[Text]:
        head = Text.assemble(("penstock top", "bold"), "  ", self.title)
        clock = f"{news.seen_clock:%H:%M:%S} UTC, every {self.interval_seconds:g} s"
        head.append(" " * max(2, width - head.cell_len - len(clock)) + clock, "dim")
        lines = [head]
        lines += [_cut(text, "bold white on red") for text in self._away(news)]
        problems = news.sight.problems
        if not problems:
            lines.append(Text("healthy", "bold green"))
        else:
            noun = "problem" if len(problems) == 1 else "problems"
            lines.append(Text(f"{len(problems)} {noun}", "bold red"))
        room = max(2, height // PROBLEM_LINES_SHARE)
        for number, problem in enumerate(problems):
            wrapped = Text(f"! {plain(problem.message)}").wrap(self.console, width)
            if len(wrapped) > room:
                lines.append(Text(f"… {len(problems) - number} more: penstock status", "dim"))
                break
            lines += wrapped
            room -= len(wrapped)
        return [_cropped(line) for line in lines]

    def _away(self, news: News) -> list[str]:
        age = time.monotonic() - news.seen_at
        away = []
        if news.postgres_trouble is not None:
            away.append(f"{news.postgres_trouble}.")
        elif age > SILENT_SECONDS + self.interval_seconds:
            away.append("PostgreSQL does not answer.")
        if away:
            away.append(f"What is shown is {span(int(age * 1000))} old.")
        if news.redis_trouble is not None:
            away.append(f"Redis is away: {news.redis_trouble}. PostgreSQL serves the reads.")
        return away

    # ── the tables ─────────────────────────────────────────────────────────────────────────────

    def _sections(self, news: News, view: View, width: int, rows: int) -> list[Any]:
        sight = news.sight
        found = {each.name: each for each in sight.status.consumers}
        names = by_trouble((trouble_with(each), each.name) for each in found.values())
        streams = sorted(
            sight.status.streams, key=lambda s: (s.oldest_unnumbered_ms < 1000, s.name)
        )
        parked, letters = sight.parked, sight.letters
        wanted = [len(names), len(streams), len(parked), len(letters)]
        shown, *others = share(rows, wanted, LEAST_ROWS, overhead=2)
        selected = selected_of(view, names)
        place = names.index(selected) if selected is not None else 0
        seen = [found[names[index]] for index in window(len(names), shown, place)]
        sections = (
            (self._streams(streams[: others[0]], len(streams)), others[0]),
            (self._consumers(seen, len(names), selected, width), shown),
            (_parked(parked[: others[1]], sum(c.parked_keys for c in found.values())), others[1]),
            (_letters(letters[: others[2]]), others[2]),
        )
        drawn: list[Any] = []
        for table, height in sections:
            if height:
                drawn += [Text(), _Sized(table, height + 1)]
        return drawn

    def _streams(self, streams: Sequence[StreamStatus], total: int) -> Table:
        table = _table(_counted("Streams", len(streams), total))
        for heading, width in (("head", 13), ("rate/s", 7), ("published", 13), ("backlog", 7)):
            table.add_column(heading, justify="right", width=width, no_wrap=True)
        table.add_column("oldest", justify="right", width=11, no_wrap=True)
        for each in streams:
            backlog = each.unnumbered + max(0, each.head - each.published)
            table.add_row(
                f"  {each.name}{' (of another service)' if each.is_source else ''}",
                f"{each.head:,}",
                _rate(self.heads.rate(each.name)),
                f"{each.published:,}",
                compact(backlog) + ("+" if each.unnumbered_is_capped else ""),
                span(each.oldest_unnumbered_ms) if each.oldest_unnumbered_ms else "",
                style="yellow" if each.oldest_unnumbered_ms >= 60_000 else "",
            )
        return table

    def _consumers(
        self, consumers: Sequence[ConsumerStatus], total: int, selected: str | None, width: int
    ) -> Table:
        is_wide = width >= 120
        table = _table(_counted("Consumers", len(consumers), total))
        if is_wide:
            table.add_column("stream", max_width=20, no_wrap=True, overflow="ellipsis")
        table.add_column("state", width=11, no_wrap=True)
        for heading, size in (("lag", 6), ("late", 11), ("rate/s", 6)):
            table.add_column(heading, justify="right", width=size, no_wrap=True)
        bars_width = max(8, min(40, width - 80))
        table.add_column("lag, lately", width=max(bars_width, 11), no_wrap=True)
        table.add_column("parked", justify="right", width=8, no_wrap=True)
        table.add_column("dead", justify="right", width=6, no_wrap=True)
        bars = ASCII_BARS if self.console.options.ascii_only else BARS
        for each in consumers:
            held = f"{compact(each.held_keys)}!" if each.held_keys else ""
            cells = [
                f"{'>' if each.name == selected else ' '} {each.name}",
                *([each.stream_name] if is_wide else []),
                _STATES.get(each.state, each.state.value),
                compact(each.lag_events),
                "?" if each.lag_ms is None else span(each.lag_ms) if each.lag_ms else "",
                _rate(self.checkpoints.rate(each.name)),
                sparkline(self.lags.history(each.name), bars_width, bars),
                " ".join(part for part in (held, compact(each.parked_keys)) if part),
                compact(each.dead_letters),
            ]
            style = _STYLES.get(trouble_with(each), "")
            table.add_row(*cells, style=f"{style} reverse" if each.name == selected else style)
        return table

    # ── other pages ────────────────────────────────────────────────────────────────────────────

    def _letter_lines(self, letter: OpenLetter, width: int) -> list[Text]:
        # As the command prints it, so that both say the same.
        with letter_console.capture() as printed:
            print_letter(letter.full, letter.operations)
        lines = Text.from_ansi(printed.get())
        return list(lines.wrap(self.console, width))

    def _paged(self, title: str, lines: Sequence[Text], view: View, height: int) -> RenderableType:
        room = max(1, height - 3)
        self.scroll_max = max(0, len(lines) - room)
        first = min(view.scroll, self.scroll_max)
        shown = [_cropped(line) for line in lines[first : first + room]]
        more = f"  lines {first + 1}-{first + len(shown)} of {len(lines)}"
        head = Text.assemble((title, "bold"), (more if len(lines) > room else "", "dim"))
        padding = [Text()] * (height - 3 - len(shown))
        return Group(_cropped(head), Text(), *shown, *padding, _cut(LETTER_KEYS, "dim"))

    def _gap(self, taken: int, body: Sequence[Any], height: int) -> list[Text]:
        used = taken + 1 + sum(part.height if isinstance(part, _Sized) else 1 for part in body)
        return [Text()] * (height - used)


class _Sized:
    """A table whose height is known, since none of its cells wraps."""

    def __init__(self, table: Table, height: int) -> None:
        self.height = height
        self._table = table

    def __rich__(self) -> Table:
        return self._table


def _table(first: str) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(first, ratio=1, no_wrap=True, overflow="ellipsis")
    return table


def _parked(parked: Sequence[ParkedHead], total: int) -> Table:
    table = _table(_counted("Parked keys", len(parked), total))
    table.add_column("first event", max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column("key", max_width=16, no_wrap=True, overflow="ellipsis")
    table.add_column("behind", justify="right", width=6, no_wrap=True)
    table.add_column("next", justify="right", width=11, no_wrap=True)
    table.add_column("error", ratio=1, no_wrap=True, overflow="ellipsis")
    for each in parked:
        table.add_row(
            f"  {each.consumer}",
            f"{each.stream_name}/{each.position}",
            Text(one_line(each.key) or "-"),
            compact(each.waiting),
            _next(each),
            Text(one_line(each.last_error) or ""),
            style="bold yellow" if each.held else "",
        )
    return table


def _next(parked: ParkedHead) -> str:
    if parked.held:
        return "held"
    seconds = parked.next_attempt_in_seconds or 0
    return "now" if seconds <= 0 else span(int(seconds * 1000))


def _letters(letters: Sequence[NewLetter]) -> Table:
    table = _table("Latest errors")
    table.add_column("event", max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column("ago", justify="right", width=11, no_wrap=True)
    table.add_column("error", ratio=2, no_wrap=True, overflow="ellipsis")
    for each in letters:
        error = ": ".join(part for part in (each.error_type, each.error_message) if part)
        table.add_row(
            f"  {each.consumer}",
            f"{each.stream_name}/{each.position}",
            span(each.age_ms),
            Text(one_line(error or each.reason) or ""),
        )
    return table


def _counted(title: str, shown: int, total: int) -> str:
    return title if shown >= total else f"{title} ({shown} of {total:,})"


def _rate(rate: float | None) -> str:
    return "" if rate is None else compact(rate)


def _foot(view: View) -> Text:
    if view.asking is not None:
        action = view.asking
        return _cut(f"{action.verb.value.capitalize()} {action.consumer}? y/n", "bold reverse")
    return _cut(view.said, "bold") if view.said else _cut(KEYS, "dim")


def _cut(text: str, style: str) -> Text:
    return _cropped(Text(plain(text).replace("\n", " "), style))


def _cropped(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
