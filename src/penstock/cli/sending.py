"""`penstock send`: one event from the command line, or a stream of made-up ones."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn
from uuid import UUID

import typer
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from sqlalchemy.orm import Session

from penstock.app import Pipeline
from penstock.cli.invocation import invocation_of
from penstock.cli.output import console, error_console
from penstock.core.events import RawEvent
from penstock.core.outgoing import UNSET
from penstock.errors import InvalidEvent, UsageError
from penstock.runtime.stopping import told_of_stop_signals

DEMO_STREAM = "demo"
DEMO_TYPES = ("demo.order_placed", "demo.order_paid", "demo.order_cancelled")
DEMO_BATCH_MAX = 20
DEMO_ORDERS = 1000
PAYLOAD_TEXT_MAX = 64 * 1024 * 1024


def send(
    context: typer.Context,
    *,
    stream: Annotated[str | None, typer.Option(help="The stream to send to.")] = None,
    event_type: Annotated[str | None, typer.Option(help="For example orders.placed.")] = None,
    payload: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The payload, else {}; - reads it from stdin."),
    ] = None,
    key: Annotated[str | None, typer.Option(help="Events with the same key stay in order.")] = None,
    version: Annotated[
        int | None, typer.Option(help="The version of the event type, else 1.")
    ] = None,
    event_uuid: Annotated[
        UUID | None, typer.Option(help="Sending twice with the same id is safe.")
    ] = None,
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Send made-up events until Ctrl-C.")
    ] = False,
    rate: Annotated[
        float, typer.Option(help="Events per second with --continuous.", min=0.01)
    ] = 10.0,
) -> None:
    """Send an event in a transaction of its own and print its id."""
    invocation = invocation_of(context)
    if continuous:
        if any(given is not None for given in (event_type, payload, key, version, event_uuid)):
            raise UsageError("--continuous makes its events up; give it --stream and --rate only.")
        invocation.connect("send").close()
        try:
            _send_continuously(invocation.pipeline, stream or DEMO_STREAM, rate)
        finally:
            invocation.pipeline.engine.dispose()
        return
    if stream is None or event_type is None:
        raise UsageError("An event needs --stream and --event-type (or choose --continuous).")
    content = {} if payload is None else parse_payload(payload)
    event = RawEvent(event_type, content, version=1 if version is None else version)
    # Before SQLAlchemy: these errors say what to do about a server or a schema that is not there.
    invocation.connect("send").close()
    pipeline = invocation.pipeline
    try:
        sent = pipeline.send_now(
            stream, event, key=UNSET if key is None else key, event_uuid=event_uuid
        )
    finally:
        pipeline.engine.dispose()
    console.print(str(sent))


def parse_payload(text: str) -> Any:
    """The payload as JSON. Raises InvalidEvent that says where it goes wrong."""
    if text == "-":
        if sys.stdin is None:
            raise InvalidEvent("--payload - cannot be read: stdin is closed. Nothing was sent.")
        text = sys.stdin.read(PAYLOAD_TEXT_MAX)
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidEvent(
            f"--payload is not JSON: {error.msg} at line {error.lineno}, column {error.colno}. "
            """Nothing was sent; write for example --payload '{"order_id": 1}'."""
        ) from None
    except (RecursionError, UnicodeDecodeError, ValueError) as error:
        raise InvalidEvent(f"--payload cannot be read: {error}. Nothing was sent.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


# ── made-up events ─────────────────────────────────────────────────────────────────────────────


def _send_continuously(pipeline: Pipeline, stream: str, rate: float) -> None:
    sent, started = 0, time.monotonic()
    told = list[None]()

    def interrupt() -> NoReturn:
        # An interrupt may strike where errors are ignored, as in finalizers. It is remembered.
        told.append(None)
        raise KeyboardInterrupt

    progress = Progress(
        TextColumn("{task.completed:,.0f} events sent to " + stream),
        TimeElapsedColumn(),
        TextColumn("Ctrl-C ends"),
        console=error_console,
        transient=True,
    )
    try:
        with progress, told_of_stop_signals(interrupt):
            task = progress.add_task("sending", total=None)
            for batch in _batches():
                if told:
                    break
                with Session(pipeline.engine) as session, session.begin():
                    pipeline.send_many(session, stream, batch)
                sent += len(batch)
                progress.update(task, completed=sent)
                ahead_seconds = sent / rate - (time.monotonic() - started)
                threading.Event().wait(max(0.0, ahead_seconds))
    except KeyboardInterrupt:
        pass
    except Exception:
        # Whatever comes of a statement that was interrupted is no news.
        if not told:
            raise
    finally:
        console.print(f"{sent} events sent to {stream}.")


def _batches() -> Iterator[list[RawEvent]]:
    chance = random.Random()  # noqa: S311 - made-up orders need no secrecy
    while True:
        yield [_made_up(chance) for _ in range(chance.randint(1, DEMO_BATCH_MAX))]


def _made_up(chance: random.Random) -> RawEvent:
    order_id = chance.randint(1, DEMO_ORDERS)
    payload = {"order_id": order_id, "cents": chance.randint(1, 100_000)}
    return RawEvent(chance.choice(DEMO_TYPES), payload, key=str(order_id))
