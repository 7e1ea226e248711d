"""The application of the drill with Redis timers: handlers that write down what they were given."""

from __future__ import annotations

import os
import time
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.orm import Session

from penstock import Pipeline, Retry, TimerMessage

PLAIN, ONCE = "drill", "drill_once"
NOTES = Path(os.environ.get("DRILL_NOTES", os.devnull))
"""A line for each call: timer, due, the monotonic clock of all processes, this process's time."""

pipeline = Pipeline("drill")
options = {
    "max_concurrent": int(os.environ.get("DRILL_CONCURRENT", "5")),
    "lease_ttl": float(os.environ.get("DRILL_LEASE", "3")),
    "retry": Retry.fixed(seconds=0.05, attempts_max=3),
}
notes = os.open(NOTES, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@pipeline.timer(PLAIN, **options)  # type: ignore[arg-type]
def remind(message: TimerMessage) -> None:
    # In one piece, and out of this process before it can be killed.
    line = f"{message.timer_id} {message.due_at.timestamp()} {time.monotonic()} {time.time()}\n"
    os.write(notes, line.encode())


@pipeline.timer(ONCE, **options)  # type: ignore[arg-type]
def remind_once(message: TimerMessage, session: Session) -> None:
    session.execute(
        text(
            "INSERT INTO drill_effect (timer_id, due_at, begun_at)"
            " VALUES (:timer_id, :due_at, clock_timestamp())"
        ),
        {"timer_id": message.timer_id, "due_at": message.due_at},
    )
    if message.attempt <= (message.body or {}).get("failures", 0):
        raise ValueError(message.attempt)
