"""How the demo shows that it is alive: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from penstock.cli.demo_report import Counts

PLAIN_LINE_SECONDS = 2.0
REFRESHES_PER_SECOND = 10


class Display:
    """Shows sent, published and handled, the speed, and what is being done to the line."""

    def __init__(self, console: Console, events: int) -> None:
        self._console = console
        self._events = events
        self._started_at = time.monotonic()
        self._printed_at = 0.0
        self._flowing_since: float | None = None
        self._speed = Text("")
        self._news = Text("")
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description:<22}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            console=console,
        )

    @contextmanager
    def live(self) -> Iterator[None]:
        """While the block lasts, a terminal is kept up to date."""
        self._started_at = time.monotonic()
        if not self._console.is_terminal:
            yield
            return
        with Live(
            Group(self._progress, self._speed, self._news),
            console=self._console,
            refresh_per_second=REFRESHES_PER_SECOND,
        ):
            yield

    def tell(self, news: str) -> None:
        """Say what is being done to the line."""
        elapsed = time.monotonic() - self._started_at
        line = f"{elapsed:5.1f} s  {news}"
        if self._console.is_terminal:
            self._news.plain = line
            self._console.print(Text(line, "yellow"))
        else:
            self._console.print(line)

    def show(self, sent: int, counts: Counts) -> None:
        """Bring the numbers up to date."""
        numbers = {"sent": sent, "published": counts.published}
        numbers |= {f"handled by {name}": count for name, count in counts.handled.items()}
        elapsed = max(time.monotonic() - self._started_at, 0.001)
        if self._console.is_terminal:
            for name, value in numbers.items():
                if name not in self._tasks:
                    self._tasks[name] = self._progress.add_task(name, total=self._events)
                self._progress.update(self._tasks[name], completed=value)
            self._speed.plain = f"{self._events_per_second(counts):,.0f} events per second"
        elif elapsed - self._printed_at >= PLAIN_LINE_SECONDS:
            self._printed_at = elapsed
            shown = "  ".join(f"{name} {value:,}" for name, value in numbers.items())
            self._console.print(f"{elapsed:5.1f} s  {shown}")

    def _events_per_second(self, counts: Counts) -> float:
        """Handled by everybody, since the first event came through."""
        if self._flowing_since is None and counts.slowest:
            self._flowing_since = time.monotonic()
        flowing_seconds = time.monotonic() - (self._flowing_since or time.monotonic())
        return counts.slowest / max(flowing_seconds, 1.0)
