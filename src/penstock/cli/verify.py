"""`penstock verify`: whether the books balance, proved by reading them, while everybody works."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from penstock.cli.invocation import Invocation, invocation_of
from penstock.cli.letter_options import Consumer, Json
from penstock.cli.looking import steps_shown
from penstock.cli.output import console, print_error, print_json, print_note
from penstock.core.books import Anomaly, ConsumerBooks
from penstock.core.settings import Settings
from penstock.errors import SchemaMismatch, ServerUnavailable
from penstock.ops.verify import Report, Step, StreamReport, Verify
from penstock.ops.verify_tiers import HotTier, Tier
from penstock.runtime.posts import EXIT_SURROUNDINGS
from penstock.stores.postgres import NO_ANSWER, trouble_in_words
from penstock.stores.redis_log import RedisLog

EXIT_NO = 1


def verify(
    context: typer.Context,
    stream: Annotated[
        str | None, typer.Option(metavar="STREAM", help="Only this stream; by default all.")
    ] = None,
    consumer: Consumer = None,
    json_output: Json = False,
    hot_log: Annotated[
        bool, typer.Option("--hot-log/--no-hot-log", help="Whether to compare Redis as well.")
    ] = True,
) -> None:
    """Prove that every position is in exactly one place. Exit 1: the books do not balance.

    It only reads, and workers go on meanwhile. Without a terminal it says only what is wrong.
    """
    invocation = invocation_of(context)
    try:
        report = _verified(invocation, stream, consumer, hot_log=hot_log)
    except (ServerUnavailable, SchemaMismatch, *NO_ANSWER) as error:
        # Not the answer no: there is none, and a probe must be able to tell.
        print_error(f"{trouble_in_words(error) or error} The books are neither proved nor refuted.")
        raise typer.Exit(EXIT_SURROUNDINGS) from None
    if json_output:
        print_json(report.as_json())
    else:
        _tell(report, invocation.settings)
    if not report.balance:
        raise typer.Exit(EXIT_NO)


def _verified(
    invocation: Invocation, stream: str | None, consumer: str | None, *, hot_log: bool
) -> Report:
    settings = invocation.settings
    with (
        invocation.connect("verify") as connection,
        _tiers(settings, hot_log=hot_log) as tiers,
        steps_shown() as show,
    ):

        def tell(step: Step) -> None:
            show(step.what, step.done, step.total)

        return Verify(connection, settings, tiers=tiers, on_step=tell).run(stream, consumer)


@contextmanager
def _tiers(settings: Settings, *, hot_log: bool) -> Iterator[tuple[Tier, ...]]:
    """What there is to compare PostgreSQL with."""
    if settings.redis_url is None or not hot_log:
        yield ()
        return
    log = RedisLog(settings.redis_url, prefix=settings.redis_prefix)
    try:
        yield (HotTier(log),)
    finally:
        log.close()


def _tell(report: Report, settings: Settings) -> None:
    if console.is_terminal:
        for stream in report.streams:
            for line in _shown(stream):
                console.print(line)
    else:
        _tell_of_unread(report)
    for finding in report.findings:
        print(finding)
    if any(finding.anomaly is Anomaly.SKIPPED for finding in report.findings):
        print_note(
            "Settled rows are expected for settled_retention_days "
            f"({settings.settled_retention_days:g}). If the workers' setting is shorter, or was, "
            "these were pruned: set PENSTOCK_SETTLED_RETENTION_DAYS for this command alike."
        )
    if report.balance and console.is_terminal:
        print("The books balance.")


def _tell_of_unread(report: Report) -> None:
    """Say on stderr what was proved without: silence would mean that it agrees."""
    tiers = [tier for stream in report.streams for tier in stream.tiers if not tier.was_read]
    # One server serves many streams.
    for name, remark in dict.fromkeys((tier.name, tier.remark) for tier in tiers):
        print_note(f"The {name} was not compared with PostgreSQL, or not all of it: {remark}")


def _shown(stream: StreamReport) -> Iterator[str]:
    yield f"{stream.name}: {_extent(stream)}"
    for books in stream.consumers:
        yield f"  {_counts(books)}"
    for tier in stream.tiers:
        remark = f" ({tier.remark})" if tier.remark else ""
        yield f"  {tier.name}: {_range(tier.first, tier.last)}, {tier.compared:,} compared{remark}"


def _extent(stream: StreamReport) -> str:
    if stream.is_foreign:
        return "of another database; only what was parked or buried here is looked at"
    if not stream.head:
        return "nothing is published yet"
    holes = f", {stream.holes:,} of them in holes" if stream.holes else ""
    text = f"positions up to {stream.head:,}{holes}"
    if stream.proved_from > 1:
        text += f"; proved from {stream.proved_from:,} on, since what came before is pruned"
    return text


def _counts(books: ConsumerBooks) -> str:
    """Every place, and those that hold nothing only where people look for them."""
    due = {**books.as_plain(), "pruned": books.pruned}
    always = ("handled", "pending")
    shown = [f"{due[name]:,} {name}" for name in due if due[name] or name in always]
    others = {
        "before its start": books.before,
        "behind its end": books.behind,
        "in holes": books.holes,
    }
    apart = [f"; {count:,} {name}" for name, count in others.items() if count]
    return f"{books.name}: of {books.due:,} due {', '.join(shown)}{''.join(apart)}"


def _range(first: int | None, last: int | None) -> str:
    return "empty" if first is None or last is None else f"{first:,}..{last:,}"
