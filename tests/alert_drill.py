"""Every alert on real servers: it fires when it has to, alone, and is silent when all is well.

`python -m tests.alert_drill [WORD]` starts `penstock run --metrics-port` for each scene (of those
whose name has the word in it), lets Prometheus' time pass, brings about what the scene is about,
and puts it right again. The rules are those of deploy/prometheus, the samples what was scraped.
Time is scaled: scrapes are told to be a minute apart, and what waits is made older in its table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import redis

from penstock.stores.migrations import migrate
from penstock.stores.servers import running_servers
from penstock.stores.servers.pair import Servers
from tests import promtool
from tests.alert_app import BILL
from tests.alert_rules import Watch, read_rules
from tests.alert_scenes import SCENES, Scene
from tests.alert_site import Site, consumer_labels
from tests.databases import new_database, server_folder
from tests.failure_drill import say
from tests.waiting import SOON_SECONDS, wait_until

WELL_MINUTES = 10.0
BUSY_STEPS = 20
AFTERWARDS_MINUTES = 17.0
"""Longer than any window that a rule looks back."""


@contextmanager
def opened_site(servers: Servers, supervisors: int) -> Iterator[Site]:
    """An installation of its own, at work."""
    assert servers.redis_url is not None
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-")))
        url = stack.enter_context(new_database(servers.database_url))
        migrate(url)
        with closing(redis.Redis.from_url(servers.redis_url)) as client:
            client.flushdb()
        site = Site(url, servers.redis_url, folder, supervisors=supervisors)
        stack.callback(site.close)
        site.send(10)
        site.wait_until_well()
        yield site


def watch_of(site: Site) -> Watch:
    """Prometheus, with all supervisors of a site as its targets."""
    return Watch(
        {f"host-{number}": supervisor.scrape for number, supervisor in enumerate(site.supervisors)}
    )


def play(site: Site, scene: Scene) -> list[str]:
    """Go through one scene; returns what was wrong."""
    watch = watch_of(site)
    faults = []
    if early := watch.pass_minutes(WELL_MINUTES):
        faults.append(f"before anything happened: {sorted(early)}")
    with scene.cause(site):
        fired = watch.pass_minutes(scene.minutes)
        faults += [f"{name} did not fire" for name in sorted(scene.fires - fired)]
        faults += [f"{name} fired as well" for name in sorted(fired - scene.fires)]
        for name in sorted(fired):
            say(f"    {name}: {watch.alerts.said[name]}")
    if not scene.is_mortal:
        site.wait_until_well()
        wait_until(
            lambda: not watch.step(),
            seconds=2 * SOON_SECONDS,
            what=lambda: f"{sorted(watch.firing)} end:\n{site.tails()}",
        )
        if again := watch.pass_minutes(AFTERWARDS_MINUTES):
            faults.append(f"after everything was put right: {sorted(again)}")
    return faults + promtool.objections(watch)


def stay_well(site: Site) -> list[str]:
    """A busy time in which nothing goes wrong; returns what was told all the same."""
    watch = watch_of(site)
    name, labels = "events_pipeline_consumer_handled_total", consumer_labels(BILL)
    fired: set[str] = set()

    def handled() -> float:
        return sum(each.told(name, **labels) or 0 for each in site.supervisors)

    with site.feeding():
        for number in range(BUSY_STEPS):
            site.schedule(f"timer {number}")
            wait_until_more(handled)
            fired |= watch.step()
    return [f"{name} fired" for name in sorted(fired)] + promtool.objections(watch)


def wait_until_more(count: Callable[[], float]) -> None:
    """A count has grown."""
    before = count()
    wait_until(lambda: count() > before, what="more is handled")


def main() -> int:
    """Play all scenes; 1 if one of them went otherwise than it says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="", help="only scenes with this in their name")
    chosen = [scene for scene in SCENES if parser.parse_args().word in scene.what]
    failed = 0

    def report(what: str, faults: list[str], began_at: float) -> int:
        seconds = time.monotonic() - began_at
        say(f"{'NOT as' if faults else 'as'} it should be, {seconds:.1f} s: {what}")
        for fault in faults:
            say(f"    {fault}")
        return bool(faults)

    with server_folder() as folder, running_servers(folder, durable=False) as servers:
        if chosen == list(SCENES):
            began_at = time.monotonic()
            with opened_site(servers, supervisors=2) as site:
                failed += report("all is well under load", stay_well(site), began_at)
        for scene in chosen:
            began_at = time.monotonic()
            with opened_site(servers, scene.supervisors) as site:
                failed += report(scene.what, play(site, scene), began_at)
    seen = set().union(*(scene.fires for scene in chosen))
    say(f"{len(seen)} of {len(read_rules())} alerts fired; {failed} scenes went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
