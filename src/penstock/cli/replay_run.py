"""A replay in the command's own process: shown while it runs, and told when it rests."""

from __future__ import annotations

import threading
import time

import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from penstock.cli.invocation import Invocation
from penstock.cli.letter_options import EXIT_INTERRUPTED
from penstock.cli.output import error_console, print_json, print_note
from penstock.core.replays import CANCELLED, Replay, ReplayProgress, ReplayState, ReplayTally
from penstock.errors import ConsumerAtWork
from penstock.ops.replays import ReplayBooks
from penstock.runtime.stopping import told_of_stop_signals
from penstock.stores.identity import operator_id

EXIT_NO = 1
INTERRUPTED = "interrupted by a signal"
LOOK_SECONDS = 0.2


def run_replay(invocation: Invocation, replay: Replay, *, json_output: bool) -> None:
    """Work on a replay until it rests, say what became of it, and leave with an exit code.

    The first SIGINT or SIGTERM pauses it after the batches in hand; a second one does not wait.
    """
    print_note(
        f"{replay.name} delivers {replay.stream_name} {replay.first}..{replay.last} again to "
        f"{replay.original}. Ctrl-C pauses it."
    )
    while True:
        was_told = _work(invocation, replay)
        with invocation.connect("replay") as connection:
            books = ReplayBooks(connection, invocation.settings.schema)
            progress = books.look(replay.name)
            # Right after it came to rest somebody may have redriven some of its letters.
            if was_told or not progress.has_work:
                patience_seconds = 2 * invocation.settings.lease_seconds
                code = _end(books, progress, patience_seconds, was_told, json_output=json_output)
                raise typer.Exit(code)


def _end(
    books: ReplayBooks,
    progress: ReplayProgress,
    patience_seconds: float,
    was_told: bool,
    *,
    json_output: bool,
) -> int:
    """Write down what became of it, and say so. Returns the exit code."""
    replay = progress.replay
    if progress.state is ReplayState.FINISHED:
        tally = _finish(books, replay, patience_seconds)
        _tell(progress, tally, json_output=json_output)
        return EXIT_NO if tally.dead else 0
    if was_told:
        books.pause(replay.name, by=operator_id(), reason=INTERRUPTED)
        progress = books.look(replay.name)
    _tell(progress, books.tally(replay.name), json_output=json_output)
    return EXIT_NO if progress.state is ReplayState.HELD else EXIT_INTERRUPTED


def _work(invocation: Invocation, replay: Replay) -> bool:
    """Returns whether a signal ended it."""
    stop = threading.Event()
    # No event: a second signal may come while the first one still holds its lock.
    told = list[None]()

    def ask_to_stop() -> None:
        if told:
            # As good as a kill: whoever resumes it finds everything as it was committed.
            raise KeyboardInterrupt
        told.append(None)
        stop.set()

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with (
        told_of_stop_signals(ask_to_stop),
        Progress(*columns, console=error_console, transient=True) as bar,
    ):
        task = bar.add_task("positions", total=replay.last - replay.first + 1)

        def show(progress: ReplayProgress) -> None:
            bar.update(task, completed=progress.passed, description=_described(progress))

        invocation.pipeline.run_replay(replay, stop, on_look=show)
    return bool(told)


def _described(progress: ReplayProgress) -> str:
    waiting = f", {progress.parked:,} parked" if progress.parked else ""
    dead = f", {progress.dead:,} dead" if progress.dead else ""
    redrive = ", awaiting a redrive" if progress.dead and progress.is_redriven else ""
    return f"positions{waiting}{dead}{redrive}"


def _finish(books: ReplayBooks, replay: Replay, patience_seconds: float) -> ReplayTally:
    gives_up_at = time.monotonic() + patience_seconds
    with error_console.status("") as shown:
        while True:
            try:
                return books.finish(
                    replay.name,
                    on_progress=lambda deleted: shown.update(
                        f"{deleted:,} rows of the replay deleted"
                    ),
                )
            except ConsumerAtWork:
                # A process that was killed counts as working on it until its time is up.
                if time.monotonic() > gives_up_at:
                    raise
                shown.update("all is handled; another process still seems to work on it")
                threading.Event().wait(LOOK_SECONDS)


def _tell(progress: ReplayProgress, tally: ReplayTally, *, json_output: bool) -> None:
    replay, state = progress.replay, progress.state
    is_being_cancelled = state is ReplayState.PAUSED and progress.pause_reason == CANCELLED
    if json_output:
        print_json(
            {
                **progress.as_json(),
                "handled": tally.handled,
                "skipped": tally.skipped,
                "discarded": tally.discarded,
            }
        )
    else:
        discarded = f", {tally.discarded:,} discarded" if tally.discarded else ""
        print(
            f"{replay.name} is {'being cancelled' if is_being_cancelled else state}: "
            f"{tally.handled:,} handled, {tally.skipped:,} skipped{discarded}, "
            f"{progress.parked:,} parked, {tally.dead:,} dead (operation {progress.operation_id})."
        )
    if is_being_cancelled:
        return
    if state not in (ReplayState.FINISHED, ReplayState.HELD):
        print_note(f"`penstock replay --resume {replay.name}` continues it.")
    elif progress.dead:
        print_note(
            f"`penstock dead-letters list --consumer {replay.name}` shows the dead letters. For "
            f"one more attempt start `penstock dead-letters redrive --consumer {replay.name}` with "
            f"`penstock replay --resume {replay.name}` beside it, in another terminal. Or discard "
            f"them, then resume it; or give it up with `penstock replay cancel {replay.name}`."
        )
