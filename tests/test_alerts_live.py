"""The alert rules on what a real `penstock run` says, when all is well and when it is not.

Each alert has a scene of its own in tests/alert_drill.py; here several happen at once.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.alert_drill import watch_of
from tests.alert_scenes import alerts, crash_loop, held, poisoned, supervisor_lost, waiting
from tests.alert_site import Site

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stops processes it finds by /healthz"),
    pytest.mark.long,
]

TROUBLE = alerts(
    "ConsumerLate",
    "ConsumerVeryLate",
    "DeadLettersRising",
    "KeysHeld",
    "CrashLoop",
    "WorkersQuarantined",
)
GONE = alerts("SupervisorDown", "NoSupervisor", "LagUnknown")


def test_alerts_are_silent_when_all_is_well_and_fire_when_it_is_not(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with closing(Site(database_url, redis_url, tmp_path, is_archived=False, is_quick=True)) as site:
        site.send(10)
        site.wait_until_well()
        watch = watch_of(site)
        assert watch.pass_minutes(16) == set()
        with ExitStack() as stack:
            for cause in (poisoned, held, crash_loop, waiting(10)):
                stack.enter_context(cause(site))
            assert watch.pass_minutes(7) == TROUBLE
            assert watch.alerts.said["PenstockKeysHeld"] == "Keys that shop.ship holds: 1"
            with supervisor_lost(site):
                watch.pass_minutes(7)
                # What happened within the last quarter of an hour is still told.
                assert watch.firing - alerts("DeadLettersRising") == GONE
