"""A process is killed around a call to the outside: what the next one does, and what is known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pytest

from penstock.telemetry.failpoints import ENVIRONMENT_NAME
from tests.effect_child import outside_calls

ROOT = Path(__file__).parent.parent
IN_THE_CALL = "call"

pytestmark = pytest.mark.slow


def run_child(
    database_url: str, folder: Path, event_uuid: str, interrupted: str, dies_at: str = ""
) -> subprocess.CompletedProcess[str]:
    is_in_call = dies_at == IN_THE_CALL
    failpoint = f"{dies_at}:kill" if dies_at and not is_in_call else ""
    fate = IN_THE_CALL if is_in_call else "-"
    return subprocess.run(
        [
            *(sys.executable, "-m", "tests.effect_child"),
            *(database_url, str(folder), event_uuid, interrupted, fate),
        ],
        cwd=ROOT,
        env={**os.environ, ENVIRONMENT_NAME: failpoint},
        capture_output=True,
        text=True,
        check=False,
    )


class Case(NamedTuple):
    """Where a process dies under which policy; what the next one does."""

    dies_at: str
    interrupted: str
    calls: int
    is_unknown: bool


CASES = (
    # Nobody had been called; "bury" cannot know that, and does not guess.
    Case("EffectStarted", "retry", calls=1, is_unknown=False),
    Case("EffectStarted", "bury", calls=0, is_unknown=True),
    # The outside has done it. This is the repetition that an idempotency key makes harmless.
    Case(IN_THE_CALL, "retry", calls=2, is_unknown=False),
    Case(IN_THE_CALL, "bury", calls=1, is_unknown=True),
    Case("EffectCalled", "retry", calls=2, is_unknown=False),
    Case("EffectCalled", "bury", calls=1, is_unknown=True),
    # On record: no policy calls again.
    Case("EffectRecorded", "retry", calls=1, is_unknown=False),
    Case("EffectRecorded", "bury", calls=1, is_unknown=False),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dies_at}-{case.interrupted}")
def test_what_the_next_process_does_depends_on_what_is_known_alone(
    database_url: str, tmp_path: Path, case: Case
) -> None:
    event_uuid = str(uuid4())
    victim = run_child(database_url, tmp_path, event_uuid, case.interrupted, case.dies_at)
    assert victim.returncode == -signal.SIGKILL, victim.stderr
    assert len(outside_calls(tmp_path)) == (0 if case.dies_at == "EffectStarted" else 1)

    next_one = run_child(database_url, tmp_path, event_uuid, case.interrupted)

    assert next_one.returncode == 0, next_one.stderr
    seen: dict[str, Any] = json.loads(next_one.stdout)
    reached = outside_calls(tmp_path)
    assert len(reached) == case.calls
    if case.is_unknown:
        assert "may or may not have happened" in seen["unknown"]
        assert "It was not called again" in seen["unknown"]
    else:
        # The result of the call that is on record, whoever made it.
        assert seen == {"result": {"charged_by": reached[-1]}}
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT is_done, calls FROM events.effect").fetchall()
    is_repeated = case.interrupted == "retry" and case.dies_at != "EffectRecorded"
    assert rows == [(not case.is_unknown, 2 if is_repeated else 1)]
