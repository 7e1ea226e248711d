"""Several hosts share a consumer's lanes; hosts die, pause, join and leave, and nobody waits long.

`make fleet` does the same with a hundred thousand events, and tells the times.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.stores.servers import Servers
from tests.databases import new_database
from tests.fleet import Fleet, prepare, send
from tests.fleet_app import LANES
from tests.fleet_drill import disturb
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
CONSUMERS_ONLY = ("--consumers", "*")
# A machine with two cores that also runs other tests starts three hosts: promises are kept, but
# not to the second. `make fleet` is strict.
SLACK_SECONDS = 8.0


@pytest.fixture
def database(servers: Servers) -> Iterator[str]:
    with new_database(servers.database_url) as url:
        prepare(url)
        yield url


@contextmanager
def running_fleet(
    database_url: str, redis_url: str, folder: Path, **settings: Any
) -> Iterator[Fleet]:
    fleet = Fleet(database_url, redis_url, folder, **settings)
    try:
        yield fleet
    finally:
        fleet.close()


@pytest.mark.long
def test_hosts_that_die_pause_join_and_leave_cost_nothing_and_share_fairly(
    database: str, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(database, redis_url, tmp_path) as fleet:
        for _ in range(3):
            fleet.add_host()
        with fleet.feeding():
            fleet.wait_until_fair()
            for fault in ("kill host", "freeze host"):
                disturb(fleet, fault)
                fleet.wait_until_handled_more()
        fleet.wait_until_fair()
        assert fleet.close_books().sent > 1000


@pytest.mark.long
def test_no_key_waits_for_a_lease_when_a_worker_is_killed_or_a_host_restarted(
    database: str, redis_url: str, tmp_path: Path
) -> None:
    with (
        # Longer than any wait here: whoever takes over in time did not wait for a lease to end.
        running_fleet(database, redis_url, tmp_path, lease_seconds=300) as fleet,
        fleet.publishing(),
    ):
        with fleet.feeding():
            first, second = [fleet.add_host(*CONSUMERS_ONLY) for _ in range(2)]
            fleet.wait_until_fair()
            fleet.wait_until_handled_more()
            began_at = fleet.now()
            send(fleet.worker_of(first), signal.SIGKILL)
            fleet.wait_until_handled_more()
            fleet.wait_until_fair()
            fleet.replace(second, *CONSUMERS_ONLY)
            fleet.wait_until_fair()
        fleet.close_books()
        assert fleet.longest_wait_seconds(began_at) < 2.0 + SLACK_SECONDS


@pytest.mark.long
def test_lanes_of_a_lost_host_are_handled_again_when_their_lease_is_over(
    database: str, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(database, redis_url, tmp_path) as fleet, fleet.publishing():
        with fleet.feeding():
            victim, survivor = [fleet.add_host(*CONSUMERS_ONLY) for _ in range(2)]
            fleet.wait_until_fair()
            fleet.wait_until_handled_more()
            died_at = fleet.now()
            victim.die()
            fleet.remove(victim)
            wait_until(lambda: fleet.held()[survivor] == LANES, what="the survivor has all lanes")
        fleet.close_books()
        assert fleet.longest_wait_seconds(died_at) < fleet.lease_seconds + SLACK_SECONDS
