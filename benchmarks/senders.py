"""Senders: concurrent commits that may have to wake a publisher, against commits that never do."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import mean

import psycopg

from benchmarks.bed import Bed
from benchmarks.children import Child
from benchmarks.report import Claim, Round
from benchmarks.scale import Scale
from benchmarks.with_penstock import open_pipeline, opened_stage
from benchmarks.workload import tame_garbage_collection
from penstock.runtime.loop import Stage

CLAIM = Claim("send", "concurrent senders, wake-up / none", 0.95)

SOURCE_OF_SEND = "SELECT pg_get_functiondef('events.send_many(jsonb)'::regprocedure)"
WAKE_UP = re.compile(r"PERFORM pg_notify\(.*?;\n", re.DOTALL)


class Sending:
    """Measures senders on two databases that differ in the wake-up alone."""

    claim = CLAIM

    def __init__(
        self, scale: Scale, children: Sequence[Child], publishers: Sequence[Stage]
    ) -> None:
        self._scale = scale
        self._children = children
        self._publishers = publishers

    def measure(self) -> Round:
        """One round: slices with the wake-up and without in turn, the first ones to warm up."""
        self._slice()
        tame_garbage_collection()
        slices = [self._slice() for _ in range(self._scale.slices)]
        waking, silent = (mean(side) for side in zip(*slices, strict=True))
        return Round({"events/s": waking}, {"events/s": silent})

    def _slice(self) -> tuple[float, float]:
        silent = self._send(1)
        return self._send(0), silent

    def _send(self, variant: int) -> float:
        """All senders at once, while the publisher of their database works, sleeps and wakes."""
        publisher, stop = self._publishers[variant], threading.Event()
        thread = threading.Thread(target=_work, args=(publisher, stop))
        thread.start()
        for child in self._children:
            child.request(variant=variant, seconds=self._scale.sending_seconds)
        replies = [child.reply() for child in self._children]
        stop.set()
        thread.join()
        while publisher.step().moved:
            pass
        return float(sum(reply["sent"] / reply["seconds"] for reply in replies))


def _work(stage: Stage, stop: threading.Event) -> None:
    while not stop.is_set():
        if stage.step().is_idle:
            stage.wait(stop)


@contextmanager
def opened_senders(bed: Bed, scale: Scale) -> Iterator[Sequence[Sending]]:
    """Two databases, a publisher for each, and senders that know both."""
    urls = [bed.database("senders_waking"), bed.database("senders_silent")]
    _remove_wake_up(urls[1])
    with ExitStack() as stack:
        arguments = ("benchmarks.with_penstock", "sender", bed.redis_url, *urls)
        children = [stack.enter_context(Child(*arguments)) for _ in range(scale.senders)]
        publishers = [
            stack.enter_context(
                opened_stage(
                    # Nobody wakes the second one, so it polls, and publishes as much.
                    open_pipeline(
                        url, bed.redis_url, redis_prefix=f"bench-{wakeup}", wakeup=wakeup
                    ),
                    "publisher",
                )
            )
            for url, wakeup in zip(urls, ("notify", "poll"), strict=True)
        ]
        yield [Sending(scale, children, publishers)]


def _remove_wake_up(url: str) -> None:
    with psycopg.connect(url) as connection:
        row = connection.execute(SOURCE_OF_SEND).fetchone()
        assert row is not None
        source, found = WAKE_UP.subn("", row[0])
        assert found == 1, "send_many does not notify as this expects"
        connection.execute(source)
