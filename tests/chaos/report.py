"""What a run has done and found, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.telemetry.failpoints import Action
from tests.chaos.app import LATE
from tests.chaos.arming import NOT_REACHABLE
from tests.chaos.checker import Verdict
from tests.chaos.watch import Stall

AFTER_SECONDS = 1.0
"""A stall that begins so soon after a fault counts as that fault's."""
BEFORE_SECONDS = 0.5
"""It is dated from the last progress, which may be a little before the fault that ended it."""
STALLS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Demands:
    """What a run has to do to be worth anything, and how long nobody may stand still."""

    events: int = 1
    faults: int = 1
    kinds: int = 1
    failpoint_hits: int = 0
    """How often each failpoint that can be reached is hit, at least."""
    stall_seconds: float = 20.0
    settled_seconds: float = 30.0
    """Nothing is pending any more so long after the last fault."""


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault, by the clock of the machine; a failpoint that was hit is one, too."""

    kind: str
    started_at: float
    ended_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that there is to say about one run."""

    seed: int
    seconds: float
    profile: str
    command: str
    faults: Sequence[Injected]
    impossible: Mapping[str, str]
    """Kinds of faults that this machine cannot have, and why."""
    hits: Counter[tuple[str, Action]]
    missed: Sequence[str]
    stalls: Sequence[Stall]
    effects: int
    quarantined: int
    verified: int
    """How often `penstock verify` was asked meanwhile, and at the end."""
    verdict: Verdict
    demands: Demands

    @property
    def kinds(self) -> Counter[str]:
        """How many faults of each kind were injected."""
        return Counter(fault.kind for fault in self.faults)

    @property
    def events(self) -> int:
        return self.verdict.books.published

    @property
    def longest_stall(self) -> Stall | None:
        # The one that is added has a single host, and nobody who takes over from it.
        redundant = [stall for stall in self.stalls if LATE not in stall.who]
        return max(redundant, key=lambda stall: stall.seconds, default=None)

    def stalls_by_kind(self) -> dict[str, float]:
        """The longest stall that began during, or soon after, a fault of each kind."""
        longest: dict[str, float] = {}
        for stall in self.stalls:
            for kind in self.causes_of(stall):
                longest[kind] = max(longest.get(kind, 0.0), stall.seconds)
        return longest

    def causes_of(self, stall: Stall) -> list[str]:
        """The kinds of faults that were under way, or just over, when it began."""
        return sorted(
            {
                fault.kind
                for fault in self.faults
                if fault.started_at - BEFORE_SECONDS
                <= stall.started_at
                <= fault.ended_at + AFTER_SECONDS
            }
        )

    def longest_stalls(self) -> list[str]:
        """The worst of them, one line each."""
        worst = sorted(self.stalls, key=lambda stall: -stall.seconds)[:STALLS_SHOWN]
        begun_at = min((fault.started_at for fault in self.faults), default=0.0)
        return [
            f"{stall.seconds:.1f} s: {stall.who}, {stall.started_at - begun_at:.0f} s after the "
            f"first fault, with {', '.join(self.causes_of(stall)) or 'nothing'} under way"
            for stall in worst
        ]

    # ── the verdict ───────────────────────────────────────────────────────────────────────────

    def shortcomings(self) -> list[str]:
        """Everything that is wrong; empty: it holds."""
        return [*map(str, self.verdict.books.findings), *self.verdict.faults, *self._missed()]

    def _missed(self) -> Iterator[str]:
        demands = self.demands
        for what, found, wanted in (
            ("events", self.events, demands.events),
            ("faults", self.kinds.total(), demands.faults),
            ("kinds of faults", len(self.kinds), demands.kinds),
        ):
            if found < wanted:
                yield f"only {found} {what} of {wanted}"
        if demands.failpoint_hits and self.missed:
            yield f"failpoints not hit {demands.failpoint_hits} times: {', '.join(self.missed)}"
        stall = self.longest_stall
        if stall is not None and stall.seconds > demands.stall_seconds:
            yield (
                f"{stall.who} stood still for {stall.seconds:.1f} s, of {demands.stall_seconds:g}"
            )

    @property
    def holds(self) -> bool:
        return not self.shortcomings()

    # ── as text and as JSON ───────────────────────────────────────────────────────────────────

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "seed": self.seed,
            "seconds": self.seconds,
            "profile": self.profile,
            "command": self.command,
            "faults": dict(self.kinds.most_common()),
            "impossible": dict(self.impossible),
            "failpoints": {name: dict(actions) for name, actions in self._by_signal().items()},
            "failpoints_missed": list(self.missed),
            "failpoints_not_reachable": dict(NOT_REACHABLE),
            "events": self.events,
            "events_per_second": round(self.events / self.seconds, 1),
            "effects": self.effects,
            "longest_stall_seconds": self._longest_seconds(),
            "stall_seconds_by_kind": {
                kind: round(seconds, 2) for kind, seconds in self.stalls_by_kind().items()
            },
            "longest_stalls": self.longest_stalls(),
            "settled_seconds": self.verdict.settled_seconds,
            "buried": dict(self.verdict.explained),
            "quarantined": self.quarantined,
            "verified": self.verified,
            "books": self.verdict.books.as_plain(),
            "shortcomings": self.shortcomings(),
            "holds": self.holds,
        }

    def __str__(self) -> str:
        return "\n".join([*self._told(), "", *self._judged()])

    def _told(self) -> Iterator[str]:
        kinds, stalls = self.kinds, self.stalls_by_kind()
        yield f"seed {self.seed}, {self.seconds:g} s, profile {self.profile}"
        yield f"{kinds.total()} faults of {len(kinds)} kinds (longest stall during or after it):"
        for kind, count in kinds.most_common():
            stall = f"{stalls[kind]:6.1f} s" if kind in stalls else ""
            yield f"  {count:>5} {kind:<32} {stall}".rstrip()
        for kind, why in self.impossible.items():
            yield f"      - {kind:<32} not here: {why}"
        by_signal = self._by_signal()
        yield f"failpoints hit: {len(by_signal)} signals, {self.hits.total()} times"
        for name, actions in by_signal.items():
            yield f"  {name:<22} " + ", ".join(f"{a} {n}" for a, n in actions.items())
        yield f"failpoints not hit: {', '.join(self.missed) or 'none'}"
        yield f"failpoints out of reach: {len(NOT_REACHABLE)}"
        for name, why in NOT_REACHABLE.items():
            yield f"  {name:<22} {why}"

    def _judged(self) -> Iterator[str]:
        rate = self.events / self.seconds
        yield f"{self.events:,} events, {rate:.0f} a second; {self.effects:,} effects"
        buried = ", ".join(f"{why} {count}" for why, count in self.verdict.explained.items())
        yield f"buried on the way: {buried or 'none'}; quarantined and released: {self.quarantined}"
        yield f"verified {self.verified} times, the last time at the end"
        yield f"longest stall: {self._longest_seconds():.1f} s"
        yield from (f"  {line}" for line in self.longest_stalls())
        settled = self.verdict.settled_seconds
        if settled is not None:
            yield f"nothing pending {settled:.1f} s after the last fault"
        yield str(self.verdict.books)
        shortcomings = self.shortcomings()
        yield from (f"  WRONG: {line}" for line in shortcomings)
        yield "everything holds" if not shortcomings else f"to replay: {self.command}"

    def _by_signal(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (name, action), count in sorted(self.hits.items()):
            found.setdefault(name, {})[str(action)] = count
        return found

    def _longest_seconds(self) -> float:
        stall = self.longest_stall
        return 0.0 if stall is None else round(stall.seconds, 2)
