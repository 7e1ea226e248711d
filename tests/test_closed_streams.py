"""Started with its standard streams closed, as daemons may be, a run works all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from tests.waiting import SOON_SECONDS, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]


def test_no_pipe_takes_the_place_of_a_closed_stream(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "penstock", "run", "--publisher", "--health-port", "0"]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command],
        cwd=tmp_path,
        env={
            **os.environ,
            "PENSTOCK_DATABASE_URL": database_url,
            "PENSTOCK_REDIS_URL": redis_url,
        },
    )
    try:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("SELECT events.send('orders', 'placed', '{}')")
            wait_until(
                lambda: (
                    process.poll() is not None
                    or connection.execute("SELECT published FROM events.stream").fetchone() == (1,)
                ),
                what="the event is published",
            )
        workers = children_of(process.pid)
        assert workers
        for pid in (process.pid, *workers):
            streams = [Path(f"/proc/{pid}/fd/{number}").readlink() for number in (1, 2)]
            assert streams == [Path(os.devnull)] * 2
        process.terminate()
        assert process.wait(SOON_SECONDS) == 0
    finally:
        process.kill()
        process.wait()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
