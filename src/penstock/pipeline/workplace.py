"""A lane's workplace: its connection, and what works on it, put together for one guarantee."""

from __future__ import annotations

from penstock.core.options import Guarantee
from penstock.pipeline.attempt import Attempt, ExactlyOnce
from penstock.pipeline.calling import Calls
from penstock.pipeline.consuming import Consuming
from penstock.pipeline.judgement import Judgement
from penstock.pipeline.ledger import Ledger
from penstock.pipeline.looser import AtLeastOnce, AtMostOnce
from penstock.pipeline.parking import Parking
from penstock.pipeline.setting_aside import SettingAside
from penstock.pipeline.timing import Stopwatch, TimedAttempt
from penstock.pipeline.unsealing import Unsealing
from penstock.telemetry import signals
from penstock.telemetry.bus import is_wanted


class Workplace:
    """Opened with a lane, and again when its connection cannot be trusted any more."""

    def __init__(self, consuming: Consuming, parking: Parking, unsealing: Unsealing) -> None:
        name, options, plan = consuming.name, consuming.options, consuming.plan
        seams = consuming.seams
        self.worker = worker = seams.open_worker()
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
        self.judgement = Judgement(
            name,
            options,
            f"{plan.function.__module__}.{plan.function.__qualname__}",
            aside=SettingAside(name, ledger=ledger, worker=worker, seams=seams),
            parking=parking,
            unsealing=unsealing,
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
        attempt = self._attempt(consuming, calls, ledger)
        self.attempt = attempt if stopwatch is None else TimedAttempt(name, attempt, stopwatch)

    def _attempt(self, consuming: Consuming, calls: Calls, ledger: Ledger) -> Attempt:
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
                    on_failure=self.judgement.after_the_fact,
                )
