"""A lane's workplace: its connection, and what works on it, put together for one guarantee."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.core.failures import describe
from penstock.core.isolation import Batch
from penstock.core.leases import Lease
from penstock.core.options import Guarantee
from penstock.pipeline.attempt import Attempt, ExactlyOnce, Settled
from penstock.pipeline.calling import Calls, HandlerFailed
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.judgement import Blocked, Judgement
from penstock.pipeline.ledger import Ledger, NotFollowing
from penstock.pipeline.looser import AtLeastOnce, AtMostOnce
from penstock.pipeline.parking import Parking
from penstock.pipeline.resources import require_open
from penstock.pipeline.setting_aside import SettingAside
from penstock.pipeline.timing import Stopwatch, TimedAttempt
from penstock.pipeline.unsealing import Unsealing
from penstock.telemetry import signals
from penstock.telemetry.bus import emit, is_wanted


class Workplace:
    """Opened with a lane; renewed when its connection cannot be trusted any more."""

    def __init__(self, consuming: Consuming, parking: Parking, unsealing: Unsealing) -> None:
        self._consuming = consuming
        self._parking = parking
        self._unsealing = unsealing
        self._open()

    def run(self, batch: Batch, lease: Lease) -> Settled:
        """Settle the batch. Raises HandlerFailed, LeaseLost, or ServerUnavailable."""
        require_open(self._consuming.plan.resources)
        self.renew()
        settled = self.worker.run(lambda: self._attempt.run(batch, lease))
        if (called := settled.called) is None:
            return settled
        # The next event has spoiled the connection, which is no reason to call these again.
        self.renew()
        at = lease if batch.is_parked or settled.last == 0 else lease.at(settled.last)
        self.worker.run(lambda: self._attempt.run(called, at))
        return replace(settled, last=called.last, called=None)

    def begin_early(self, position: int, lease: Lease) -> Settled | None:
        """Settle the event that will most likely stand there, if there is one to begin with.

        None: it was begun with in vain, and nothing of it happened. That is nobody's failure.
        """
        name = self._consuming.name
        try:
            return self.run(Batch((), position, is_early=True), lease)
        except HandlerFailed as failure:
            self.renew(is_doubtful=failure.was_interrupted)
            if isinstance(failure.error, NotFollowing):
                return Settled(position - 1, 0)
            emit(signals.EarlyEventGivenUp(name, position, describe(failure.error)))
            return None

    def judge(self, batch: Batch, lease: Lease, failed: Exception | list[Any]) -> None:
        """Settle a failed event, or one that ended its processes. Raises Blocked, LeaseLost."""
        with self._renewed_where_blocked():
            self.worker.run(lambda: self._judgement.carry_out(batch, lease, failed))

    def write_letters(self) -> None:
        """Bury what failed after it was settled. Raises Blocked or ServerUnavailable."""
        self.renew(is_doubtful=self.worker.is_lost)
        with self._renewed_where_blocked():
            self.worker.run(self._judgement.write_letters)

    def renew(self, *, is_doubtful: bool = False) -> None:
        """No attempt begins on a connection that an earlier one has spoiled."""
        if is_doubtful or self.worker.is_spoiled:
            self.worker.close()
            self._open()

    def close(self) -> None:
        """Give the connection up."""
        self.worker.close()

    @contextmanager
    def _renewed_where_blocked(self) -> Iterator[None]:
        """It may be the connection that an event cannot be set aside on."""
        try:
            yield
        except Blocked as blocked:
            self.renew(is_doubtful=blocked.__cause__ is not None)
            raise

    def _open(self) -> None:
        consuming, parking, unsealing = self._consuming, self._parking, self._unsealing
        name, options, plan = consuming.name, consuming.options, consuming.plan
        seams = consuming.seams
        self.worker = worker = seams.open_worker()
        worker.meanwhile = seams.meanwhile
        ledger = Ledger(
            name,
            options,
            plan,
            schema=consuming.settings.schema,
            parked_per_key_max=consuming.settings.parked_per_key_max,
            parking=parking,
            worker=worker,
            seams=seams,
            unsealing=unsealing,
        )
        self._judgement = Judgement(
            name,
            options,
            f"{plan.function.__module__}.{plan.function.__qualname__}",
            aside=SettingAside(name, ledger=ledger, worker=worker, seams=seams),
            parking=parking,
            unsealing=unsealing,
            letters=consuming.losses.letters,
        )
        stopwatch = Stopwatch() if is_wanted(signals.AttemptEnded) else None
        calls = Calls(
            name,
            options,
            plan,
            worker=worker,
            seams=seams,
            unsealing=unsealing,
            replay=consuming.replay,
            timing=None if stopwatch is None else stopwatch.timing,
        )
        attempt = self._guaranteed(calls, ledger)
        timed = stopwatch and TimedAttempt(name, attempt, stopwatch)
        self._attempt: Attempt = timed or attempt

    def _guaranteed(self, calls: Calls, ledger: Ledger) -> Attempt:
        consuming = self._consuming
        name, options = consuming.name, consuming.options
        seams, worker = consuming.seams, self.worker
        match options.guarantee:
            case Guarantee.EXACTLY_ONCE:
                return ExactlyOnce(
                    name,
                    options,
                    consuming.plan,
                    calls=calls,
                    ledger=ledger,
                    worker=worker,
                    seams=seams,
                )
            case Guarantee.AT_LEAST_ONCE:
                return AtLeastOnce(name, calls=calls, ledger=ledger, worker=worker, seams=seams)
            case Guarantee.AT_MOST_ONCE:
                return AtMostOnce(
                    name,
                    calls=calls,
                    ledger=ledger,
                    worker=worker,
                    seams=seams,
                    on_failure=self._judgement.after_the_fact,
                )
